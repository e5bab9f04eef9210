"""The ranks of an engine agree on the calls in which they hold one step."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from xrank.errors import RankFailedError
from xrank.ranks.loans import MemoryOffer
from xrank.refit.peers import EngineRanks, PeerRank, Phase, RankStatus, StatusBlock

DONE = RankStatus(Phase.DONE, step=7, round=3, offer=5)


class Peer:
    """Another rank, with a given status."""

    role = "engine rank 1"

    def __init__(self, status: RankStatus) -> None:
        self.status = status

    def read(self) -> RankStatus:
        return self.status

    try_read = read

    def make_error(self, cause: str) -> RankFailedError:
        return RankFailedError(f"{self.role} failed: {cause}", rank=1)


def engine_ranks(own: RankStatus, other: RankStatus) -> EngineRanks:
    block, peers = StatusBlock(), [Peer(other)]
    block.write(own)
    return EngineRanks(block, peers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "other",
    [
        replace(DONE, phase=Phase.CLOSED, committed=3),
        replace(DONE, phase=Phase.READING, step=-1, round=4, committed=3),  # in its next call already
    ],
)
def test_a_rank_that_has_committed_the_step_is_not_waited_for(other: RankStatus) -> None:
    ranks = engine_ranks(DONE, other)
    assert ranks.wait_for_all(DONE, ranks.check)


def test_a_rank_that_failed_and_repeated_its_call_has_not_committed() -> None:
    ranks = engine_ranks(DONE, RankStatus(Phase.WAITING, step=-1, round=4, committed=2))
    with pytest.raises(
        RankFailedError, match="engine rank 1 failed: it failed in this call, and has already called again"
    ):
        ranks.wait_for_all(DONE, ranks.check)


@pytest.mark.parametrize(("other", "round_"), [(2, 4), (3, 4), (4, 4), (9, 9)])
def test_a_call_joins_those_of_ranks_that_have_repeated_theirs(other: int, round_: int) -> None:
    assert engine_ranks(DONE, RankStatus(round=other)).find_round() == round_


def test_the_failure_of_an_earlier_call_does_not_count() -> None:
    engine_ranks(DONE, RankStatus(Phase.FAILED, round=2, cause="late")).check()
    with pytest.raises(RankFailedError, match="late"):
        engine_ranks(DONE, RankStatus(Phase.FAILED, round=3, cause="late")).check()


def test_a_status_that_its_owner_is_paused_in_writing_is_read_afterwards() -> None:
    block, ends = StatusBlock(), threading.Event()
    row = block.find_row(0, 8)
    assert row is not None
    row[:4] = b"torn"
    offer = MemoryOffer([block], across_hosts=True)
    peer = PeerRank("engine rank 1", 1, offer.describe())
    found: list[RankStatus] = []

    def read() -> None:
        found.append(peer.read())
        ends.set()

    try:
        thread = threading.Thread(target=read)
        thread.start()
        assert not ends.wait(0.2)  # a thousand readings at once would have ended
        block.write(DONE)
        thread.join()
        assert found == [DONE]
    finally:
        peer.close()
        offer.close()
