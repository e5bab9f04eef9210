"""Random bf16 models of several families whose widths fit groups of 128, and the checkpoints of them made here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.families import FAMILIES, Family
from tests.recipes.test_resharded_families import shapes_backwards
from xrank import reshard_checkpoint

__all__ = ["KEPT", "MODELS", "make_model", "read_tensors", "write_megatron"]

_SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 160, "max_position_embeddings": 64,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
_TOWER = {
    "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "patch_size": 2, "out_hidden_size": 256,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
}  # fmt: skip
_SECTIONS = [8, 12, 12]
_YARN = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def _family(name: str, args: Mapping[str, Any] | None = None, **config: Any) -> Family:
    """Return a family of tests/recipes with these sizes, and these of Megatron's arguments beside its own."""
    family = FAMILIES[name]
    sizes = {**_SIZES, **config}
    if "text_config" in family.config:
        text = {**family.config["text_config"], **sizes}
        made = {**family.config, "text_config": text, "vision_config": _TOWER}
    else:
        made = {**family.config, **sizes}
    return dataclasses.replace(family, config=made, args={**family.args, **(args or {})})


MODELS: dict[str, Family] = {
    "llama": _family("llama"),
    "qwen3-moe": _family("qwen3-moe", **_EXPERTS),
    "gemma3": _family("gemma3", query_pre_attn_scalar=64),
    "deepseek-v3": _family(
        "deepseek-v3", **_EXPERTS, num_key_value_heads=4, q_lora_rank=128, kv_lora_rank=128, qk_nope_head_dim=32,
        qk_rope_head_dim=32, v_head_dim=64, head_dim=32, topk_method="noaux_tc",
    ),
    "gpt-oss": _family("gpt-oss", {"moe_ffn_hidden_size": 256}, intermediate_size=256, rope_parameters=_YARN),
    "qwen3-vl": _family("qwen3-vl", {"mrope_section": _SECTIONS}, rope_parameters={
        "rope_type": "default", "mrope_section": _SECTIONS, "rope_theta": 10000.0,
    }),
}  # fmt: skip
"""Name -> family. DeepSeek's rotary keys, 32 rows behind 128 of latents, leave a block of fewer rows."""

KEPT = {"gpt-oss": (r".*\.experts.*",)}
"""Name -> modules to keep: whole stacks of experts with biases, whose gate and up are columns in turns."""


def make_model(name: str) -> transformers.PreTrainedModel:
    """Return a model in bf16; all values differ, but for a row and a block of zeros, and a row with a subnormal one."""
    family = MODELS[name]
    torch.manual_seed(sorted(MODELS).index(name))
    config = transformers.AutoConfig.for_model(**{"bos_token_id": 1, "eos_token_id": 2, **_copied(family.config)})
    model = getattr(transformers, family.auto_class).from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in key
            parameter.copy_(torch.randn(parameter.shape) * 0.06 + (is_norm and family.name != "gemma3"))
            if key.endswith(("q_proj.weight", "gate_proj.weight", "q_a_proj.weight", "qkv.weight")):
                parameter[5:7] = 0
                parameter[6, 1] = torch.finfo(parameter.dtype).tiny / 4
                parameter[:128, 128:256] = 0
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):  # which transformers keeps in fp32, too
                module.e_score_correction_bias.data = torch.randn(module.e_score_correction_bias.shape)
    return model.eval()


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(config))  # transformers fills in the dicts of a config in place
    return copied


def write_megatron(folder: Path, name: str, model: Path, *, is_dist: bool) -> Path:
    """Write a model as ranks of TP2 x PP2, and of EP2 where it has experts, leave it; return the folder.

    The names and values are made backwards by the recipe, of a model's folder; the cuts are plain slices.

    Args:
        folder: where it is made.
        name: one of `MODELS`.
        model: the folder of the whole model.
        is_dist: in the format of torch_dist, else a file a rank.
    """
    family = MODELS[name]
    layout = folder / "whole.toml"
    folder.mkdir(parents=True, exist_ok=True)
    shapes = shapes_backwards(family, model)
    lines = (f'"{key}" = "[{", ".join("abcde"[: len(shape)])}]"' for key, shape in shapes.items())
    layout.write_text('[mesh]\ngrid = "r=1"\n[tensors]\n' + "\n".join(lines))
    reshard_checkpoint(model, layout, folder / "whole", recipe=family.recipe)
    tensors = torch.load(folder / "whole" / "rank_0_state.pth", weights_only=True)["weight"]
    args = family.full_args()
    has_experts = any("local_experts" in key for key in tensors)
    run = Run(
        tp=2, pp=2, ep=2 if has_experts else 1, chunks=((1, 1),), has_experts=has_experts, args=args,
        gated=any(args.get(key) for key in ("swiglu", "quick_geglu", "gated_linear_unit")), plain=("vision_",),
        tied=not args["untie_embeddings_and_output_weights"],
    )  # fmt: skip
    (write_dist if is_dist else write_legacy)(folder / "checkpoint", run, tensors)
    return folder / "checkpoint"


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files of a model folder."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }
