"""Advice of readers about layouts, base models, configs and options, followed well and badly.

Each way to follow it gives the model that lies there, or another refusal. The layout of a tensor of which nothing but
parts is recorded is the user's to state; a base model beside it proves what was stated.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.commands.made_workspaces import leave
from tests.readers.made_megatron import Run, whole_model, write_legacy
from tests.readers.test_next_steps import Case, model_of, wholes
from tests.readers.test_vllm import CONFIG as VLLM_CONFIG
from tests.readers.test_vllm import made_model as vllm_model
from tests.readers.test_vllm import write_state
from xrank.layout import DeviceMesh
from xrank.testing.reader_contract import WholeTensor, whole

MODEL = model_of(1)
NAMES = {
    "verl": "model_world_size_2_rank_{}.pt",
    "accelerate-ranks": "pytorch_model_fsdp_rank{}.bin",
    "torch-checkpointing": "model_{}.pt",
}


def save_parts(folder: Path, name: str, parts: list[Mapping[str, torch.Tensor]]) -> Case:
    """Save each rank's plain tensors, of which no place is recorded."""
    folder.mkdir()
    for rank, state in enumerate(parts):
        torch.save({key: tensor.clone() for key, tensor in state.items()}, folder / name.format(rank))
        if name.startswith("model_{"):
            torch.save({"state": {}}, folder / f"optim_{rank}.pt")
    return Case(folder, [wholes(MODEL)])


def rows(rank: int) -> dict[str, torch.Tensor]:
    return {"w": MODEL["w"].chunk(2)[rank], "b": MODEL["b"]}


def follow(case: Case, tmp_path: Path, **options: Any) -> str:
    """Return the outcome of a gather: ``right``, or the error's class; another model fails."""
    error = replace(case, options=options).gather(tmp_path / "out")
    return "right" if error is None else type(error).__name__


def advised(case: Case, tmp_path: Path) -> str:
    error = case.gather(tmp_path / "out")
    assert error is not None
    return str(error.next_step)


def layout_file(tmp_path: Path, rules: str, grid: str | None = "fsdp=2") -> Path:
    mesh = f'[mesh]\ngrid = "{grid}"\n\n' if grid else ""
    (tmp_path / "layout.toml").write_text(f"{mesh}[tensors]\n{rules}\n")
    return tmp_path / "layout.toml"


def base_model(tmp_path: Path, **shapes: tuple[int, ...]) -> Path:
    (tmp_path / "base").mkdir(exist_ok=True)
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "base" / "model.safetensors")
    return tmp_path / "base"


FILES: dict[str, tuple[str, str | None, str]] = {
    "as it was": ('"w" = "[a/fsdp, b]"\n"b" = "[a]"', "fsdp=2", "right"),
    "no mesh": ('"w" = "[a/fsdp, b]"\n"b" = "[a]"', None, "LayoutError"),
    "too many ranks": ('"w" = "[a/fsdp, b]"\n"b" = "[a]"', "fsdp=4", "LayoutError"),
    "too few ranks": ('"w" = "[a/fsdp, b]"\n"b" = "[a]"', "fsdp=1", "LayoutError"),
    "another axis": ('"w" = "[a/tp, b]"\n"b" = "[a]"', "fsdp=2", "LayoutError"),
    "one of two": ('"w" = "[a/fsdp, b]"', "fsdp=2", "LayoutError"),
    "another name": ('"v" = "[a/fsdp, b]"', "fsdp=2", "LayoutError"),
    "too few dims": ('"w" = "[a/fsdp]"\n"b" = "[a]"', "fsdp=2", "LayoutError"),
    "no layout": ('"w" = "[a/fsdp, b"\n"b" = "[a]"', "fsdp=2", "LayoutError"),
    "whole on each": ('"w" = "[a, b]"\n"b" = "[a]"', "fsdp=2", "ContradictionError"),
    "numbers of another model": ('"w" = "[(a: 6)/fsdp, b]"\n"b" = "[a]"', "fsdp=2", "LayoutError"),
}


@pytest.mark.parametrize("format_name", NAMES)
def test_a_layout_file_that_is_given(tmp_path: Path, format_name: str) -> None:
    case = save_parts(tmp_path / "run", NAMES[format_name], [rows(0), rows(1)])
    assert "layouts=" in advised(case, tmp_path)
    got = {
        name: follow(case, tmp_path, layouts=layout_file(tmp_path, rules, grid))
        for name, (rules, grid, _) in FILES.items()
    }
    assert got == {name: want for name, (_, _, want) in FILES.items()}
    # Parts that were not cut so fit the other dim as well: the base model's shapes do not.
    wrong = layout_file(tmp_path, '"w" = "[a, b/fsdp]"\n"b" = "[a]"')
    assert follow(case, tmp_path, layouts=wrong, base_model=base_model(tmp_path, w=(8, 4), b=(8,))) != "right"


def test_a_layout_of_megatrons_axes(tmp_path: Path) -> None:
    model = {**whole_model(Run(tp=2)), "extra.weight": torch.arange(24.0).bfloat16().reshape(6, 4)}
    write_legacy(tmp_path / "run", Run(tp=2), whole_model(Run(tp=2)))
    (place,) = (tmp_path / "run").glob("iter_*")
    for rank, part in enumerate(model["extra.weight"].chunk(2, dim=1)):
        (file,) = (place / f"mp_rank_0{rank}").glob("*.pt")
        state = torch.load(file, weights_only=False)
        state["model"]["extra.weight"] = part.clone()
        torch.save(state, file)
    case = Case(place, [wholes(model)])
    assert "layouts=" in advised(case, tmp_path)
    rules = {"[a, b/tp]": "right", "[a, b/dp]": "LayoutError", "[a/tp]": "LayoutError", "[a, b/etp]": "right"}
    got = {
        text: follow(case, tmp_path, layouts=layout_file(tmp_path, f'"extra.weight" = "{text}"', None))
        for text in rules
    }
    assert got == rules


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ({"w": (8, 4), "b": (8,)}, "right"),
        ({"w": (8, 8), "b": (8,)}, "LayoutError"),
        ({"w": (12, 4), "b": (8,)}, "LayoutError"),
        ({"w": (8, 4)}, "LayoutError"),
        ({"w": (8, 4), "b": (8,), "c": (8,)}, "ContradictionError"),
    ],
)
def test_a_base_model_that_is_given(tmp_path: Path, shapes: dict[str, tuple[int, ...]], want: str) -> None:
    case = save_parts(tmp_path / "run", NAMES["verl"], [rows(0), rows(1)])
    assert "base_model=" in advised(case, tmp_path)
    assert follow(case, tmp_path, base_model=base_model(tmp_path, **shapes)) == want


def test_numbers_of_a_flat_buffer(tmp_path: Path) -> None:
    flat = torch.cat([MODEL["w"].reshape(-1), MODEL["b"]])
    case = save_parts(tmp_path / "run", NAMES["verl"], [{"flat": part} for part in flat.chunk(2)])
    rules = {
        "flat(w [8, 4], b [n])/~fsdp": "LayoutError",
        "flat(w [8, 4], b [8])/~fsdp": "right",
        "flat(w [8, 4], b [9])/~fsdp": "ContradictionError",
        "flat(w [8, 4])/~fsdp": "ContradictionError",
    }
    open_file = layout_file(tmp_path, f'"flat" = "{next(iter(rules))}"')
    assert "write numbers" in advised(replace(case, options={"layouts": open_file}), tmp_path)
    assert follow(case, tmp_path, layouts=open_file, base_model=base_model(tmp_path, w=(8, 4), b=(8,))) == "right"
    assert follow(case, tmp_path, layouts=open_file, base_model=base_model(tmp_path, w=(8, 4), b=(6,))) != "right"
    got = {text: follow(case, tmp_path, layouts=layout_file(tmp_path, f'"flat" = "{text}"')) for text in rules}
    assert got == rules
    # A member that lies by itself, too.
    twice = save_parts(tmp_path / "twice", NAMES["verl"], [{"flat": part, "b": MODEL["b"]} for part in flat.chunk(2)])
    rule = '"flat" = "flat(w [8, 4], b [8])/~fsdp"\n"b" = "[a]"'
    assert "save only one" in advised(replace(twice, options={"layouts": layout_file(tmp_path, rule)}), tmp_path)


def test_rules_that_match_too_much(tmp_path: Path) -> None:
    parts = [{f"x.{name}": tensor for name, tensor in rows(rank).items()} for rank in range(2)]
    case = save_parts(tmp_path / "run", NAMES["verl"], parts)
    case.models = [{f"x.{name}": tensor for name, tensor in wholes(MODEL).items()}]
    rules = [r"'x\..*' = ", r"'.*\.w' = "]
    layouts = ['"[a/fsdp, b]"', '"[a, b/fsdp]"']
    both = layout_file(tmp_path, "\n".join(map(str.__add__, rules, layouts)))
    assert "only one may match" in advised(replace(case, options={"layouts": both}), tmp_path)
    base = base_model(tmp_path, **{"x.w": (8, 4), "x.b": (8,)})
    rules[0] = r"'x\.w' = "
    got = [
        follow(case, tmp_path, layouts=layout_file(tmp_path, f'{rule}\n"x.b" = "[a]"'), base_model=base)
        for rule in map(str.__add__, rules, layouts)
    ]
    assert got[0] == "right" and got[1] != "right"


def test_a_rule_that_is_taken_out(tmp_path: Path) -> None:
    leave(tmp_path / "run", MODEL, layouts={"w": "[a/tp, b]", "b": "[a]"}, mesh=DeviceMesh((2,), ("tp",)))
    case = Case(tmp_path / "run", [wholes(MODEL)])
    given = layout_file(tmp_path, '"w" = "[a, b/tp]"', "tp=2")
    assert "delete the tensor's rule" in advised(replace(case, options={"layouts": given}), tmp_path)
    assert follow(case, tmp_path, layouts=layout_file(tmp_path, "", "tp=2")) == "right"


def test_a_value_that_is_left_out(tmp_path: Path) -> None:
    """The tensors in it are missing then: config.json or a base model shows it, and the report names them."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {**MODEL, "pair": (MODEL["b"],)}}, checkpoint_id=tmp_path / "run", no_dist=True)
    case = Case(tmp_path / "run", [wholes(MODEL)])
    assert "leave it out with exclude" in advised(case, tmp_path)
    assert follow(case, tmp_path, exclude=("pair",)) == "right"
    whole_base = base_model(tmp_path, w=(8, 4), b=(8,), c=(8,))
    assert follow(case, tmp_path, exclude=("pair",), base_model=whole_base) == "ContradictionError"
    shutil.rmtree(tmp_path / "run")
    llama: dict[str, WholeTensor] = {}
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"model": {"model.embed_tokens.weight": MODEL["w"], "rest": (MODEL["b"],)}},
                 checkpoint_id=tmp_path / "run", no_dist=True)  # fmt: skip
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    assert follow(Case(tmp_path / "run", [llama]), tmp_path, exclude=("rest",)) != "right"


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"format": "dcp"}, "omit format=: "),
        ({"format": "unknown"}, "omit format=: "),
        ({"part": "ema"}, "leave part= out"),
    ],
)
def test_an_option_that_is_left_out(tmp_path: Path, options: dict[str, str], advice: str) -> None:
    (tmp_path / "run").mkdir()
    save_file(MODEL, tmp_path / "run" / "model.safetensors")
    case = Case(tmp_path / "run", [wholes(MODEL)])
    assert advice in advised(replace(case, options=options), tmp_path)
    assert follow(case, tmp_path) == "right"


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, "right"),
        ({"num_attention_heads": None}, "LayoutError"),
        ({"model_type": "phi3"}, "LayoutError"),
        ({"hidden_size": 1}, "LayoutError"),
    ],
)
def test_a_config_that_is_put_beside(tmp_path: Path, changes: dict[str, Any], want: str) -> None:
    """vLLM's state, whose fused parameters only the config takes apart; config.json of hf-shards: test_hf_shards.py."""
    model: Mapping[str, torch.Tensor] = vllm_model()
    write_state(tmp_path / "run", model, 2)
    (tmp_path / "run" / "config.json").unlink()
    case = Case(tmp_path / "run", [{name: whole(tensor) for name, tensor in model.items()}])
    assert advised(case, tmp_path).startswith(f"put it into {tmp_path / 'run'}, then")
    (tmp_path / "run" / "config.json").write_text(json.dumps({**VLLM_CONFIG, **changes}))
    assert follow(case, tmp_path) == want


def test_a_base_model_whose_config_wins(tmp_path: Path) -> None:
    leave(tmp_path / "run", MODEL, layouts={"w": "[a/tp, b]", "b": "[a]"}, mesh=DeviceMesh((2,), ("tp",)))
    state = torch.load(tmp_path / "run" / "rank_1_state.pth", weights_only=True)
    torch.save({**state, "config": {"other": 1}}, tmp_path / "run" / "rank_1_state.pth")
    case = Case(tmp_path / "run", [wholes(MODEL)])
    assert "(its config.json is used)" in advised(case, tmp_path)
    base = base_model(tmp_path, w=(8, 4), b=(8,))
    assert follow(case, tmp_path, base_model=base) == "ContradictionError"  # it has no config.json
    (base / "config.json").write_text('{"model_type": "mine"}')
    assert follow(case, tmp_path, base_model=base) == "right"
    (base / "config.json").write_text('{"model_type": "mine", "vocab_size": 9, "num_hidden_layers": 2}')
    assert follow(case, tmp_path, base_model=base) == "right"  # nothing in this model shows these sizes
