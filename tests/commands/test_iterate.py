"""Iterating over live models: the tensors of the exported folder, whole, in bounded memory, whoever stops or fails."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xrank
from tests.commands.exported import llama, shard, tensors_of
from xrank.engine.tensor_target import TensorsAhead, split_budget
from xrank.errors import ContradictionError, RankFailedError, UsageError

pytestmark = pytest.mark.timeout(300)


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert got[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


@pytest.mark.ranks(4)
def test_it_gives_what_an_export_writes(rank: int, world_size: int, tmp_path: Path) -> None:
    model = shard(llama(tie_word_embeddings=True), "fsdp tp", world_size)
    xrank.export_model(model, tmp_path / "kept")
    xrank.export_model(model, tmp_path / "cast", dtype="bf16")
    for folder, dtype in (("kept", None), ("cast", torch.bfloat16)):
        given = list(xrank.iter_model(model, dtype=dtype))
        assert given == [] or rank == 0
        if rank == 0:
            assert_equal(dict(given), tensors_of(tmp_path / folder))
            # In the model's order, a tied tensor once.
            assert [name for name, _ in given] == [name for name in llama().state_dict() if name != "lm_head.weight"]
    whole = dict(xrank.iter_model(model, ranks="all", max_memory="2MB"))
    assert_equal(whole, tensors_of(tmp_path / "kept"))
    whole["model.norm.weight"].zero_()  # its own memory: the model's stays as it is
    assert all((tensor != 0).any() for _, tensor in xrank.iter_model(model))


def rows(rank: int, count: int = 40) -> dict[str, Any]:
    """A state dict of 1 MB tensors, cut over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = {f"layer.{i}": torch.full((256, 1024), float(i)) for i in range(count)}
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


@pytest.mark.ranks(4)
def test_whoever_stops_early_lets_the_others_end(rank: int) -> None:
    state = rows(rank)
    taken = 0
    for name, tensor in xrank.iter_model(state, max_memory="8MB"):
        assert name == f"layer.{taken}" and (tensor == taken).all()
        taken += 1
        if taken == 3:
            break
    assert taken == (3 if rank == 0 else 0)
    assert [thread.name for thread in threading.enumerate() if thread.name == "xrank-ahead"] == []
    # To all: one rank closes at once, one stops, the others have all of it.
    taken = 0
    with xrank.iter_model(state, ranks="all", max_memory="8MB") as tensors:
        for _ in tensors:
            taken += 1
            if rank == 0 or (rank == 2 and taken == 5):
                break
    assert taken == {0: 1, 2: 5}.get(rank, 40)
    # And one that nobody iterates over.
    unused = xrank.iter_model(state)
    unused.close()
    unused.close()
    assert list(unused) == []


@pytest.mark.ranks(4)
def test_what_a_consumer_raises_is_named_on_all(rank: int) -> None:
    state = rows(rank)

    def consume() -> None:
        with xrank.iter_model(state, max_memory="8MB") as tensors:
            for name, _ in tensors:
                if name == "layer.5":
                    raise OSError("the engine is gone")

    with pytest.raises(OSError if rank == 0 else RankFailedError, match="the engine is gone") as raised:
        consume()
    assert rank == 0 or raised.value.rank == 0
    assert len(list(xrank.iter_model(state))) == (40 if rank == 0 else 0)  # the next call is as any


@pytest.mark.ranks(4)
def test_ranks_that_disagree_get_nothing(rank: int) -> None:
    state: dict[str, Any] = rows(rank, 3)
    with pytest.raises(UsageError, match="rank 2 has dtype bf16, rank 0 keep"):
        xrank.iter_model(state, dtype="bf16" if rank == 2 else None)
    state["whole"] = torch.arange(300_000) + (rank == 3)
    with pytest.raises(ContradictionError, match="whole"):
        xrank.iter_model(state)
    with pytest.raises(UsageError, match="ranks= must be 'first' or 'all'; got 'each'"):
        xrank.iter_model(state, ranks="each")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the memory budget"):
        xrank.iter_model(state, max_memory="1MB")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_model_that_changes_meanwhile_is_named(rank: int, victim: int) -> None:
    """Also one of a rank that gets nothing, by another thread of it, while the first takes tensors."""
    state: dict[str, Any] = rows(rank, 3) | {"whole": torch.zeros(1000)}
    store = dist.distributed_c10d._get_default_store()

    def change() -> None:
        store.wait(["go"])
        state["whole"].add_(1)
        store.set("changed", "1")

    changing = threading.Thread(target=change if rank == victim else int)
    changing.start()
    with pytest.raises((ContradictionError, RankFailedError), match="changed in place"):
        for _ in xrank.iter_model(state):
            store.set("go", "1")
            store.wait(["changed"])
    changing.join()


def iterate_and_die(folder: str, victim: int) -> None:
    rank = dist.get_rank()
    tensors = xrank.iter_model(rows(rank), ranks="all", max_memory="8MB")
    try:
        for number, _ in enumerate(tensors):
            if number == 7 and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankFailedError as error:
        Path(folder, str(rank)).write_text(str(error.rank))


def test_a_rank_that_is_killed_is_named_on_all(rank_pool: Any, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 2 died"):
        rank_pool.run(4, iterate_and_die, str(tmp_path), 2, timeout_seconds=150)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2", "3": "2"}


def test_one_process_alone_gives_its_tensors() -> None:
    state = {"b": torch.arange(7).view(1, 7).t(), "a": torch.randn(3, 5)[:, 1:3], "none": torch.empty(0, 4)}
    given = dict(xrank.iter_model(state))
    assert list(given) == list(state)
    assert_equal(given, {name: tensor.contiguous() for name, tensor in state.items()})
    assert given["a"].data_ptr() != state["a"].data_ptr()
    # A bare for that raises closes it, and nothing is left at work.
    with pytest.raises(ZeroDivisionError):
        for _ in xrank.iter_model(state):
            _ = 1 / 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("xrank")]


def test_a_tensor_is_freed_when_its_caller_drops_it() -> None:
    state = {f"layer.{i}": torch.full((1024, 256), float(i)) for i in range(30)}
    alive: list[Any] = []
    for _, tensor in xrank.iter_model(state, max_memory="6MB"):
        alive.append(weakref.ref(tensor.untyped_storage()))
        del tensor
        assert [ref for ref in alive if ref() is not None] == []
    assert len(alive) == 30


def anonymous_nbytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says it so")
def test_the_process_grows_by_no_more_than_the_budget() -> None:
    state = {f"layer.{i}": torch.full((1024, 1024), float(i)) for i in range(24)}
    before, most = anonymous_nbytes(), 0
    for _, tensor in xrank.iter_model(state, max_memory="20MB"):
        del tensor
        most = max(most, anonymous_nbytes())
    assert most - before < 22_000_000  # of 100 MB


class Counted:
    """Stands for `make_whole_tensors`: counts what is made and not yet taken."""

    def __init__(self) -> None:
        self.untaken, self.most, self.buckets = 0, 0, []
        self.made, self.lock = threading.Semaphore(0), threading.Lock()

    def count(self, nbytes: int) -> None:
        """Add what was made, or take off what was taken; each is done by a thread of its own."""
        with self.lock:
            self.untaken += nbytes
            self.most = max(self.most, self.untaken)

    def make(self, numbers: Sequence[int], cancelled: Callable[[], bool]) -> list[torch.Tensor]:
        assert not cancelled()
        self.count(sum(SIZES[number] for number in numbers))
        self.buckets.append(list(numbers))
        self.made.release()
        return [torch.full((1,), number) for number in numbers]


SIZES = [10, 20, 30, 40, 30, 250, 10, 45, 45, 45, 5]


def test_what_nobody_has_taken_stays_within_the_room() -> None:
    whole = Counted()
    with closing(TensorsAhead(whole.make, SIZES, 100, lambda: False)) as ahead:
        for number, nbytes in enumerate(SIZES):
            whole.count(-nbytes)  # before: as soon as it is taken, the next may be made
            assert int(ahead.take(number)) == number
    assert whole.buckets == [[0, 1], [2], [3], [4], [5], [6], [7], [8], [9, 10]]
    assert whole.most <= 250  # the one that is larger than the room, alone
    whole = Counted()
    with closing(TensorsAhead(whole.make, SIZES[:5], 100, lambda: False)):
        for _ in range(3):
            assert whole.made.acquire(timeout=50)
    # Full: it waited, until it was closed.
    assert whole.untaken == 100 and whole.most == 100 and len(whole.buckets) == 3
    gc.collect()
    assert split_budget(64_000_000, 2)[1] >= 40_000_000 and split_budget(2_000_000, 4)[1] >= 0
