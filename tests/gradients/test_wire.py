"""Process groups for sets of ranks, and waits that end when a rank's process has."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from xrank.errors import GradientError, RankFailedError, RankTimeoutError, UsageError
from xrank.gradients import GradientPlan, wire
from xrank.gradients.wire import RankWatch, exchange_texts, make_wire
from xrank.layout import DeviceMesh
from xrank.layout.mesh import megatron_views
from xrank.ranks.store import LocalStore
from xrank.ranks.waits import Peer


def total(group, rank: int) -> int:
    value = torch.tensor([1 << rank])
    dist.all_reduce(value, group=group)
    return int(value)


@pytest.mark.ranks(4)
def test_groups_of_a_plan_exchange_among_its_ranks(rank, world_size):
    views = megatron_views(4, tp=2)
    module = nn.Linear(2, 2)
    module.weight.sequence_parallel = True
    plan = GradientPlan.from_module(module, views)
    made = make_wire(plan.groups())
    groups = made.groups
    for ranks in plan.groups():
        group = groups[ranks]
        assert tuple(dist.get_process_group_ranks(group)) == ranks
        assert total(group, rank) == sum(1 << other for other in ranks)
    assert groups[0, 1, 2, 3] is dist.group.WORLD
    assert made.exchange("alone", (rank,)) == {rank: "alone"}
    with pytest.raises(UsageError, match=r"no process group of ranks \[0, 3\]"):
        made.exchange("", (0, 3))


@pytest.mark.ranks(4)
def test_groups_are_made_once_and_kept(rank):
    halves = (0, 1) if rank < 2 else (2, 3)
    first = make_wire([halves]).groups
    count = len(dist.distributed_c10d._world.pg_names)
    again = make_wire([halves, halves[::-1], (rank,)]).groups
    assert again[halves] is first[halves]
    assert len(dist.distributed_c10d._world.pg_names) == count
    # Others are added, also where only some ranks ask; the order of asking does not matter.
    pairs = [(0, 2), (0, 3)] if rank == 0 else [(0, rank)] if rank > 1 else []
    more = make_wire(pairs[::-1]).groups
    assert all(total(more[pair], rank) == sum(1 << other for other in pair) for pair in pairs)
    assert more[halves] is first[halves]


@pytest.mark.ranks(4)
def test_a_group_that_not_all_ask_for_is_refused_on_all_ranks(rank):
    wanted = [(0, 1)] if rank == 0 else []
    with pytest.raises(GradientError, match=r"rank 0 exchanges .* ranks \[0, 1\], and rank 1 does not") as caught:
        make_wire(wanted)
    assert caught.value.rank == 1
    # Nothing was made, and nothing hangs after it.
    assert total(make_wire([(0, 1, 2, 3)]).groups[0, 1, 2, 3], rank) == 15


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ranks", [(0, 5), (1, 2), (0, 0)])
def test_groups_of_ranks_that_are_not_there(rank, ranks):
    with pytest.raises(GradientError, match="rank 0 asks for a group of ranks"):
        make_wire([ranks] if rank == 0 else [])


@pytest.mark.ranks(2)
def test_a_mesh_larger_than_the_world_is_refused(rank):
    plan = GradientPlan.from_module(nn.Linear(2, 2), DeviceMesh((4,), ("dp",)))
    with pytest.raises(GradientError, match="rank 0 asks for") as caught:
        make_wire(plan.groups())
    assert "make the mesh of the ranks of this world" in caught.value.next_step


@pytest.mark.ranks(3)
def test_texts_of_any_length_are_exchanged(rank):
    texts = ["", "héllo", "x" * 5000]
    assert exchange_texts(texts[rank]) == texts
    assert exchange_texts("") == [""] * 3


def test_without_a_world():
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="none is initialized"):
        make_wire([(0, 1)])


def test_nothing_is_kept_of_a_world_that_ended(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        made = make_wire([])
        assert len(wire._made) == 1
    finally:
        dist.destroy_process_group()
    del made
    gc.collect()
    assert len(wire._made) == 0


pytestmark = pytest.mark.timeout(60)


class Work:
    """A collective that is done after some looks, or never, or fails."""

    def __init__(self, num_looks: int | None = None, error: str = "") -> None:
        self.num_looks, self.error, self.waits = num_looks, error, 0

    def is_completed(self) -> bool:
        if self.num_looks is None:
            return False
        self.num_looks -= 1
        return self.num_looks < 0

    def wait(self, timeout: object = None) -> None:
        self.waits += 1
        if self.error or timeout is not None:
            raise RuntimeError(self.error or "Operation timed out!")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield child
    child.kill()
    child.wait()


def watch_of(process: subprocess.Popen[bytes], store: LocalStore) -> RankWatch:
    """Return rank 0's watch of a world of two; the process is rank 1's."""
    return RankWatch(store, 0, [Peer.from_this_process(0), replace(Peer.from_this_process(1), pid=process.pid)])


@pytest.mark.parametrize("is_on_host", [True, False])
def test_a_wait_ends_when_a_rank_has_ended(process: subprocess.Popen[bytes], is_on_host: bool) -> None:
    store = LocalStore()
    watch = watch_of(process, store)
    done = Work(3)
    watch.wait(done, is_on_host=is_on_host)
    assert done.waits
    process.kill()
    begun = time.monotonic()
    with pytest.raises(RankFailedError, match="rank 1 failed: its process ended without a report") as caught:
        watch.wait(Work(), is_on_host=is_on_host)
    assert caught.value.rank == 1 and caught.value.pid == process.pid
    assert time.monotonic() - begun < 10


def test_an_error_of_torch_is_explained_by_the_rank_that_ended(process: subprocess.Popen[bytes]) -> None:
    watch = watch_of(process, LocalStore())
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        watch.wait(Work(0, "Connection closed by peer"), is_on_host=True)
    with pytest.raises(RankTimeoutError, match="did not all come"):
        watch.wait(Work(0, "Timed out waiting 1000ms for recv operation to complete"), is_on_host=True)
    process.kill()
    with pytest.raises(RankFailedError, match="rank 1 failed"):
        watch.wait(Work(0, "Connection closed by peer"), is_on_host=True)


def test_the_first_death_is_named_whatever_a_rank_sees_itself(process: subprocess.Popen[bytes]) -> None:
    """A rank that raises because another died ends, too; a third rank that looks later must not name it."""
    store = LocalStore()
    watch = watch_of(process, store)
    record = '{"rank": 2, "host": "far", "pid": 7, "cause": "it died", "call": "a step", "id": "1", "absent": []}'
    store.claim(watch._name, record)
    process.kill()
    with pytest.raises(RankFailedError, match="rank 2 failed: it died"):
        watch.wait(Work(), is_on_host=True)
