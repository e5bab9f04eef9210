"""mbridge's own export and import, in one process: ``export_by_mbridge.py FOLDER`` writes differences.json.

For each tiny model of a family that mbridge converts, under the names of Transformer Engine's layers: what xrank makes
of its tensors against `export_weights`, and what `load_weights` makes of xrank's against the tensors themselves.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from mbridge.core import auto_bridge, safetensor_io
from mbridge.models import deepseek_v3
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tests.recipes.families import known, text
from tests.recipes.families.forms import as_transformer_engine
from tests.recipes.made_vision import VISION_FAMILIES, vision_forms
from tests.recipes.test_every_line import follow
from tests.recipes.test_there_and_back import RECIPES

_DEEP = {"deepseek-v3-mtp": 61}
"""Layers of families that mbridge knows with this number alone."""
_ALIKE = ("qwen2-moe", "qwen3-moe")
"""Families that mbridge knows without dense layers alone."""

Tensors = dict[str, torch.Tensor]


def main(folder: str) -> None:
    """Compare all families that both know; write the names of tensors that differ, by family and direction."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    parallel_state.initialize_model_parallel()
    deepseek_v3.DeepseekV3Bridge.TransformerConfigClass = staticmethod(_make_latent_config)
    found = {name: compare(Path(folder) / name, *case) for name, *case in cases()}
    (Path(folder) / "differences.json").write_text(json.dumps(found))
    sys.stdout.flush()
    # The process group's threads need no end of their own.
    os._exit(0)


def cases() -> Iterator[tuple[str, str, dict[str, Any], Tensors]]:
    """Yield for each tiny model its name, its recipe, config.json, and Megatron's tensors."""
    converted = auto_bridge.AutoBridge.list_supported_models()
    for family in (*known.FAMILIES, *text.FAMILIES):
        if family.config["model_type"] in converted:
            theirs = {key: torch.from_numpy(array) for key, array in family.weights().items()}
            config = family.full_config()
            if family.name in _DEEP:
                config, theirs = _repeat_last(config, theirs, range(config["num_hidden_layers"], _DEEP[family.name]))
            if family.name in _ALIKE:
                config, theirs = _repeat_last({**config, "mlp_only_layers": []}, theirs, range(1))
            yield family.name, family.recipe, config, as_transformer_engine(theirs)
    for name in (*VISION_FAMILIES, "internvl_chat"):
        if name in converted and name != "gemma3":  # mbridge's names of its tower are those of transformers 4
            own = name.replace("_", "-")
            config, theirs = max(_as_mbridge_has(own), key=lambda form: sum(map(_is_its, form[1])))
            yield own, f"megatron-{own}", config, theirs


def _as_mbridge_has(name: str) -> Iterator[tuple[dict[str, Any], Tensors]]:
    """Yield the forms of a vision-language model, under the names of Transformer Engine's layers."""
    for config, _, theirs in vision_forms(name):
        if not any(key.endswith((".weight_w", ".weight_v")) for key in theirs):
            if name.startswith("glm"):
                theirs = {re.sub(r"^visual\.", "vision_model.", key): tensor for key, tensor in theirs.items()}
            yield config, as_transformer_engine(theirs)


def _is_its(name: str) -> bool:
    """Return whether a name is one of mbridge's: a norm within a linear layer, an expert of a group, a tower."""
    return re.search(r"layer_norm_|linear_fc1\.weight\d|^vision_model\.", name) is not None


def _repeat_last(config: Mapping[str, Any], tensors: Tensors, layers: range) -> tuple[dict[str, Any], Tensors]:
    """Return the model with copies of its last layer, which differ in value, as these layers."""
    last = config["num_hidden_layers"] - 1
    found = {
        name: t for name, t in tensors.items() if not name.startswith(tuple(f"decoder.layers.{i}." for i in layers))
    }
    for layer in layers:
        for name, tensor in tensors.items():
            if name.startswith(f"decoder.layers.{last}."):
                found[name.replace(f"layers.{last}.", f"layers.{layer}.", 1)] = tensor + layer + 1
    return {**config, "num_hidden_layers": max(last + 1, layers.stop)}, found


def compare(folder: Path, recipe: str, config: Mapping[str, Any], theirs: Tensors) -> dict[str, Any]:
    """Return the number of tensors, and the names of those that differ in each direction."""
    expected = follow(RECIPES[recipe], dict(config), theirs)
    bridge = auto_bridge.AutoBridge.from_config(_Config(config), dtype=torch.float32)
    exported = dict(bridge.export_weights([_make_module(theirs)]))
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    # DeepSeek's reader of block fp8 needs a GPU.
    bridge._get_safetensor_io = safetensor_io.SafeTensorIO
    module = _make_module({name: torch.zeros_like(tensor) for name, tensor in theirs.items()})
    with torch.no_grad():
        bridge.load_weights([module], str(folder))
    loaded = dict(module.state_dict())
    return {
        "tensors": len(expected), "exported": _differences(exported, expected), "loaded": _differences(loaded, theirs)
    }  # fmt: skip


def _make_latent_config(max_position_embeddings: int, **options: Any) -> MLATransformerConfig:
    """Return Megatron-core 0.16's config, which gave this option another name."""
    return MLATransformerConfig(original_max_position_embeddings=max_position_embeddings, **options)


def _differences(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    wrong = [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]
    return sorted([*wrong, *(found.keys() ^ expected.keys())])


def _make_module(tensors: Tensors) -> torch.nn.Module:
    """Return a module with parameters of these names, whose layers know their numbers, as Megatron's do."""
    root = _VisionLanguageModel() if any(name.startswith("language_model.") for name in tensors) else torch.nn.Module()
    for name, tensor in tensors.items():
        module = root
        *path, last = name.split(".")
        for before, part in zip(["", *path], path, strict=False):
            if not hasattr(module, part):
                child = torch.nn.Module()
                if before == "layers":
                    child.layer_number = int(part) + 1
                module.add_module(part, _Layers() if part == "layers" else child)
            module = getattr(module, part)
        if last == "expert_bias":
            module.register_buffer(last, tensor.clone())
        else:
            module.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return root


class _VisionLanguageModel(torch.nn.Module):
    """A model whose decoder is that of its language model, as mbridge's Glm4VLModel."""

    @property
    def decoder(self) -> torch.nn.Module:
        return self.language_model.decoder


class _Layers(torch.nn.Module):
    """A list of layers by their numbers."""

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter([child for _, child in sorted(self.named_children(), key=lambda each: int(each[0]))])


class _Config:
    """config.json with the keys of transformers 4: those of a text model and of rotary positions at the top, too."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        rope = content.get("rope_parameters") or {}
        text = content.get("text_config") or content.get("llm_config") or {}
        rope = {**(text.get("rope_parameters") or {}), **rope}
        scaling = rope if "mrope_section" in rope else None
        self._content = {
            "rope_theta": 10000.0, "attention_dropout": 0.0, "router_aux_loss_coef": 0.0, "max_position_embeddings": 64,
            **text, **rope, "rope_scaling": scaling, **content,
        }  # fmt: skip
        self._content.setdefault("num_experts", content.get("num_local_experts"))

    def __getattr__(self, name: str) -> Any:
        # transformers 4 lacks the attribute head_dim where its configuration has no such key.
        if name not in self.__dict__["_content"] or (name, self._content[name]) == ("head_dim", None):
            raise AttributeError(name)
        value = self._content[name]
        return _Config(value) if name.endswith("_config") else value

    def __contains__(self, name: str) -> bool:
        return name in self._content


if __name__ == "__main__":
    main(*sys.argv[1:])
