"""Calls that ranks make differently: each difference is named on all ranks, at once, and the next call is right."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import xrank
from tests.commands.exported import llama, tensors_of
from tests.other_hosts import modules_that_ask
from xrank.errors import ContradictionError, RankFailedError, UsageError
from xrank.layout import DeviceMesh, LayoutMap

pytestmark = pytest.mark.timeout(300)

SOON_SECONDS = 10
"""For what comes at once; the calls' own patience is far longer."""


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.ones(2, 2), "v": torch.ones(2, 2)}


def layouts(text: str, mesh: DeviceMesh | None = None, **aliases: str) -> LayoutMap:
    made = LayoutMap(mesh)
    made["w"] = text
    made.aliases.update(aliases)
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder that all ranks see."""
    save_file(state(), tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def calls_of(source: Path) -> dict[str, Callable[..., Any]]:
    """Return the live conversions, each of the same model."""
    out = source.parent / "out"
    return {
        "export_model": lambda model=None, **options: xrank.export_model(model or state(), out, **options),
        "iter_model": lambda model=None, **options: dict(xrank.iter_model(model or state(), **options)),
        "load_model": lambda model=None, **options: xrank.load_model(model or state(), source, **options),
    }


@pytest.mark.ranks(2)
@pytest.mark.parametrize("far", [False, True], ids=["one host", "hosts"])
def test_other_calls_are_named_on_both(rank: int, source: Path, far: bool) -> None:
    calls, out = calls_of(source), source.parent / "out"
    with pytest.MonkeyPatch.context() as patch:
        for module in modules_that_ask() if far else ():
            patch.setattr(module, "process_space", lambda: f"host {rank}")
        for first in calls:
            for second in calls:
                if first != second:
                    with pytest.raises(UsageError, match=rf"^rank 1 calls {second}, rank 0 {first}\b") as raised:
                        calls[second if rank else first]()
                    assert raised.value.rank == 1 and "same call" in str(raised.value.next_step)
        assert not out.exists()
        calls["export_model"]()
    assert sorted(tensors_of(out)) == ["v", "w"]


@pytest.mark.ranks(2)
def test_what_ranks_ask_differently_is_named_on_both(rank: int, tmp_path: Path) -> None:
    base = tmp_path / f"base{rank}"
    llama().save_pretrained(base)
    tied, untied = layouts("[h, k]", v="w"), layouts("[h, k]")
    cases: list[tuple[str, Any, Any]] = [
        ("dtype", None, "bf16"),
        ("max_shard_size", "5GB", "10KB"),
        ("max_memory", "64MB", "20MB"),
        ("overwrite", False, True),
        ("adapter", None, "merge"),
        ("recipe", None, "none"),
        ("base_model", str(tmp_path / "base0"), str(tmp_path / "base1")),
        ("config_overrides", {"x": 0}, {"x": 1}),
        ("transform", None, lambda name, tensor: {name: tensor}),
        ("layouts", tied, untied),
    ]
    made = [
        (option, lambda value, option=option: xrank.export_model(state(), tmp_path / "out", **{option: value}), *values)
        for option, *values in cases
    ]
    made.append(("out", lambda value: xrank.export_model(state(), tmp_path / value), "out0", "out1"))
    made += [
        (option, lambda value, option=option: xrank.iter_model(state(), **{option: value}), *values)
        for option, *values in (
            ("dtype", None, "bf16"),
            ("ranks", "first", "all"),
            ("max_memory", "64MB", 10**8),
            ("layouts", untied, tied),
        )
    ]
    made += [
        (option, lambda value, option=option: xrank.load_model(state(), tmp_path / "base0", **{option: value}), *values)
        for option, *values in (("recipe", None, "none"), ("max_memory", 10**8, "64MB"))
    ]
    for option, call, first, second in made:
        with pytest.raises(UsageError, match=rf"^rank 1 has {option}[a-z.]* .*, rank 0 ") as raised:
            call(second if rank else first)
        assert raised.value.rank == 1 and "same options" in str(raised.value.next_step)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != base.name) == [f"base{1 - rank}"]
    # The same in other words is no difference.
    name = os.path.relpath(tmp_path / "out") if rank else tmp_path / "out"
    dtype = torch.bfloat16 if rank else "bf16"
    size, memory = ("5GB", "64MB") if rank else (5 * 10**9, 64_000_000)
    xrank.export_model(state(), name, dtype=dtype, max_shard_size=size, max_memory=memory)


@pytest.mark.ranks(2)
def test_a_tensor_about_whose_layout_or_mesh_ranks_differ_is_named_on_both(rank: int, source: Path) -> None:
    calls = calls_of(source)
    line, turned, column = (
        DeviceMesh((2,), ("tp",)),
        DeviceMesh((2,), ("tp",), [1, 0]),
        DeviceMesh((2, 1), ("dp", "tp")),
    )
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"layouts": layouts("[f/tp, h]", line)}, {"layouts": layouts("[f, h/tp]", line)}),
        ({"layouts": layouts("[f/tp, h]", line)}, {}),
        ({"layouts": layouts("[f/tp, h]", line)}, {"layouts": layouts("[f/tp, h]", column)}),
        *(
            ({"layouts": layouts("[f/tp, h]"), "mesh": line}, {"layouts": layouts("[f/tp, h]"), "mesh": mesh})
            for mesh in (turned, column)
        ),
    ]
    for call in ("export_model", "iter_model"):
        for first, second in cases:
            with pytest.raises(ContradictionError, match=r"^w: ") as raised:
                calls[call](**(second if rank else first))
            assert raised.value.tensor == "w"
    assert not (source.parent / "out").exists()
    # What decides about no tensor may be another: each rank knows of its own.
    calls["export_model"](layouts=LayoutMap(line) if rank else None, mesh=line if rank else column)


def placeholders() -> torch.nn.Module:
    """Return a module as ZeRO-3 leaves it (deepspeed/runtime/zero/partition_parameters.py)."""
    module = torch.nn.Linear(2, 2, bias=False)
    module.weight.ds_id, module.weight.ds_shape = 0, module.weight.shape  # type: ignore[attr-defined]
    module.weight.data = torch.empty(0)
    return module


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["export_model", "iter_model", "load_model"])
def test_what_one_rank_alone_is_refused_all_hear_at_once(rank: int, source: Path, call: str) -> None:
    """Before anything else is told of: no rank waits for one that has long given up."""
    calls = calls_of(source)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_memory": "2 apples"}, "must be a size"),
        ({"mesh": 3}, "mesh= must be a DeviceMesh of xrank's or torch's; got a int"),
        ({"layouts": 3}, "layouts= must be a LayoutMap; got a int"),
        ({"model": placeholders()}, "placeholder of DeepSpeed's ZeRO-3"),
    ]
    if call == "iter_model":
        wrong.append(({"ranks": "last"}, "ranks= must be 'first' or 'all'; got 'last'"))
    for failed in (0, 1):
        for options, message in wrong:
            started = time.monotonic()
            kind = UsageError if rank == failed else RankFailedError
            with pytest.raises(kind, match=message) as raised:
                calls[call](**(options if rank == failed else {}))
            assert rank == failed or raised.value.rank == failed
            assert time.monotonic() - started < SOON_SECONDS
