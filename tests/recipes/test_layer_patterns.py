"""Layers of several kinds: which layer has which block, by config.json; stacks that are numbered apart, by parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import run
from xrank import gather_checkpoint
from xrank.errors import ContradictionError, XrankError
from xrank.recipes.recipe_file import is_layer_term, parse_layers

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]

VALUES = {"step": 2, "first": 3, "some": [1, 4], "kinds": ["a", "b", "a"], "letters": "M*-M", "bits": [0, 1, 1]}


@pytest.mark.parametrize(
    ("term", "layers"),
    [
        ("from first", [3, 4, 5, 6, 7]),
        ("before first", [0, 1, 2]),
        ("every step", [1, 3, 5, 7]),
        ("every step from 0", [0, 2, 4, 6]),
        ("every 3 from first", [3, 6]),
        ("in some", [1, 4]),
        ("not in some", [0, 2, 3, 5, 6, 7]),
        ("every step and not in some and before 6", [3, 5]),
        ("kinds = a", [0, 2]),
        ("letters = M", [0, 3]),
        ("letters = *", [1]),
        ("bits = 1", [1, 2]),
        ("in nothing", None),
        ("every nothing", None),
        ("every step from nothing", None),
        ("every some", None),
        ("from kinds", None),
        ("in letters", None),
        ("step = 2", None),
        ("every 0", None),
    ],
)
def test_terms(term: str, layers: list[int] | None) -> None:
    assert is_layer_term(f"layers {term}")
    choice = parse_layers(f"layers {term}", VALUES.get, "config.json")
    assert (None if choice is None else [i for i in range(8) if i in choice]) == layers


@pytest.mark.parametrize("term", ["layers", "layers every", "layer from first", "layers from a b", "layers a == b"])
def test_other_terms_are_of_other_kinds(term: str) -> None:
    assert not is_layer_term(term)


NAME = "layers.{<f: k | r: b <d: 1 | m: 1>>}"
OWN = f"""[config]
k = "first_dense"
b = ["blocks", "num_hidden_layers / 2 - 1"]
moe = "layers experts = 1"

[tensors]
"first.{{k}}.n [h]".to.f = "{NAME}.n [h]"
"blocks.{{b}}.dense.n [h]".to.d = "{NAME}.n [h]"
"blocks.{{b}}.moe.n [h]".to.m = "{NAME}.n [h]"
"blocks.{{b}}.moe.w [e, h]" = {{ to.m = "{NAME}.moe [e, h]", group = "moe" }}
"first.{{k}}.w [h, h]" = {{ to.f = "{NAME}.mlp [h, h]", group = "dense" }}
"blocks.{{b}}.dense.w [h, h]" = {{ to.d = "{NAME}.mlp [h, h]", group = "dense" }}
"""
CONFIG = {"num_hidden_layers": 7, "first_dense": 3, "blocks": 2, "experts": [0, 0, 0, 0, 1, 0, 1]}


def tensors() -> dict[str, torch.Tensor]:
    """Three dense layers, then pairs of a dense layer and one of experts, in two stacks."""
    stack = [f"first.{i}" for i in range(3)] + [f"blocks.{b}.{kind}" for b in range(2) for kind in ("dense", "moe")]
    made = {f"{at}.n": torch.rand(4) for at in stack}
    return made | {f"{at}.w": torch.rand(2 if at.endswith("moe") else 4, 4) for at in stack}


def gathered(folder: Path, state: dict[str, torch.Tensor], **config: Any) -> dict[str, torch.Tensor]:
    (folder / "src").mkdir()
    save_file(state, folder / "src" / "model.safetensors")
    (folder / "src" / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "own.toml").write_text(OWN)
    gather_checkpoint(folder / "src", folder / "out", recipe=folder / "own.toml")
    return load_file(folder / "out" / "model.safetensors")


def test_stacks_of_two_kinds_become_one_row_of_layers(tmp_path: Path) -> None:
    state = tensors()
    made = gathered(tmp_path, state)
    order = ["first.0", "first.1", "first.2", "blocks.0.dense", "blocks.0.moe", "blocks.1.dense", "blocks.1.moe"]
    assert {name: [*made[name].shape] for name in made if name.startswith("layers.6")} == {
        "layers.6.n": [4],
        "layers.6.moe": [2, 4],
    }
    for i, at in enumerate(order):
        assert torch.equal(made[f"layers.{i}.n"], state[f"{at}.n"])
        assert torch.equal(made[f"layers.{i}.{'moe' if at.endswith('moe') else 'mlp'}"], state[f"{at}.w"])
    ended = run("recipe", "check", tmp_path / "own.toml", tmp_path / "out")  # backwards
    assert ended.exit_code == 0, ended.stderr


@pytest.mark.parametrize(
    ("lost", "config", "says"),
    [
        ("blocks.1.moe.w", {}, "layers.6.moe: no tensor of the source maps to it"),
        ("first.1.w", {}, "layers.1.mlp: no tensor of the source maps to it"),
        ("blocks.0.dense.n", {}, "layers.3.n: no tensor of the source maps to it"),
        (None, {"experts": [0, 0, 0, 0, 1, 1, 0]}, "of the group (dense|moe), which layer [56] lacks by config.json"),
        (None, {"first_dense": 2}, "first.2.n does not fit"),
    ],
)
def test_what_a_layer_lacks_is_named(tmp_path: Path, lost: str | None, config: dict[str, Any], says: str) -> None:
    state = {name: tensor for name, tensor in tensors().items() if name != lost}
    with pytest.raises(ContradictionError, match=says):
        gathered(tmp_path, state, **config)


def test_a_hybrid_layer_makes_two_choices(tmp_path: Path) -> None:
    """A mixer and a block, each of one of two kinds; config.json's list has the kinds of mixers."""
    rules = {"mixer.attention": "attn", "mixer.state": "ssm", "mlp.dense": "mlp", "mlp.experts": "moe"}
    own = '[config]\n"mixer.attention" = "layers kinds = full"\n[tensors]\n' + "".join(
        f'"l.{{L}}.{name} [h]" = {{ to = "layers.{{L}}.{name} [h]", group = "{group}" }}\n'
        for group, name in rules.items()
    )
    (tmp_path / "own.toml").write_text(own)
    state = {f"l.{i}.{name}": torch.rand(3) for i, kinds in enumerate([("attn", "mlp"), ("ssm", "mlp"), ("ssm", "moe")])
             for name in kinds}  # fmt: skip
    for number, (config, change, says) in enumerate([
        ({}, None, None),
        ({"kinds": ["full", "none", "none"]}, None, None),
        ({"kinds": ["full", "none", "full"]}, None, "of the group mixer.state, which layer 2 lacks"),
        ({}, "l.1.attn", "layer 1 has tensors of mixer.attention and mixer.state"),
        ({}, "-l.2.ssm", "layers.2.attn: no tensor"),
        ({"kinds": ["full", "none", "none"]}, "-l.2.ssm", "layers.2.ssm: no tensor"),
    ]):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        left = {name: tensor for name, tensor in state.items() if f"-{name}" != change}
        more = {change: torch.rand(3)} if change and not change.startswith("-") else {}
        save_file(left | more, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        if says is None:
            gather_checkpoint(folder, tmp_path / f"out{number}", recipe=tmp_path / "own.toml")
            continue
        with pytest.raises(XrankError, match=says):
            gather_checkpoint(folder, tmp_path / f"out{number}", recipe=tmp_path / "own.toml")
