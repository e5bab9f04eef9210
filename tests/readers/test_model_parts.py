"""Several models in one checkpoint: which one is taken, which choice is asked for, and what `part` picks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim.swa_utils import AveragedModel

from xrank import load_model, open_checkpoint
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.commands.reshard import reshard_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import COMMAND, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout

pytestmark = pytest.mark.quick

State = Mapping[str, torch.Tensor]


def state(seed: int, *names: str) -> dict[str, torch.Tensor]:
    """Return the state dict of a module with submodules."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.rand(3, 4, generator=random) for name in names or ("up.weight", "down.weight")}


MODEL, EMA = state(0), state(1)
OTHER = state(2, "a.weight", "b.weight", "c.weight")


def save(folder: Path, saved: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(saved, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def same(found: State, want: State) -> bool:
    return found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("saved", "parts"),
    [
        ({"model": MODEL, "ema": EMA}, ["model", "ema"]),
        ({"policy": MODEL, "reference": EMA, "step": 3}, ["policy", "reference"]),
        ({"app": {"model": MODEL, "ema": EMA}}, ["app.model", "app.ema"]),
        ({"policy": MODEL, "critic": {**state(3), "v_head.weight": EMA["up.weight"]}}, ["policy", "critic"]),
        ({"net": MODEL, "ema": {f"module.{name}": tensor for name, tensor in EMA.items()}}, ["net", "ema"]),
        ({"model": MODEL, "discriminator": OTHER}, ["model", "discriminator"]),
    ],
)
def test_a_choice_is_asked_for(tmp_path: Path, saved: Any, parts: list[str]) -> None:
    folder = save(tmp_path / "checkpoint", saved)
    with pytest.raises(UsageError, match="more than one part") as caught:
        gather_checkpoint(folder, tmp_path / "out")
    error = caught.value
    assert error.exit_code == 2 and not (tmp_path / "out").exists()
    assert [one.split(" (")[0] for one in str(error.got).split(", ")] == parts and "tensors)" in str(error.got)
    (problem,) = inspect_source(folder).details["problems"]
    assert problem["got"] == error.got
    # Each choice that the advice names gives that part and no other.
    advice = COMMAND.render(error.next_step)
    for part in parts:
        assert f"--part {part}" in advice
        tree = saved
        for key in part.split("."):
            tree = tree[key]
        want = {name.removeprefix("module."): tensor for name, tensor in tree.items()}
        gather_checkpoint(folder, tmp_path / part, part=part)
        assert same(load_file(tmp_path / part / "model.safetensors"), want)


@pytest.mark.parametrize(
    ("saved", "want"),
    [
        ({"net": MODEL, "optimizer": {"state": {0: {"exp_avg": EMA["up.weight"]}}}, "epoch": 3}, MODEL),
        ({"model": MODEL, "ema": {"decay": 0.9, "shadow_params": list(EMA.values())}}, MODEL),
        ({"net": MODEL, "shadow_params": list(EMA.values())}, MODEL),
        ({"run": {"net": MODEL, "epoch": 3}}, MODEL),
        # Pieces of one model, as no names are in both.
        (
            {"backbone": MODEL, "head": OTHER},
            {f"backbone.{n}": t for n, t in MODEL.items()} | {f"head.{n}": t for n, t in OTHER.items()},
        ),
        # Layers of a nested dict have equal names.
        ({"up": {"weight": MODEL["up.weight"]}, "down": {"weight": MODEL["down.weight"]}}, MODEL),
    ],
)
def test_the_only_model_is_taken(tmp_path: Path, saved: Any, want: State) -> None:
    gather_checkpoint(save(tmp_path / "checkpoint", saved), tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), want)


@pytest.mark.parametrize("inner", ["module", "shadow", "state_dict"])
def test_a_part_with_one_state_dict_in_it(tmp_path: Path, inner: str) -> None:
    folder = save(tmp_path / "checkpoint", {"model": MODEL, "ema": {inner: EMA, "decay": 0.9}})
    gather_checkpoint(folder, tmp_path / "out", part="ema")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), EMA)


def test_the_counter_of_an_averaged_model_is_left_out(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    saved = {"model": module.state_dict(), "ema": AveragedModel(module).state_dict()}
    report = gather_checkpoint(save(tmp_path / "checkpoint", saved), tmp_path / "out", part="ema")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), module.state_dict())
    assert any("averaged models were left out: n_averaged" in text for _, text in report.notes)


@pytest.mark.parametrize(
    ("saved", "part", "got"),
    [
        ({"model": MODEL, "ema": EMA}, "emma", "model (2 tensors), ema (2 tensors)"),
        ({"app": {"model": MODEL, "ema": EMA}}, "app.emma", "app.model (2 tensors), app.ema (2 tensors)"),
        (MODEL, "up", "tensors that are not in parts"),
    ],
)
def test_a_part_that_is_not_there(tmp_path: Path, saved: Any, part: str, got: str) -> None:
    with pytest.raises(UsageError, match="has no part") as caught:
        gather_checkpoint(save(tmp_path / "checkpoint", saved), tmp_path / "out", part=part)
    assert caught.value.got == got


def test_an_optimizer_is_not_a_part_to_read(tmp_path: Path) -> None:
    saved = {"model": MODEL, "optimizer": {"state": {0: {"exp_avg": EMA["up.weight"]}}}}
    with pytest.raises(UsageError, match="contains no model"):
        gather_checkpoint(save(tmp_path / "checkpoint", saved), tmp_path / "out", part="optimizer")


def test_a_format_without_parts(tmp_path: Path) -> None:
    """A part that is not read must not pass for another one; where a second format has it, that one is read."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors")
    with pytest.raises(UsageError, match="a single model without parts"):
        gather_checkpoint(folder, tmp_path / "out", part="ema")
    save(folder, {"model": MODEL, "ema": EMA})
    gather_checkpoint(folder, tmp_path / "out", part="ema")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), EMA)


def test_the_other_calls(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint", {"model": MODEL, "ema": EMA})
    assert list(inspect_source(folder, part="ema").details["format"]["parts"]) == ["ema", "model"]
    assert same({**open_checkpoint(folder, part="ema")}, EMA)
    module = {name: torch.zeros(3, 4) for name in EMA}
    load_model(module, folder, part="ema")
    assert same(module, EMA)
    gather_checkpoint(folder, tmp_path / "out", part="ema")
    assert verify_model(folder, part="ema").ok
    assert verify_model(folder, part="ema", against=tmp_path / "out").ok
    assert not verify_model(folder, part="model", against=tmp_path / "out").ok
    with pytest.raises(UsageError, match="model with a manifest"):
        verify_model(tmp_path / "out", part="ema")
    rows = LayoutMap(DeviceMesh((3,), ("tp",)))
    for name in EMA:
        rows[name] = TensorLayout.parse("[rows/tp, columns]")
    reshard_checkpoint(folder, rows, tmp_path / "states", part="ema")
    assert verify_model(tmp_path / "states", against=tmp_path / "out").ok


def test_the_command(tmp_path: Path) -> None:
    folder = save(tmp_path / "checkpoint", {"policy": MODEL, "reference": EMA})

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "xrank", *words], capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, text = run("gather", str(folder), "--out", str(tmp_path / "out"))
    assert code == 2 and "policy (2 tensors), reference (2 tensors)" in text and "--part policy or --part refer" in text
    code, text = run("inspect", str(folder))
    assert code == 0 and "policy (2 tensors), reference (2 tensors)" in text
    code, text = run("inspect", str(folder), "--part", "policy")
    assert code == 0 and "reference: left out: 2 tensors" in text
    assert run("gather", str(folder), "--out", str(tmp_path / "out"), "--part", "reference")[0] == 0
    assert run("verify", str(folder), "--part", "reference", "--against", str(tmp_path / "out"))[0] == 0
