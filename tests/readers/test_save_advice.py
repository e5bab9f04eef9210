"""Advice of readers to save in another way, followed: the checkpoint that is saved so gives the model."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from tests.commands.made_workspaces import leave
from tests.readers.test_next_steps import Case, model_of, wholes
from xrank.layout import DeviceMesh

MODEL = model_of(1)
W, B = MODEL["w"], MODEL["b"]
NET = {f"net.{name}": tensor for name, tensor in MODEL.items()}
VERL = "model_world_size_1_rank_0.pt"
LAYOUTS = {"w": "[a/tp, b]", "b": "[c]"}

Save = Callable[[Path], object]


class Trainer:
    """An object of the user's own code."""


@dataclass(frozen=True)
class Advice:
    """A checkpoint that is refused, and how its next step makes it be saved."""

    text: str
    saved: Save
    followed: Save
    model: Mapping[str, torch.Tensor] | None = None
    """The model; None: `MODEL`."""
    options: Mapping[str, Any] | None = None


def save_dcp(state: Mapping[str, Any], *, is_flat: bool = True, **options: Any) -> Save:
    def save(folder: Path) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=is_flat)
        with warnings.catch_warnings(action="ignore"):
            dcp.save(dict(state), storage_writer=FileSystemWriter(folder), planner=planner, no_dist=True, **options)

    return save


def save_file(name: str, state: object) -> Save:
    return lambda folder: torch.save(state, folder / name)


def save_ranks(*configs: Mapping[str, Any], num_recording: int = 2, num_saved: int = 2) -> Save:
    """Return a function with which two ranks leave their states; the first ones record layouts."""

    def save(folder: Path) -> None:
        for rank in range(num_saved):
            config = configs[rank] if configs else {}
            mesh, is_recorded = DeviceMesh((2,), ("tp",)), rank < num_recording
            leave(folder, MODEL, layouts=LAYOUTS, mesh=mesh, ranks=[rank], config=config, recorded=is_recorded)

    return save


def nothing_of_rank_1(folder: Path) -> None:
    save_ranks()(folder)
    (folder / "rank_1_state.pth").write_bytes(b"")


def without_coordination(folder: Path) -> None:
    save_dcp({"model": MODEL})(folder)
    (folder / ".metadata").rename(folder / "__0.metadata")


ADVICE = {
    "an expanded view": Advice(
        "call .contiguous() or .clone() before saving",
        save_file(VERL, {"w": W[:, :1].expand(8, 4)}),
        save_file(VERL, {"w": W[:, :1].expand(8, 4).contiguous()}),
        {"w": W[:, :1].expand(8, 4).contiguous()},
    ),
    "no coordination": Advice("save with coordination", without_coordination, save_dcp({"model": MODEL})),
    "a nested model": Advice(
        "torch's default planner",
        save_dcp({"model": MODEL, "optim": {"s": {"m": B}}}, is_flat=False),
        save_dcp({"model": MODEL, "optim": {"s": {"m": B}}}),
    ),
    "a tuple of tensors": Advice(
        "save its tensors by name",
        save_dcp({"model": {"w": W, "pair": (B,)}}),
        save_dcp({"model": {"w": W, "pair": [B]}}),
        {"w": W, "pair.0": B},
    ),
    "two models": Advice(
        "in a checkpoint of its own", save_dcp({"policy": NET, "reference": NET}), save_dcp({"policy": NET}), NET
    ),
    "one name of two": Advice(
        "state_dict()", save_file("m.pt", {"model": NET, "model.net.w": W}), save_file("m.pt", NET), NET
    ),
    "a list of tensors": Advice("state_dict()", save_file(VERL, {**MODEL, "more": [B]}), save_file(VERL, MODEL)),
    "an object": Advice(
        "tensors and plain values only",
        save_file("last.ckpt", {"state_dict": MODEL, "trainer": Trainer()}),
        save_file("last.ckpt", {"state_dict": MODEL, "trainer": {"step": 2}}),
        options={"strict_pickles": True},
    ),
    "two names": Advice(
        "leave one of them out",
        save_file(VERL, {**MODEL, "_orig_mod.w": W + 1}),
        save_file(VERL, MODEL),
    ),
    "two configs": Advice(
        "let all ranks write one config", save_ranks({"a": 1}, {"a": 2}), save_ranks({"a": 1}, {"a": 1})
    ),
    "some layouts": Advice("in the same way", save_ranks(num_recording=1), save_ranks()),
    "no layouts": Advice("plain tensors with layouts", save_ranks(num_recording=0), save_ranks()),
    "an absent rank": Advice("let rank 1 write again", save_ranks(num_saved=1), save_ranks()),
    "an empty state": Advice("let rank 1 write again", nothing_of_rank_1, save_ranks()),
}


@pytest.mark.parametrize("name", ADVICE)
def test_a_checkpoint_that_is_saved_as_advised(tmp_path: Path, name: str) -> None:
    advice, folder = ADVICE[name], tmp_path / "run"
    folder.mkdir()
    case = Case(folder, [wholes(advice.model or MODEL)], advice.options or {})
    advice.saved(folder)
    error = case.gather(tmp_path / "out")
    assert error is not None and advice.text in str(error.next_step), error
    # Over the files that were refused, the framework saves again: the model, or another refusal.
    advice.followed(folder)
    case.gather(tmp_path / "out")
    shutil.rmtree(folder)
    folder.mkdir()
    advice.followed(folder)
    assert case.gather(tmp_path / "out") is None
