"""Where ranks of a process group begin one piece of work: who missed one joins the next, and no name is used twice."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from xrank.errors import RankTimeoutError, UsageError
from xrank.ranks import registration
from xrank.ranks.registration import register


@pytest.mark.ranks(3)
def test_who_missed_one_joins_the_next(rank: int) -> None:
    if rank == 1:
        dist.barrier()
    else:
        with pytest.raises(RankTimeoutError) as caught:
            register(None, {}, timeout_seconds=0.5, call="a test")
        # On a busy machine rank 2 may come when rank 0 has not begun yet, or has given up.
        assert 1 in caught.value.waiting_for or (rank == 2 and caught.value.waiting_for == (0,))
        dist.barrier()
    found = register(None, {}, timeout_seconds=20, call="a test")
    assert found is not None
    dist.barrier()
    found.group.end(is_first=rank == 0)


@pytest.mark.ranks(3)
def test_a_group_of_some_ranks(rank: int) -> None:
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(UsageError, match="rank 1 is not in the group"):
            register(group, {}, timeout_seconds=1, call="a test")
    else:
        found = register(group, {}, timeout_seconds=20, call="a test")
        assert found is not None and found.ranks == (0, 2)
        dist.barrier(group)
        found.group.end(is_first=rank == 0)
    alone = [dist.new_group([one]) for one in range(3)][rank]
    assert register(alone, {}, timeout_seconds=1, call="a test") is None


@pytest.mark.ranks(2)
def test_ranks_of_two_hosts_say_so(rank: int) -> None:
    real = registration.process_space
    registration.process_space = lambda: f"host {rank}"
    try:
        found = register(None, {}, timeout_seconds=20, call="a test")
    finally:
        registration.process_space = real
    assert found is not None and not found.is_one_host
    dist.barrier()
    found.group.end(is_first=rank == 0)


@pytest.mark.ranks(3)
def test_a_rank_that_is_early_for_the_next_does_not_join_the_last_again(rank: int) -> None:
    first = register(None, {}, timeout_seconds=20, call="a test")
    assert first is not None
    if rank == 0:  # it ends this one only when the others have long begun to look for the next
        while any(first.group.store.peek(f"again/{other}") is None for other in (1, 2)):
            time.sleep(0.001)
        for _ in range(200):
            first.group.store.peek("nothing")
    else:
        first.group.store.put(f"again/{rank}", "1")
    first.group.end(is_first=rank == 0)
    second = register(None, {}, timeout_seconds=20, call="a test")
    assert second is not None
    dist.barrier()
    second.group.end(is_first=rank == 0)
