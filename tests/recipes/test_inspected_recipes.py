"""What `inspect` and `verify` make of sources that need a recipe."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import run
from tests.recipes.made_checkpoints import as_megatron, config_of, leave, saved, stacked, tiny

pytestmark = pytest.mark.timeout(120)


@cache
def llama() -> torch.nn.Module:
    return tiny("llama")


@cache
def theirs() -> dict[str, torch.Tensor]:
    return as_megatron(llama(), vocab=48)


def config(**changes: Any) -> dict[str, Any]:
    return config_of(llama(), **changes)


def test_inspect_says_the_recipe(tmp_path: Path) -> None:
    ended = run("inspect", leave(tmp_path / "ws", theirs(), config()))
    assert "megatron-llama: a gather gives" in ended.stdout
    assert "problems" in ended.stdout and "none" in ended.stdout
    report = json.loads(run("inspect", tmp_path / "ws", "--json").stdout)
    assert report["source"]["recipe"] == "megatron-llama"
    assert report["tensors"][0]["name"] in theirs()  # names as they are in the source


def test_inspect_shows_what_keeps_the_recipe_from_fitting(tmp_path: Path) -> None:
    report = json.loads(run("inspect", leave(tmp_path / "ws", theirs()), "--json").stdout)
    assert report["source"]["recipe"] is None
    assert [(p["type"], p["exit_code"]) for p in report["problems"]] == [("UsageError", 2)]
    assert "needs the size 'v'" in report["problems"][0]["message"]
    lacking = {name: tensor for name, tensor in theirs().items() if name != "decoder.layers.1.mlp.linear_fc2.weight"}
    report = json.loads(run("inspect", leave(tmp_path / "less", lacking, config()), "--json").stdout)
    assert [(p["type"], p["exit_code"]) for p in report["problems"]] == [("ContradictionError", 4)]


def test_a_model_is_verified_against_the_checkpoint_it_was_made_of(tmp_path: Path) -> None:
    source = leave(tmp_path / "ws", theirs(), config())
    assert run("gather", source, "--out", tmp_path / "out").exit_code == 0
    for pair in ((tmp_path / "out", source), (source, tmp_path / "out")):
        ended = run("verify", pair[0], "--against", pair[1])
        assert ended.exit_code == 0, ended.stderr
        assert "every value as in" in ended.stdout
    # The config of one does for both.
    bare = leave(tmp_path / "bare", stacked(theirs(), "decoder.layers."))
    assert run("verify", tmp_path / "out", "--against", bare).exit_code == 0
    assert run("verify", bare, "--against", tmp_path / "out").exit_code == 0


def test_a_value_that_differs_is_named(tmp_path: Path) -> None:
    assert run("gather", leave(tmp_path / "ws", theirs(), config()), "--out", tmp_path / "out").exit_code == 0
    tensors = {name: tensor.clone() for name, tensor in theirs().items()}
    tensors["decoder.layers.1.mlp.linear_fc1.weight"][25, 3] += 1  # the second half: up, row 5
    ended = run("verify", tmp_path / "out", "--against", leave(tmp_path / "other", tensors, config()))
    assert ended.exit_code == 4
    assert "model.layers.1.mlp.up_proj.weight differs" in ended.stderr


def test_two_checkpoints_of_one_framework_need_no_recipe(tmp_path: Path) -> None:
    first, second = (leave(tmp_path / name, theirs()) for name in ("a", "b"))
    assert run("verify", first, "--against", second).exit_code == 0


def test_a_checkpoint_is_proven_as_a_gather_would(tmp_path: Path) -> None:
    report = json.loads(run("verify", leave(tmp_path / "ws", theirs(), config()), "--json").stdout)
    assert report["exit_code"] == 0
    assert report["source"]["recipe"] == "megatron-llama"
    assert report["plan"]["num_tensors"] == len(saved(llama()))
    lacking = {name: tensor for name, tensor in theirs().items() if name != "decoder.layers.1.mlp.linear_fc2.weight"}
    ended = run("verify", leave(tmp_path / "less", lacking, config()))
    assert ended.exit_code == 4
    assert "model.layers.1.mlp.down_proj.weight: no tensor of the source maps to it" in ended.stderr
    # Without a config nobody knows the vocabulary; the bytes can be verified all the same.
    bare = json.loads(run("verify", leave(tmp_path / "bare", theirs()), "--json").stdout)
    assert (bare["exit_code"], bare["source"]["recipe"]) == (0, None)
