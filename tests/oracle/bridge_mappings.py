"""Megatron-Bridge's own mappings in one process: ``bridge_mappings.py FAMILY`` compares them with transformers' files.

Tensors of a tiny model under Megatron's names, which tests of recipes gather, go through the mappings one by one.
``bridge_mappings.py text`` compares those of all text models with what xrank's recipes make of the same tensors. The
program needs the packages megatron-bridge and mbridge, unpacked without their dependencies, on ``PYTHONPATH``.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

_ABSENT = (
    "transformer_engine", "transformer_engine_torch", "triton", "nvidia_resiliency_ext", "hydra", "mamba_ssm",
    "causal_conv1d", "fla", "flash_attn", "wandb", "qwen_vl_utils", "timm", "open_clip", "tensorboard", "datasets",
    "peft", "sentencepiece",
)  # fmt: skip

BRIDGES = {
    "qwen2_5_vl": ("qwen_vl.qwen25_vl_bridge", "Qwen25VLBridge"),
    "qwen3_vl": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLBridge"),
    "qwen3_vl_moe": ("qwen_vl.qwen3_vl_bridge", "Qwen3VLMoEBridge"),
    "glm4v_moe": ("glm_vl.glm_45v_bridge", "GLM45VBridge"),
    "gemma3": ("gemma_vl.gemma3_vl_bridge", "Gemma3VLBridge"),
    "mistral3": ("ministral3.ministral3_bridge", "Ministral3Bridge"),
    "nemotron_h": ("nemotronh.nemotron_h_bridge", "NemotronHBridge"),
    "qwen3_next": ("qwen.qwen3_next_bridge", "Qwen3NextBridge"),
}
TEXT_BRIDGES = {
    "llama": ("llama.llama_bridge", "LlamaBridge"),
    "nemotron-nas": ("llama_nemotron.llama_nemotron_bridge", "LlamaNemotronBridge"),
    "mistral": ("mistral.mistral_bridge", "MistralBridge"),
    "qwen2": ("qwen.qwen2_bridge", "Qwen2Bridge"),
    "qwen3": ("qwen.qwen3_bridge", "Qwen3Bridge"),
    "deepseek-v2": ("deepseek.deepseek_v2_bridge", "DeepSeekV2Bridge"),
    "deepseek-v2-lite": ("deepseek.deepseek_v2_bridge", "DeepSeekV2Bridge"),
    "deepseek-v3": ("deepseek.deepseek_v3_bridge", "DeepSeekV3Bridge"),
    "glm4-moe": ("glm.glm45_bridge", "GLM45Bridge"),
    "glm4-moe-mtp": ("glm.glm45_bridge", "GLM45Bridge"),
    "nemotron": ("nemotron.nemotron_bridge", "NemotronBridge"),
    "gemma": ("gemma.gemma_bridge", "GemmaBridge"),
    "gemma2": ("gemma.gemma2_bridge", "Gemma2Bridge"),
    "gemma3": ("gemma.gemma3_bridge", "Gemma3ModelBridge"),
    "gpt-oss": ("gpt_oss.gpt_oss_bridge", "GPTOSSBridge"),
    "olmoe": ("olmoe.olmoe_bridge", "OlMoEBridge"),
}
"""By the names of `tests.recipes.families`."""


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of packages that only GPUs run; nothing of them is called here."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in _ABSENT or name.startswith("megatron.energon"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


class _AbsentModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.9.0"
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, made)
        return made


def main(family: str) -> None:
    """Compare one family; exit with 1 if a name or a value differs."""
    sys.meta_path.insert(0, _Absent())
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel()
    if family == "text":
        compare_texts()
    from tests.recipes.made_checkpoints import saved
    from tests.recipes.made_hybrids import HYBRID_FAMILIES, as_megatron_hybrid, tiny_hybrid
    from tests.recipes.made_vision import as_megatron_vision, tiny_vision

    is_hybrid = family in HYBRID_FAMILIES
    # The bridges know experts in every layer alone.
    changes = {"mlp_only_layers": []} if family in ("qwen3_vl_moe", "qwen3_next") else {}
    model = (tiny_hybrid if is_hybrid else tiny_vision)(family, **changes)
    options = {} if family == "nemotron_h" else {"te": True}
    tensors = (as_megatron_hybrid if is_hybrid else as_megatron_vision)(
        model, experts="linear_fc{1}.weight{0}", **options
    )
    expected = saved(model)
    if family == "gemma3":  # whose head is the embedding's tensor, always
        del tensors["language_model.output_layer.weight"], expected["language_model.lm_head.weight"]
    found = export(BRIDGES[family], tensors, model.config)
    if family == "qwen3_vl_moe":  # as the Hub's files have them
        expected = {name: t.transpose(1, 2) if ".experts." in name else t for name, t in expected.items()}
    sys.stdout.flush()
    os._exit(bool(report(family, found, expected)))


def compare_texts() -> None:
    """Compare the text models, and exit with their number of differences."""
    import torch

    from tests.recipes.families import FAMILIES
    from tests.recipes.families.forms import as_transformer_engine
    from tests.recipes.test_every_line import follow
    from tests.recipes.test_there_and_back import RECIPES

    num_wrong = 0
    for name, bridge in TEXT_BRIDGES.items():
        family = FAMILIES[name]
        config = family.full_config()
        tensors = as_transformer_engine({key: torch.from_numpy(array) for key, array in family.weights().items()})
        expected = follow(RECIPES[family.recipe], config, tensors)
        its = SimpleNamespace(**config)
        its.get_text_config = lambda its=its: its
        num_wrong += report(name, export(bridge, tensors, its), expected)
    sys.stdout.flush()
    os._exit(min(num_wrong, 1))


def report(family: str, found: dict[str, Any], expected: dict[str, Any]) -> int:
    """Print and count the tensors that differ in name or value."""
    import torch

    wrong = sorted(found.keys() ^ expected.keys())
    wrong += [name for name in found.keys() & expected.keys() if not torch.allclose(found[name], expected[name])]
    print(f"{family}: {len(found)} tensors, {len(wrong)} differ", *wrong[:8])
    return len(wrong)


def export(bridge_name: tuple[str, str], tensors: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return what the bridge's mappings make of Megatron's tensors."""
    import torch

    module, name = bridge_name
    bridge = getattr(importlib.import_module(f"megatron.bridge.models.{module}"), name)()
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    made_config = make_config(config)

    class Whole(torch.nn.Module):
        """A layer of one rank."""

        config = made_config

    AutoMapping.register_module_type("Whole", "replicated")
    bridge.hf_config = bridge._hf_config = config
    registry = bridge.mapping_registry()
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        mapping = registry.megatron_to_hf_lookup(name)
        if mapping is None:
            print(f"{bridge_name[1]} has no mapping for {name}")
            continue
        blocks = getattr(config, "block_configs", None)
        if blocks and ".linear_qkv." in name:  # Megatron gives each of such layers a config of its own
            heads = blocks[int(name.split(".")[2])]["attention"]["n_heads_in_group"]
            made_config.num_query_groups = config.num_attention_heads // heads
        made = mapping.megatron_to_hf(tensor.contiguous(), Whole())
        task = SimpleNamespace(param_name=name, global_param_name=name)
        found |= bridge.maybe_modify_converted_hf_weight(task, made, {})
    return found


def make_config(config: Any) -> SimpleNamespace:
    """Return Megatron's config of the same model, as far as mappings read it."""
    text = config.get_text_config()
    get = lambda name: getattr(text, name, None)  # noqa: E731
    return SimpleNamespace(
        num_attention_heads=text.num_attention_heads, num_query_groups=text.num_key_value_heads,
        kv_channels=get("head_dim"), hidden_size=text.hidden_size,
        num_moe_experts=get("num_experts") or get("n_routed_experts") or get("num_local_experts"),
        attention_output_gate=text.model_type == "qwen3_next",
        mamba_num_heads=get("mamba_num_heads"), mamba_head_dim=get("mamba_head_dim"),
        mamba_num_groups=get("n_groups"), mamba_state_dim=get("ssm_state_size"),
        linear_num_key_heads=get("linear_num_key_heads"), linear_num_value_heads=get("linear_num_value_heads"),
        linear_key_head_dim=get("linear_key_head_dim"), linear_value_head_dim=get("linear_value_head_dim"),
        vocab_size=text.vocab_size, tensor_model_parallel_size=1,
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
