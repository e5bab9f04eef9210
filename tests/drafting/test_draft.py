"""``xrank recipe draft``: it finds the recipes of renamed and fused models, and names what it cannot decide."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import refusal, run
from tests.drafting.refused import (
    as_fused_experts,
    as_interleaved,
    as_megatron_gpt_oss,
    as_stacks,
    tiny_gpt_oss,
    trained,
)
from tests.recipes.made_checkpoints import as_megatron, as_torchtitan, expert_forms, saved, tiny

pytestmark = [pytest.mark.timeout(180)]

State = dict[str, torch.Tensor]


@cache
def model(family: str) -> torch.nn.Module:
    return tiny_gpt_oss() if family == "gpt_oss" else tiny(family)


@cache
def state(family: str) -> State:
    return saved(model(family))


def leave_both(folder: Path, family: str, source: State, base: State | None = None) -> tuple[Path, Path]:
    """Leave the source, and the base model; return their folders."""
    for name in ("src", "base"):
        (folder / name).mkdir()
    model(family).config.save_pretrained(folder / "base")
    config = json.loads((folder / "base" / "config.json").read_text())
    config["architectures"] = [type(model(family)).__name__]
    (folder / "base" / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in (base or state(family)).items()}, folder / "base" / "model.safetensors")
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in source.items()}, folder / "src" / "model.safetensors"
    )
    return folder / "src", folder / "base"


def drafted(folder: Path, family: str, source: State, base: State | None = None) -> dict[str, Any]:
    """Draft a recipe, and return its report."""
    paths = leave_both(folder, family, source, base)
    ended = run("recipe", "draft", paths[0], "--base-model", paths[1], "--out", folder / "own.toml", "--json")
    assert ended.exit_code == 0, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    assert report["toml"] == (folder / "own.toml").read_text()
    return report


def gathered(folder: Path) -> State:
    """Check the draft, gather by it, and return the tensors."""
    shutil.copy(folder / "base" / "config.json", folder / "src")
    ended = run("recipe", "check", folder / "own.toml", folder / "src", "--base-model", folder / "base")
    assert ended.exit_code == 0, ended.stdout + ended.stderr
    options = ("--recipe", folder / "own.toml", "--base-model", folder / "base", "--out", folder / "out")
    ended = run("gather", folder / "src", *options)
    assert ended.exit_code == 0, ended.stderr
    return load_file(folder / "out" / "model.safetensors")


def assert_equal(made: State, expected: State) -> None:
    assert made.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(made[name], tensor)] == []


SOURCES: dict[str, tuple[str, Callable[[], State]]] = {
    "llama-megatron": ("llama", lambda: as_megatron(model("llama"), vocab=48)),
    "llama-torchtitan": ("llama", lambda: as_torchtitan(model("llama"))),
    "llama-stacks": ("llama", lambda: as_stacks(state("llama"))),
    "llama-interleaved": ("llama", lambda: as_interleaved(state("llama"))),
    "qwen3-moe-megatron": ("qwen3_moe", lambda: as_megatron(model("qwen3_moe"), te=True)),
    "qwen3-moe-te-grouped": ("qwen3_moe", lambda: expert_forms(model("qwen3_moe"))["te-grouped"]),
    "qwen3-moe-stacked": ("qwen3_moe", lambda: expert_forms(model("qwen3_moe"))["stacked"]),
    "qwen3-moe-fused": ("qwen3_moe", lambda: as_fused_experts(state("qwen3_moe"))),
    "gpt-oss-megatron": ("gpt_oss", lambda: as_megatron_gpt_oss(state("gpt_oss"))),
    "deepseek-v3-megatron": ("deepseek_v3", lambda: as_megatron(model("deepseek_v3"))),
    "gpt2-megatron": ("gpt2", lambda: as_megatron(model("gpt2"), vocab=40)),
}


@pytest.mark.parametrize("case", SOURCES)
@pytest.mark.parametrize("is_trained", [False, True], ids=["equal", "trained"])
def test_a_gather_by_the_draft_is_the_model(tmp_path: Path, case: str, is_trained: bool) -> None:
    """Also where the source was trained further from the base model, so that no matrix is equal."""
    family, make = SOURCES[case]
    base = trained(state(family)) if is_trained else state(family)
    report = drafted(tmp_path, family, make(), base)
    assert [row for row in report["undecided"] if "norm" not in row["names"][0] and "bias" not in row["names"][0]] == []
    right = sum(rule["tensors"] for rule in report["rules"])
    if not is_trained:
        assert (report["undecided"], report["missing"]) == ([], [])
        assert {rule["evidence"] for rule in report["rules"]} == {"equal values"}
    assert right >= 0.95 * report["source"]["num_tensors"], report["undecided"]
    if not report["undecided"]:
        assert_equal(gathered(tmp_path), state(family))


def test_llamas_draft_is_the_shipped_recipe(tmp_path: Path) -> None:
    drafted(tmp_path, "llama", as_megatron(model("llama"), vocab=48))
    text = (tmp_path / "own.toml").read_text()
    assert 'padded = ["v"]' in text and 'g = ["num_key_value_heads", "num_attention_heads"]' in text
    assert '[tensors."decoder.layers.{L}.self_attention.linear_qkv.weight [g <q: r d | k: d | v: d>, h]"]' in text
    assert (
        '"decoder.layers.{L}.mlp.linear_fc2.weight [h, f]" = "model.layers.{L}.mlp.down_proj.weight [h, f]"\n' in text
    )


def test_layers_of_two_kinds_are_groups(tmp_path: Path) -> None:
    drafted(tmp_path, "qwen3_moe", as_fused_experts(state("qwen3_moe")))
    text = (tmp_path / "own.toml").read_text()
    assert 'experts = "layers every decoder_sparse_step and not in mlp_only_layers"' in text
    assert 'dense = "layers in mlp_only_layers"' in text


def test_frozen_tensors_are_equal_and_trained_ones_similar(tmp_path: Path) -> None:
    source = as_megatron(model("llama"))
    report = drafted(tmp_path, "llama", trained(source, lambda name: "embed" in name or "norm" in name))
    found = {rule["source"].partition(" ")[0].rpartition(".")[0]: rule["evidence"] for rule in report["rules"]}
    assert found["embedding.word_embeddings"] == found["decoder.final_layernorm"] == "equal values"
    assert found["decoder.layers.{L}.mlp.linear_fc1"] == found["output_layer"] == "similar values"
    assert "# by similar values" in report["toml"] and report["undecided"] == []


def test_equal_values_nowhere(tmp_path: Path) -> None:
    """Names and shapes alone: fusions stay undecided, and nothing that is decided is wrong."""
    torch.manual_seed(3)
    source = {name: torch.randn(tensor.shape) for name, tensor in as_megatron(model("llama")).items()}
    report = drafted(tmp_path, "llama", source)
    pairs = {rule["source"].partition(" ")[0]: rule["targets"][""].partition(" ")[0] for rule in report["rules"]}
    assert pairs.pop("decoder.layers.{L}.mlp.linear_fc2.weight") == "model.layers.{L}.mlp.down_proj.weight"
    assert pairs.pop("decoder.layers.{L}.input_layernorm.weight") == "model.layers.{L}.input_layernorm.weight"
    pairs.pop("decoder.layers.{L}.self_attention.linear_proj.weight", None)
    pairs.pop("decoder.final_layernorm.weight", None)
    assert pairs == {}
    assert {rule["evidence"] for rule in report["rules"]} <= {"names", "shapes"}
    undecided = {row["names"][0] for row in report["undecided"]}
    assert {
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "output_layer.weight",
        "embedding.word_embeddings.weight",
    } <= undecided
    for name in undecided:
        assert re.search(rf"^# {re.escape(name)} \[", report["toml"], re.MULTILINE)


@pytest.mark.parametrize("names", [("norm_a", "norm_b"), ("input_layernorm", "post_attention_layernorm")])
def test_equal_norms_are_decided_by_names_or_not_at_all(tmp_path: Path, names: tuple[str, str]) -> None:
    base = {n: torch.ones_like(t) if "norm" in n else t for n, t in state("llama").items()}
    source = {}
    for name, tensor in base.items():
        for old, new in zip(("input_layernorm", "post_attention_layernorm"), names, strict=True):
            name = name.replace(old, new)
        source[name.replace("model.", "net.").replace("self_attn", "attn")] = tensor
    report = drafted(tmp_path, "llama", source, base)
    if names[0] == "norm_a":
        assert [row["names"][0] for row in report["undecided"]] == [
            "net.layers.0.norm_a.weight",
            "net.layers.0.norm_b.weight",
        ]
        assert "input_layernorm" in report["undecided"][0]["reason"]
        assert "post_attention_layernorm" in report["undecided"][0]["reason"]
        return
    assert report["undecided"] == []
    evidence = {rule["source"]: rule["evidence"] for rule in report["rules"]}
    assert evidence["net.layers.{L}.input_layernorm.weight [h]"] == "equal values and names"
    assert_equal(gathered(tmp_path), base)


def test_the_order_of_experts_and_layers_counts(tmp_path: Path) -> None:
    """One layer whose experts are in another order contradicts the rule that the middle layer gives."""
    source = as_fused_experts(state("qwen3_moe"))
    source["blocks.0.moe.w2"] = source["blocks.0.moe.w2"].flip(0)
    report = drafted(tmp_path, "qwen3_moe", source)
    [row] = report["undecided"]
    assert row["names"] == ["blocks.0.moe.w2", "blocks.2.moe.w2"]
    assert "which blocks.0.moe.w2 contradicts" in row["reason"]


def test_a_tied_head_that_the_source_keeps(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    folder.mkdir()
    whole = tiny("llama", tie_word_embeddings=True)
    whole.save_pretrained(folder / "base")
    source = as_megatron(whole)
    source["output_layer.weight"] = source["embedding.word_embeddings.weight"]
    (folder / "src").mkdir()
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in source.items()}, folder / "src" / "model.safetensors"
    )
    ended = run("recipe", "draft", folder / "src", "--base-model", folder / "base", "--out", folder / "own.toml")
    assert ended.exit_code == 0 and "undecided" not in ended.stdout
    assert (
        '"output_layer.weight [v, h]" = { to = "lm_head.weight [v, h]", unless = "tied" }'
        in (folder / "own.toml").read_text()
    )
    assert_equal(gathered(folder), load_file(folder / "base" / "model.safetensors"))


def test_a_surplus_tensor_is_named(tmp_path: Path) -> None:
    source = as_megatron(model("llama")) | {"decoder.value_head.weight": torch.randn(1, 24)}
    paths = leave_both(tmp_path, "llama", source)
    ended = run("recipe", "draft", paths[0], "--base-model", paths[1], "--out", tmp_path / "own.toml")
    assert "undecided  decoder.value_head.weight: no tensors of the base model have its values\n" in ended.stdout
    assert "# decoder.value_head.weight [1, 24]: no tensors" in (tmp_path / "own.toml").read_text()
    printed = run("recipe", "draft", paths[0], "--base-model", paths[1])
    assert printed.stdout == (tmp_path / "own.toml").read_text()


def test_refusals(tmp_path: Path) -> None:
    source, base = leave_both(tmp_path, "llama", as_megatron(model("llama")))
    words = ("recipe", "draft", source, "--base-model", base, "--json")
    (tmp_path / "there.toml").write_text("")
    refusal(run(*words, "--out", tmp_path / "there.toml"), "OutputExistsError", says=["there.toml exists"])
    refusal(run(*words, "--out", tmp_path / "no" / "own.toml"), "UsageError", says=["cannot be written"])
    (tmp_path / "bare").mkdir()
    shutil.copy(base / "config.json", tmp_path / "bare")
    ended = run("recipe", "draft", source, "--base-model", tmp_path / "bare", "--json")
    refusal(ended, "UsageError", says=["has no weights to compare with"])
    ended = run("recipe", "draft", base, "--base-model", base, "--json")
    refusal(ended, "UsageError", says=["has the base model's names already"])


def test_biases_of_zeros_follow_their_weights(tmp_path: Path) -> None:
    base = {n: torch.zeros_like(t) if n.endswith("bias") and "proj" in n else t for n, t in state("gpt_oss").items()}
    report = drafted(tmp_path, "gpt_oss", as_megatron_gpt_oss(base), base)
    assert report["undecided"] == []
    evidence = {rule["source"].partition(" ")[0]: rule["evidence"] for rule in report["rules"]}
    assert evidence["decoder.layers.{L}.self_attention.linear_qkv.bias"] == "equal values and names"
    assert_equal(gathered(tmp_path), base)
