"""Families with state space mixers, from Megatron-core's names to a folder that transformers loads, and back."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.recipes.made_checkpoints import config_of, leave, saved
from tests.recipes.made_hybrids import as_megatron_hybrid, tiny_hybrid
from tests.recipes.test_there_and_back import RECIPES
from tests.recipes.test_there_and_back import model_of as stored_model
from xrank import gather_checkpoint
from xrank.recipes.recipe import match
from xrank.recipes.recipe_choice import follow_recipe

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str) -> torch.nn.Module:
    return tiny_hybrid(family)


def test_a_number_is_added_before_a_cast(tmp_path: Path) -> None:
    model = model_of("qwen3_next")
    tensors = as_megatron_hybrid(model)
    source = leave(tmp_path / "ws", tensors, config_of(model))
    gather_checkpoint(source, tmp_path / "out", dtype="bf16")
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    expected = (tensors["decoder.layers.0.self_attention.out_norm.weight"] + 1).bfloat16()
    assert torch.equal(found["model.layers.0.linear_attn.norm.weight"], expected)


def test_backwards_norms_go_where_their_blocks_are(tmp_path: Path) -> None:
    model = model_of("nemotron_h")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved(model).items()}
    found = match(RECIPES["megatron-nemotron-h"], shapes, is_reversed=True)
    assert found.fits
    made = follow_recipe(stored_model(shapes), found, config_of(model))
    norms = {shard.name for shard in made.shards if "layernorm" in shard.name or "layer_norm" in shard.name}
    assert norms == {
        "decoder.layers.0.mixer.in_proj.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.2.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.4.mixer.in_proj.layer_norm_weight",
        "decoder.layers.5.self_attention.linear_qkv.layer_norm_weight",
    }


def test_a_number_is_taken_backwards() -> None:
    model = model_of("qwen3_next")
    shapes = {name: tuple(tensor.shape) for name, tensor in saved(model).items()}
    found = match(RECIPES["megatron-qwen3-next"], shapes, is_reversed=True)
    made = follow_recipe(stored_model(shapes), found, config_of(model))
    added = {shard.name: shard.added for shard in made.shards if shard.added}
    assert added == {f"decoder.layers.{layer}.self_attention.out_norm.weight": -1 for layer in range(3)}
