"""A model that lacks a tensor, as far as its own layers show it; right models of uneven layers are taken."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import xrank
from tests.cli.bench import run
from tests.commands.made_workspaces import model_in
from tests.recipes.made_checkpoints import tiny_of
from xrank.recipes.config_proof import find_hole

Shapes = dict[str, tuple[int, ...]]


def layers(count: int = 4, size: int = 4) -> Shapes:
    """Return the shapes of equal layers, each with two experts."""
    inner = {"norm.weight": (size,), "self_attn.q_proj.weight": (size, size), "self_attn.k_proj.weight": (2, size)}
    inner |= {f"mlp.experts.{expert}.{name}.weight": (6, size) for expert in range(3) for name in ("up", "gate")}
    return {"model.embed_tokens.weight": (9, size)} | {
        f"model.layers.{layer}.{name}": shape for layer in range(count) for name, shape in inner.items()
    }


def without(lost: str, shapes: Shapes | None = None) -> Shapes:
    return {name: shape for name, shape in (shapes or layers()).items() if lost not in name}


@pytest.mark.parametrize(
    ("lost", "hole", "others"),
    [
        ("layers.0.", "model.layers.0", 3),
        ("layers.2.", "model.layers.2", 3),
        ("layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight", 3),
        ("layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn.q_proj.weight", 3),
        ("layers.1.norm", "model.layers.1.norm.weight", 3),
        ("layers.2.mlp.experts.1.", "model.layers.2.mlp.experts.1.gate.weight", 3),
        ("layers.2.mlp.experts.2.", "model.layers.2.mlp.experts.2.gate.weight", 3),
        ("layers.2.mlp.experts.2.up", "model.layers.2.mlp.experts.2.up.weight", 3),
    ],
)
def test_a_hole_is_named(lost: str, hole: str, others: int) -> None:
    found = find_hole(without(lost), {})
    assert found is not None and (found.name, found.num_others) == (hole, others)
    assert found.like in layers() and lost not in found.like


def renamed(shapes: Mapping[str, tuple[int, ...]], old: str, new: str) -> Shapes:
    return {name.replace(old, new): shape for name, shape in shapes.items()}


RIGHT: dict[str, tuple[Shapes, dict[str, Any]]] = {
    "equal layers": (layers(), {}),
    "two layers, which show nothing of each other": (without("layers.1.norm", layers(2)), {}),
    "layers of attention and others": (renamed(layers(8), "layers.3.self_attn.q_proj", "layers.3.mamba.in_proj"), {}),
    "a layer of multi-token prediction": (layers() | {"model.layers.3.eh_proj.weight": (4, 8)}, {}),
    "a bias that the first layer has": (layers() | {"model.layers.0.relative.weight": (4, 8)}, {}),
    "layers that share keys": (without("layers.3.self_attn.k_proj"), {"text_config": {"num_kv_shared_layers": 1}}),
    "layers of two types": (without("layers.1.norm"), {"layer_types": ["full", "sliding", "full", "full"]}),
    "a list of layers": (without("layers.1.norm"), {"no_norm_layers": [1]}),
    "every third layer": (
        without("layers.4.norm", without("layers.1.norm", layers(6))),
        {"attn_layer_period": 3},
    ),
    "scales of some layers": (
        layers() | {f"model.layers.{layer}.self_attn.q_proj.weight_scale_inv": (1, 1) for layer in (1, 2, 3)},
        {},
    ),
    "stages of growing width": (
        without("norm", renamed(layers(1, 8), "layers.0", "layers.3"))
        | layers(1, 1)
        | renamed(layers(1, 2), "layers.0", "layers.1")
        | renamed(layers(1, 4), "layers.0", "layers.2"),
        {},
    ),
    "a first layer without a norm, as ModernBERT's": (
        without("layers.0.norm"),
        {"model_type": "pe_audio", "text_config": {"model_type": "modernbert"}},
    ),
    "a sequence with activations": ({f"net.{number}.weight": (4, 4) for number in (0, 2, 4, 6)}, {}),
    "a number beyond those of layers": ({"layers.999999999.a.weight": (4,), "layers.1.a.weight": (4,)}, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_uneven_layers_are_no_holes(name: str) -> None:
    shapes, config = RIGHT[name]
    assert find_hole(shapes, config) is None


def test_config_explains_only_layers_of_one_form() -> None:
    assert find_hole(without("layers.2.norm"), {"layer_types": ["full", "sliding", "sliding", "full"]}) is not None
    assert find_hole(without("layers.2.norm"), {"num_kv_shared_layers": 1, "first_k_dense_replace": 2}) is not None


# ---- the commands


def save_dcp(folder: Path, state: dict[str, torch.Tensor]) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": state}, checkpoint_id=str(folder), no_dist=True)


def save_plain(folder: Path, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")


def save_verl(folder: Path, state: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    torch.save(state, folder / "model_world_size_1_rank_0.pt")


@pytest.mark.parametrize("save", [save_dcp, save_plain, save_verl])
@pytest.mark.parametrize("lost", ["layers.2.", "layers.1.norm"])
def test_a_family_without_a_recipe(
    tmp_path: Path, save: Callable[[Path, dict[str, torch.Tensor]], None], lost: str
) -> None:
    """transformers has the family: exit 3; a base model that has the tensor is compared, and refused, too."""
    shapes = layers(8)
    whole = {name: torch.rand(shape) for name, shape in shapes.items()}
    save_plain(tmp_path / "base", whole)
    save(tmp_path / "step", {name: tensor for name, tensor in whole.items() if lost not in name})
    (tmp_path / "step" / "config.json").write_text('{"model_type": "cohere2_moe", "architectures": ["X"]}')
    ended = run("gather", tmp_path / "step", "--out", tmp_path / "out")
    assert ended.exit_code == 3 and not (tmp_path / "out").exists()
    assert f"model.{lost.rstrip('.')}" in ended.stderr and "no file holds any of it" in ended.stderr
    assert "7 equal modules next to it, such as that of model.layers.0." in ended.stderr
    followed = run("gather", tmp_path / "step", "--out", tmp_path / "out", "--base-model", tmp_path / "base")
    assert followed.exit_code in (3, 4) and not (tmp_path / "out").exists()
    # The advice's other half: the files are brought.
    save(tmp_path / "whole", whole)
    (tmp_path / "whole" / "config.json").write_text('{"model_type": "cohere2_moe", "architectures": ["X"]}')
    assert run("gather", tmp_path / "whole", "--out", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("config", [None, {"model_type": "mine"}, {"model_type": "llama", "auto_map": {"x": "y"}}])
def test_a_family_of_ones_own(tmp_path: Path, config: dict[str, Any] | None) -> None:
    """The layers may be meant so: a note, which the result line names."""
    whole = {name: torch.rand(shape) for name, shape in without("layers.1.norm").items()}
    save_dcp(tmp_path / "step", whole)
    if config is not None:
        (tmp_path / "step" / "config.json").write_text(json.dumps(config))
    ended = run("gather", tmp_path / "step", "--out", tmp_path / "out")
    assert ended.exit_code == 0
    assert "a tensor may be missing: see the note" in " ".join(ended.stdout.split())
    note = "model.layers.1.norm.weight may be missing: the model has 3 equal modules next to it"
    assert note in " ".join(ended.stdout.split())
    assert note in " ".join(run("inspect", tmp_path / "step").stdout.split())


def test_slots_of_shared_blocks_have_no_weights(tmp_path: Path) -> None:
    """Zamba2's blocks have a slot for each layer; those of another block's layers are empty."""
    kinds = {"num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid"] * 3, "num_mem_blocks": 2}
    kinds |= {"mamba_d_state": 4, "mamba_headdim": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "adapter_rank": 4}
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "attention_hidden_size": 32, "use_shared_attention_adapter": True}
    model = tiny_of("zamba2", {**kinds, **sizes})
    model.save_pretrained(tmp_path / "saved")
    assert run("gather", tmp_path / "saved", "--out", tmp_path / "out").exit_code == 0
    xrank.export_model(model, tmp_path / "exported")
    tensors = model_in(tmp_path / "saved")
    assert model_in(tmp_path / "out").keys() == tensors.keys() == model_in(tmp_path / "exported").keys()
    # One tensor less is still seen.
    name = next(name for name in tensors if "layers.2" in name and "in_proj" in name)
    save_file({key: each for key, each in tensors.items() if key != name}, tmp_path / "saved" / "model.safetensors")
    assert run("gather", tmp_path / "saved", "--out", tmp_path / "never").exit_code == 3
