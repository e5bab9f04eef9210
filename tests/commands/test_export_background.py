"""Exports in the background: training goes on, and the folder has the model of the moment of the call, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import xrank
from tests.commands.exported import assert_same_folder, llama, shard, tensors_of
from tests.commands.forked_exports import ForkedExports, forked_exports
from tests.commands.made_workspaces import wide_model
from tests.sampled import sampled
from xrank.errors import NoSpaceError, RankFailedError, UsageError, XrankError
from xrank.recipes import lent_model

pytestmark = pytest.mark.timeout(300)

PATIENCE_SECONDS = 120


class Gate:
    """A `progress` that holds the export until it is opened."""

    def __init__(self) -> None:
        self.opened, self.is_running = threading.Event(), threading.Event()

    def __call__(self, done: int, total: int) -> None:
        self.is_running.set()
        assert self.opened.wait(PATIENCE_SECONDS)


def train_step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(9)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", sampled(["fsdp", "hsdp", "fsdp tp"], 3))
def test_training_goes_on(rank, world_size, tmp_path, kind):
    """Steps with collectives, and gathers in the same group, happen while the export certainly runs."""
    model = llama()
    if rank == 0:
        model.save_pretrained(tmp_path / "want")
    model = shard(model, kind, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gate = Gate()
    exported = xrank.export_model(model, tmp_path / "out", background=True, progress=gate)
    for _ in range(3):
        train_step(model, optimizer)
        with xrank.get_tensors_parallel(torch.full((2,), rank), [0, 1, 2, 3]) as gathered:
            assert [int(one[0]) for one in gathered] == ([0, 1, 2, 3] if rank == 0 else [])
    if rank == 0:
        assert gate.is_running.wait(PATIENCE_SECONDS) and not exported.done()
        assert "running" in repr(exported) and not (tmp_path / "out").exists()
        with pytest.raises(TimeoutError):
            exported.result(timeout=0)
    gate.opened.set()
    report = exported.result(PATIENCE_SECONDS)
    assert report.ok and exported.done() and exported.exception() is None and "done" in repr(exported)
    reports = [None] * world_size
    dist.all_gather_object(reports, report)
    assert reports == [report] * world_size
    if rank == 0:
        assert_same_folder(tmp_path / "out", tmp_path / "want")
        assert xrank.verify_model(tmp_path / "out").ok


@pytest.mark.ranks(4)
def test_the_next_export_waits_for_the_last(rank, tmp_path):
    gate, tensors = Gate(), {"w": torch.zeros(1000)}
    first = xrank.export_model(tensors, tmp_path / "0", background=True, progress=gate)
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    for step in (1, 2, 3):
        tensors["w"].fill_(step)
        second = xrank.export_model(tensors, tmp_path / str(step), background=step != 3)
        assert first.done()
    assert second.ok
    for step in range(4):
        assert tensors_of(tmp_path / str(step))["w"].eq(step).all()
    opener.join()


def failing(rank: int) -> Any:
    def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor.device.type != "meta":
            raise ValueError(f"no scale for {name} on rank {rank}")
        return {name: tensor.half()}

    return quantize


@pytest.mark.ranks(4)
@pytest.mark.parametrize("readers", [(0, 1, 2, 3), (0,), ()], ids=["all", "first", "none"])
def test_a_failure_is_raised_by_the_result_and_by_the_next_export(rank, tmp_path, readers):
    tensors = {"w": torch.arange(8.0)}
    exported = xrank.export_model(tensors, tmp_path / "out", background=True, transform=failing(rank))
    if rank in readers:
        with pytest.raises((ValueError, RankFailedError), match="no scale for w"):
            exported.result(PATIENCE_SECONDS)
        assert "failed" in repr(exported)
    if len(readers) < 4:  # the ranks that have not read it raise it, and so all others
        with pytest.raises(XrankError, match="no scale for w"):
            xrank.export_model(tensors, tmp_path / "out", background=True)
    assert not (tmp_path / "out").exists()
    assert xrank.export_model(tensors, tmp_path / "out").ok


@pytest.mark.ranks(4)
def test_a_copy_beyond_the_budget_is_refused_on_every_rank(rank, tmp_path):
    # Each rank has another tensor, and rank 2's is the largest.
    tensors = {f"w{rank}": torch.ones(2_000_000 if rank == 2 else 1000)}
    own = UsageError if rank == 2 else RankFailedError
    with pytest.raises(own, match=r"the copy of rank 2's part takes 8.0 MB, and max_memory= leaves 6.0 MB"):
        xrank.export_model(tensors, tmp_path / "out", background=True, max_memory="70MB")
    lent_model.available_memory_nbytes = lambda: 7_000_000
    own = NoSpaceError if rank == 2 else RankFailedError
    with pytest.raises(own, match=r"the host has 7.0 MB of memory left for 4 rank"):
        xrank.export_model(tensors, tmp_path / "out", background=True)
    assert os.listdir(tmp_path) == []
    assert xrank.export_model(tensors, tmp_path / "out", background=True, max_memory="72MB").result().ok


@pytest.mark.ranks(4)
def test_what_can_be_refused_at_once_is(rank, tmp_path):
    tensors = {"w": torch.ones(3)}
    (tmp_path / "out").mkdir(exist_ok=True)
    if rank == 0:
        (tmp_path / "out" / "mine.txt").touch()
    dist.barrier()
    with pytest.raises(XrankError, match="out"):
        xrank.export_model(tensors, tmp_path / "out", background=True)
    with pytest.raises(XrankError, match="background"):
        xrank.export_model(tensors, tmp_path / "new", background=rank == 1)
    with pytest.raises(XrankError, match="sparse"):
        xrank.export_model({"w": tensors["w"].to_sparse()} if rank == 3 else tensors, tmp_path / "new", background=True)


def test_every_kind_of_tensor_is_copied(tmp_path):
    """Strides, lazy bits, no elements, no dims, expanded and shared memory, small floats."""
    base = torch.randn(6, 4)
    tensors = {
        "t": base.t(), "part": base[1:3, ::2], "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "expanded": torch.ones(1, 5).expand(3, 5),
        "tied": base, "tied too": base, "fp8": base.to(torch.float8_e4m3fn), "bool": base > 0,
    }  # fmt: skip
    want = {name: tensor.resolve_conj().clone() for name, tensor in tensors.items()}
    exported = xrank.export_model(tensors, tmp_path / "now")
    later = xrank.export_model(tensors, tmp_path / "later", background=True)
    base.zero_()
    assert later.result().output["files"] == exported.output["files"]
    for name, tensor in tensors_of(tmp_path / "later").items():
        assert (
            tensor.contiguous().flatten().view(torch.uint8).equal(want[name].contiguous().flatten().view(torch.uint8))
        )


EXIT = """
import sys, threading, torch, xrank

def hold(done, total):
    assert threading.main_thread().is_alive() is False or left.wait(60)

left = threading.Event()
xrank.export_model({"w": torch.arange(8.0)}, sys.argv[1], background=True, progress=hold)
left.set()
if len(sys.argv) > 2:
    raise SystemExit("the training failed")
"""


@pytest.mark.parametrize("fails", sampled([True, False], 2), ids=["fails", "ends"])
def test_the_end_of_the_process_waits_for_it(tmp_path, fails):
    command = [sys.executable, "-c", EXIT, str(tmp_path / "out"), *(["x"] if fails else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == fails and ("the training failed" in done.stderr) == fails, done.stderr
    assert tensors_of(tmp_path / "out")["w"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


# ---- ranks that die


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedExports]:
    with forked_exports() as forked:
        yield forked


def check_made(out: Path) -> None:
    made, want = tensors_of(out), wide_model(0)
    assert sorted(made) == sorted(want) and all(torch.equal(made[name], want[name]) for name in want)


@pytest.mark.parametrize("far", sampled([False, True], 2), ids=["one host", "hosts"])
def test_torchs_process_group_may_end_meanwhile(ranks, tmp_path, far):
    said = ranks(tmp_path / "out", far=far, leaves_group=True, options={"background": True})
    assert all(one is not None and "report" in one and not one["left"] for one in said), said
    check_made(tmp_path / "out")


@pytest.mark.parametrize("seed", sampled(range(3), 3))
def test_a_rank_that_is_killed_is_named_on_all_others(ranks, tmp_path, seed):
    rng = random.Random(seed)
    killed = rng.randrange(4) if seed else 0
    act, options = [killed, "kill", rng.randint(1, 60)], {"timeout_seconds": 60, "background": True}
    said = ranks(tmp_path / "out", act=act, far=seed % 2, options=options)
    if said[killed] is None:
        for rank in {0, 1, 2, 3} - {killed}:
            one = said[rank]
            assert one is not None and ("report" in one or one["rank"] == killed), (rank, said)
            assert one["took_seconds"] < 30
    said = ranks(tmp_path / "out", options={"background": True, "overwrite": True})
    assert all(one is not None and "report" in one for one in said), said
    check_made(tmp_path / "out")
