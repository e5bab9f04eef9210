"""Families with state space mixers, from Megatron-core's names to a folder that transformers loads, and back."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.cli.bench import run as run_command
from tests.readers.made_megatron import Run, write_dist, write_legacy
from tests.recipes.made_checkpoints import config_of, leave, saved
from tests.recipes.made_hybrids import HYBRID_FAMILIES, apart, as_megatron_hybrid, packed_rows, tiny_hybrid
from tests.recipes.test_there_and_back import RECIPES
from tests.recipes.test_there_and_back import model_of as stored_model
from xrank import gather_checkpoint
from xrank.recipes.recipe import match
from xrank.recipes.recipe_choice import follow_recipe

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str) -> torch.nn.Module:
    return tiny_hybrid(family)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check values bit by bit, except for those from which one was taken and to which it was added."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        is_equal = torch.allclose if name.endswith("linear_attn.norm.weight") else torch.equal
        assert is_equal(found[name], tensor), name


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_folder_that_transformers_loads(tmp_path: Path, family: str) -> None:
    import transformers

    model = model_of(family)
    source = leave(tmp_path / "ws", as_megatron_hybrid(model, vocab=48), config_of(model))
    report = gather_checkpoint(source, tmp_path / "out")
    assert report.source["recipe"] == f"megatron-{family.replace('_', '-')}"
    assert_close(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved(model))
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.allclose(loaded.eval()(tokens).logits, model(tokens).logits, atol=1e-3)


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
@pytest.mark.parametrize("kind", ["legacy", "dist"])
def test_checkpoints_of_many_ranks(tmp_path: Path, family: str, kind: str) -> None:
    model = model_of(family)
    config, tensors = config_of(model), as_megatron_hybrid(model, vocab=40)
    count = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("decoder.layers."))
    halves = ((count // 2, count - count // 2),)
    run = Run(tp=2, pp=2, ep=2, chunks=halves, has_experts=True, args=args_of(config, count))
    packed = {own: [*rows.values()] for own, rows in packed_rows(model.config).items()}
    run = replace(run, gated=family != "nemotron_h", packed=packed)
    if kind == "dist":
        write_dist(tmp_path / "ckpt", run, apart(tensors, model.config))
    else:
        write_legacy(tmp_path / "ckpt", run, tensors)
    (tmp_path / "ckpt" / "config.json").write_text(json.dumps(config))
    ended = run_command("gather", tmp_path / "ckpt", "--out", tmp_path / "out")
    assert ended.exit_code == 0, ended.stderr
    assert_close(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved(model))


def args_of(config: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the arguments of a run of a model with that config."""
    args = {
        "num_layers": count, "hidden_size": 24, "ffn_hidden_size": 20, "num_attention_heads": 6, "num_query_groups": 2,
        "kv_channels": 8, "group_query_attention": True, "vocab_size": 37, "padded_vocab_size": 40,
        "moe_ffn_hidden_size": 12, "moe_shared_expert_intermediate_size": 16,
    }  # fmt: skip
    if config["model_type"] == "nemotron_h":
        return args | {
            "hybrid_override_pattern": "M*-EM*", "mamba_num_heads": 4, "mamba_head_dim": 6, "mamba_num_groups": 2,
            "mamba_state_dim": 5, "squared_relu": True, "position_embedding_type": "none",
        }  # fmt: skip
    return args | {
        "linear_attention_freq": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 8, "linear_key_head_dim": 4,
        "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4, "apply_layernorm_1p": True,
    }  # fmt: skip


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
