"""Every family from Hugging Face's files to a Megatron job of two tensor-parallel ranks, and back to the same files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.recipes.families import FAMILIES, Family
from tests.recipes.made_checkpoints import leave
from tests.recipes.test_there_and_back import RECIPES, model_of
from tests.sampled import sampled
from xrank import gather_checkpoint, reshard_checkpoint
from xrank.readers.megatron.layouts import layout_of
from xrank.recipes.recipe import match
from xrank.recipes.recipe_choice import follow_recipe

pytestmark = pytest.mark.timeout(120)


RENAMED = ("nemotron-h", "glm4v", "gemma3-vl-layers")
"""Families of which a recipe knows several names, and makes others backwards than `recorded` has."""


def shapes_backwards(family: Family, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of Megatron's tensors by the names that the recipe makes of Hugging Face's files."""
    shapes = {name: tuple(t.shape) for name, t in safetensors.torch.load_file(folder / "model.safetensors").items()}
    found = match(RECIPES[family.recipe], shapes, is_reversed=True)
    made = follow_recipe(model_of(shapes), found, family.full_config())
    return {shard.name: shard.shape for shard in made.shards}


def write_layout(file: Path, family: Family, shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """Write the layout of a family's tensors over `tp`, experts cut by the same ranks."""
    args = family.full_args()
    is_gated = any(args.get(key) for key in ("swiglu", "quick_geglu", "gated_linear_unit"))
    rules = []
    for name, shape in shapes.items():
        layout = layout_of(name, is_gated=is_gated)
        text = "[" + ", ".join("abcde"[: len(shape)]) + "]" if layout is None else str(layout)
        rules.append(f'"{name}" = "{text.replace("/etp", "/tp")}"')
    file.write_text(f'[mesh]\ngrid = "tp={family.num_ways}"\n[tensors]\n' + "\n".join(rules))
    return file


@pytest.mark.parametrize("name", sampled(FAMILIES, 3))
def test_there_and_back(tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    tensors = {key: torch.from_numpy(array) for key, array in family.weights().items()}
    gather_checkpoint(leave(tmp_path / "ws", tensors, family.full_config()), tmp_path / "hf")
    shapes = family.recorded["shapes"]
    if name in RENAMED:
        shapes = shapes_backwards(family, tmp_path / "hf")
    layout = write_layout(tmp_path / "layout.toml", family, shapes)
    reshard_checkpoint(tmp_path / "hf", layout, tmp_path / "job", recipe=family.recipe)
    held = torch.load(tmp_path / "job" / "rank_0_state.pth", weights_only=True)["weight"]
    assert held.keys() == shapes.keys()
    report = gather_checkpoint(tmp_path / "job", tmp_path / "again")
    assert report.source["recipe"] == family.recipe
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "hf" / file).read_bytes()
