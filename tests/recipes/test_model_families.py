"""Every family of models, from Megatron-core's names to a folder that transformers loads: tensors and logits equal."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.recipes.made_checkpoints import (
    FAMILIES,
    as_megatron,
    expert_forms,
    leave,
    saved,
    stacked,
    tiny,
)
from tests.recipes.made_checkpoints import config_of as config_of_model
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, UsageError

pytestmark = pytest.mark.timeout(120)


@cache
def model_of(family: str, **changes: Any) -> torch.nn.Module:
    return tiny(family, **changes)


@cache
def saved_of(family: str, **changes: Any) -> dict[str, torch.Tensor]:
    return saved(model_of(family, **changes))


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return config_of_model(model_of(family, **changes))


def megatron(family: str, *, changes: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    return as_megatron(model_of(family, **(changes or {})), **options)


def gathered(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None, **options: Any
) -> dict[str, torch.Tensor]:
    gather_checkpoint(leave(folder / "ws", tensors, config), folder / "out", **options)
    return safetensors.torch.load_file(folder / "out" / "model.safetensors")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_transformers_loads(tmp_path: Path, family: str) -> None:
    import transformers

    model, tensors = model_of(family), megatron(family, vocab=48)
    report = gather_checkpoint(leave(tmp_path / "ws", tensors, config_of(family)), tmp_path / "out")
    assert report.source["recipe"] == f"megatron-{family.replace('_', '-')}"
    assert ("padding-cut", "embedding.word_embeddings.weight: 11 rows of padding") in report.notes
    manifest = json.loads((tmp_path / "out" / "xrank_manifest.json").read_text())
    (table,) = [name for name in manifest["tensors"] if name.endswith(("embed_tokens.weight", "wte.weight"))]
    assert report.output is not None
    assert report.output["padding_dropped"][table] == manifest["padding_dropped"][table] == 11
    assert_equal(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), saved_of(family))
    loaded, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_layers_in_one_tensor(tmp_path: Path, family: str) -> None:
    tensors = stacked(megatron(family, te=True), "decoder.layers.")
    assert_equal(gathered(tmp_path, tensors, config_of(family)), saved_of(family))


def test_experts_behind_layers_in_one_tensor(tmp_path: Path) -> None:
    tensors = stacked(expert_forms(model_of("mixtral"))["stacked"], "decoder.layers.")
    assert tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape == (3, 4, 40, 24)
    assert_equal(gathered(tmp_path, tensors, config_of("mixtral")), saved_of("mixtral"))


def test_experts_in_every_layer(tmp_path: Path) -> None:
    whole = {"mlp_only_layers": ()}
    tensors = stacked(megatron("qwen3_moe", changes=whole, te=True), "decoder.layers.")
    assert_equal(gathered(tmp_path, tensors, config_of("qwen3_moe", **whole)), saved_of("qwen3_moe", **whole))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2_moe", {"qkv_bias": False}),
        ("glm4_moe", {"attention_bias": True}),
        ("glm4_moe", {"use_qk_norm": False}),
        ("glm4_moe", {"first_k_dense_replace": 0}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("gpt2", {"n_inner": 44}),
        ("gpt2", {"tie_word_embeddings": False}),
    ],
)
def test_variants(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    tensors = megatron(family, changes=changes, vocab=40)
    if changes == {"tie_word_embeddings": False}:
        tensors["output_layer.weight"] = saved_of(family, **changes)["lm_head.weight"]
    assert_equal(gathered(tmp_path, tensors, config_of(family, **changes)), saved_of(family, **changes))


def without(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if part not in name}
    assert len(found) < len(tensors)
    return found


_MOE = "2.mlp.experts.local_experts.3.linear_fc2"
_DENSE = {"decoder.layers.0.mlp.linear_fc2.weight": torch.ones(24, 20)}
# test_wrong_models makes all kinds of mistakes about each family.
WRONG: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "biases that config denies": (
        lambda: megatron("llama", changes={"attention_bias": True, "mlp_bias": True}),
        lambda: config_of("llama"),
        ContradictionError,
        "bias belongs to models with (attention|mlp)_bias, and this model is not one",
    ),
    "biases missing": (
        lambda: megatron("llama"),
        lambda: config_of("llama", attention_bias=True),
        ContradictionError,
        "model.layers.0.self_attn.q_proj.bias: nothing in the source becomes it",
    ),
    "no k norm": (
        lambda: without(megatron("qwen3"), "k_layernorm"),
        lambda: config_of("qwen3"),
        UsageError,
        "no recipe fits its names",
    ),
    "one expert's matrix missing": (
        lambda: without(megatron("mixtral"), _MOE),
        lambda: config_of("mixtral"),
        ContradictionError,
        "model.layers.2.block_sparse_moe.experts.3.w2.weight: nothing",
    ),
    "two kinds of blocks": (
        lambda: {**megatron("qwen3_moe"), **_DENSE},
        lambda: config_of("qwen3_moe"),
        ContradictionError,
        "layer 0 has tensors of dense and experts blocks",
    ),
    "experts where config denies them": (
        lambda: megatron("qwen2_moe"),
        lambda: config_of("qwen2_moe", mlp_only_layers=()),
        ContradictionError,
        "is of the group dense, which layer 1 lacks by config.json",
    ),
    "another part of heads is turned": (
        lambda: megatron("deepseek_v3"),
        lambda: {**config_of("deepseek_v3"), "qk_rope_head_dim": 6, "qk_nope_head_dim": 4},
        ContradictionError,
        "does not fit",
    ),
    "one bias of GPT-2 missing": (
        lambda: without(megatron("gpt2"), "layers.2.mlp.linear_fc1.bias"),
        lambda: config_of("gpt2"),
        ContradictionError,
        "transformer.h.2.mlp.c_fc.bias: nothing",
    ),
}
OTHERS = ["qwen2 llama", "llama qwen2", "qwen3 qwen2", "qwen2_moe qwen3_moe", "deepseek_v3 glm4_moe"]
OTHERS += ["deepseek_v3 deepseek_v2", "deepseek_v2 deepseek_v3"]
"""Families with the config.json of another."""


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_variants_are_refused(tmp_path: Path, kind: str) -> None:
    made, config, error, says = WRONG[kind]
    with pytest.raises(error, match=says):
        gathered(tmp_path, made(), config())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pair", OTHERS)
def test_config_of_another_family_is_refused(tmp_path: Path, pair: str) -> None:
    family, other = pair.split()
    with pytest.raises(UsageError, match="not clear"):
        gathered(tmp_path, megatron(family), config_of(other))
