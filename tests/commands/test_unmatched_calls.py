"""Ranks that make different calls: each learns at once which, and the next calls work. One rank alone saves a model."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.exported import tensors_of
from tests.sampled import sampled
from xrank.errors import ContradictionError, RankFailedError, UsageError

OWN = {"model_type": "own"}
SOON_SECONDS = 20.0
"""The ranks learn it in about a second; the limits of the calls are 30 minutes."""
CALLS = {
    "export_model": lambda folder, group: xrank.export_model(
        {"a": torch.ones(2)}, folder / "out", config_overrides=OWN, group=group
    ),
    "load_model": lambda folder, group: xrank.load_model({"a": torch.ones(2)}, folder / "out", group=group),
    "iter_model": lambda folder, group: list(xrank.iter_model({"a": torch.ones(2)}, group=group)),
    "offer_weights": lambda folder, group: xrank.offer_weights({"a": torch.ones(2)}, folder / "offer", group=group),
    "take_weights": lambda folder, group: xrank.take_weights({"a": torch.ones(2)}, folder / "offer", group=group),
}


def check_all_work(rank: int, num_ranks: int, folder: Path) -> None:
    """Check that the next calls of all ranks meet."""
    for key in ("one", "two"):
        with xrank.get_tensors_parallel(torch.full((2,), rank), range(num_ranks), key=key) as parts:
            assert [int(part[0]) for part in parts] == ([*range(num_ranks)] if rank == 0 else [])
        assert xrank.export_model({"a": torch.ones(2)}, folder / key, config_overrides=OWN).num_tensors == 1


def refused() -> Any:
    return pytest.raises((ContradictionError, RankFailedError))


def check_names_both(error: BaseException, *calls: str) -> None:
    text = f"{error} {error.got}"  # type: ignore[attr-defined]
    assert "different calls" in text and all(f"{call}" in text for call in calls), text
    assert text.count(f"called at {__file__}:") >= 2, text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("call", sampled(CALLS, 3))
def test_a_call_of_all_ranks_in_the_body_of_one(rank: int, tmp_path: Path, call: str, writer: int) -> None:
    began = time.monotonic()
    with refused() as raised, xrank.get_tensors_parallel(torch.ones(2), [0, 1]):
        if rank == writer:
            CALLS[call](tmp_path, None)
    assert time.monotonic() - began < SOON_SECONDS
    check_names_both(raised.value, call, "get_tensors_parallel number 1")
    if isinstance(raised.value, ContradictionError):
        assert "xrank.save_model" in raised.value.next_step
    check_all_work(rank, 2, tmp_path)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("is_nested", [True, False])
def test_a_gather_of_another_group(rank: int, tmp_path: Path, is_nested: bool) -> None:
    group = dist.new_group([0, 1])
    began = time.monotonic()

    def gather() -> AbstractContextManager[Any]:
        return xrank.get_tensors_parallel(torch.ones(2), [0, 1], group)

    with refused() as raised:
        if rank == 2 or (rank == 0 and not is_nested):
            CALLS["export_model"](tmp_path, None)
        else:
            with gather():
                if rank == 0:
                    CALLS["export_model"](tmp_path, None)
    assert time.monotonic() - began < SOON_SECONDS
    check_names_both(raised.value, "export_model", "get_tensors_parallel")
    if rank < 2:
        with gather() as parts:
            assert len(parts) == 2 * (rank == 0)
    check_all_work(rank, 3, tmp_path)


@pytest.mark.ranks(2)
def test_a_failure_in_the_body_ends_a_wait_for_work(rank: int, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises((OSError, RankFailedError), match="no more"), xrank.get_tensors_parallel(torch.ones(2), [0, 1]):
        if rank == 1:
            raise OSError("no more of this")
        CALLS["export_model"](tmp_path, None)
    assert time.monotonic() - began < SOON_SECONDS
    check_all_work(rank, 2, tmp_path)


@pytest.mark.ranks(2)
def test_calls_in_the_bodies_of_all_meet(rank: int, tmp_path: Path) -> None:
    with xrank.get_tensors_parallel(torch.ones(2), [0, 1]):
        if rank == 1:
            time.sleep(1.5)  # long enough for a wait that is published and voted on
        assert CALLS["export_model"](tmp_path, None).num_tensors == 1
    check_all_work(rank, 2, tmp_path)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_inside", [True, False])
def test_one_rank_saves_what_it_has_gathered(rank: int, tmp_path: Path, is_inside: bool) -> None:
    mine = torch.arange(600.0).view(30, 20) + rank
    with xrank.get_tensors_parallel(mine, [0, 1]) as parts:
        if parts and is_inside:
            report = xrank.save_model(
                {"a": torch.cat(parts), "b": torch.ones(3)}, tmp_path / "out", config_overrides=OWN,
                dtype="bf16", max_shard_size="2KB",
            )  # fmt: skip
    if parts and not is_inside:
        report = xrank.save_model({"a": torch.cat(parts), "b": torch.ones(3)}, tmp_path / "out", config_overrides=OWN)
    if rank == 0:
        assert report.ok and report.num_tensors == 2 and xrank.verify_model(tmp_path / "out").ok
        found = tensors_of(tmp_path / "out")
        want = torch.cat([mine, mine + 1])
        assert torch.equal(found["a"], want.bfloat16() if is_inside else want)
        with nullcontext() if is_inside else pytest.raises(UsageError, match="exists"):
            xrank.save_model({"a": want}, tmp_path / "out", config_overrides=OWN, overwrite=is_inside)
    check_all_work(rank, 2, tmp_path)


@pytest.mark.ranks(2)
def test_the_part_of_a_tensor_is_not_saved(rank: int, tmp_path: Path) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    tensor = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(UsageError, match="w is a DTensor") as raised:
        xrank.save_model({"w": tensor}, tmp_path / "out")
    assert "export_model on all ranks" in raised.value.next_step and not (tmp_path / "out").exists()
