"""Circles: how ranks that have met wait for each other, over both wires; ranks are threads or need not even act."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.failure import Deadline, FailureRecord
from xrank.ranks.group import RankGroup
from xrank.ranks.store import LocalStore
from xrank.ranks.waits import Peer
from xrank.ranks.wire import Bells, Board, HostWire, Link, Message, Status, StoreWire

pytestmark = pytest.mark.usefixtures("nothing_left")

SOON_SECONDS = 20.0
"""Far less than the minute that these waits may take, and more than a busy machine needs for a moment."""
CALL = 1


def host_wires(ranks, peers):
    fd = Board.create(len(ranks))
    boards = {rank: Board(fd, len(ranks)) for rank in ranks}
    os.close(fd)
    links = {rank: {} for rank in ranks}
    for rank in ranks[1:]:
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        links[ranks[0]][rank], links[rank][ranks[0]] = map(Link, pair)
    bells = Bells.create()
    shared = {rank: Bells(map(os.dup, bells.descriptors)) for rank in ranks}
    bells.close()
    return {rank: HostWire(ranks, rank, boards[rank], shared[rank], links[rank], others(rank, peers)) for rank in ranks}


def store_wires(ranks, peers):
    store = LocalStore()
    wires = {rank: StoreWire(ranks, rank, store, "meeting", period_seconds=1000.0) for rank in ranks}
    for rank, wire in wires.items():
        wire.watch(others(rank, peers))
    return wires


def others(rank, peers):
    return {r: peer for r, peer in peers.items() if r != rank}


@pytest.fixture(params=["host", "store"])
def meet(request, monkeypatch):
    """Return what makes circles; every rank of `lives` is the process that it gives, the others are this one."""
    monkeypatch.setattr("xrank.ranks.wire._LOOK_SECONDS", 0)
    circles = []

    def meet(*ranks, lives=()):
        pids = {**dict.fromkeys(ranks, os.getpid()), **dict(lives)}
        peers = {rank: replace(Peer.from_this_process(rank), pid=pid, host=f"host{rank}") for rank, pid in pids.items()}
        wires = {"host": host_wires, "store": store_wires}[request.param](ranks, peers)
        met = {rank: RankGroup(ranks, rank, wire, others(rank, peers)) for rank, wire in wires.items()}
        circles.extend(met.values())
        for circle in met.values():
            circle.begin(CALL)
        return met

    yield meet
    while circles:
        circles.pop().close()


@contextmanager
def soon():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_SECONDS


@contextmanager
def process():
    """A process whose life stands for a rank's."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


@contextmanager
def meanwhile(act):
    """Do something in another thread while this one waits; it may as well happen before."""
    thread = threading.Timer(0.05, act)
    thread.start()
    yield
    thread.join()


def failure(rank, cause="a cause", number=0):
    return FailureRecord(rank, f"host{rank}", 100 + rank, cause, "a call", number)


def test_a_rank_has_left_a_call_when_it_has_left_those_around_it_too(meet):
    circle, other = meet(0, 1).values()
    left = []
    for act in (
        lambda: circle.begin(2),  # inside the body of 1
        lambda: circle.leave(2),
        lambda: circle.begin(3),
        lambda: circle.leave(3),
        lambda: circle.leave(1),
        lambda: circle.begin(4),
        lambda: circle.leave(4),
    ):
        act()
        left.append(other.wire.get_status(0, Status.LEFT))
    assert left == [0, 0, 0, 0, 3, 3, 4]


def test_the_deadline_names_who_has_not_come(meet):
    circles = meet(0, 1, 2, 3)
    circles[1].arrive(CALL)
    with soon(), pytest.raises(RankTimeoutError) as raised:
        circles[0].receive([1, 2, 3], CALL, Deadline(0.1))
    assert raised.value.waiting_for == (2, 3) and raised.value.rank == 2
    for part in (f"rank 2 (host host2, pid {os.getpid()})", "rank 3 (host host3"):
        assert part in str(raised.value)
    assert "ranks 0-1 did" in raised.value.got
    # The first follows the others: it is named only where nobody else is missing.
    with pytest.raises(RankTimeoutError) as raised:
        circles[1].receive([0], CALL, Deadline(0.1))
    assert raised.value.waiting_for == (2, 3)
    for rank in (2, 3):
        circles[rank].arrive(CALL)
    with pytest.raises(RankTimeoutError) as raised:
        circles[1].await_arrival(0, CALL, Deadline(0.1))
    assert raised.value.waiting_for == (0,)


def ended(circle):
    circle.end_body()
    return circle


WAITS = {
    "another's message": (0, lambda circle: circle.receive([1], CALL, Deadline(60))),
    "the first's message": (1, lambda circle: circle.receive([0], CALL, Deadline(60))),
    "the bodies": (0, lambda circle: ended(circle).await_bodies(CALL, Deadline(60))),
    "the first's arrival": (1, lambda circle: circle.await_arrival(0, CALL, Deadline(60))),
    "sight": (1, lambda circle: circle.await_sight(lambda: False, CALL, Deadline(60))),
}


@pytest.mark.parametrize(("rank", "wait"), WAITS.values(), ids=WAITS)
class TestEveryWait:
    def test_hears_of_a_third_ranks_failure(self, meet, rank, wait):
        circles = meet(0, 1, 2)
        with soon(), meanwhile(lambda: circles[2].fail(failure(2))), pytest.raises(RankFailedError) as raised:
            wait(circles[rank])
        error = raised.value
        assert (error.rank, error.host, error.pid, error.cause) == (2, "host2", 102, "a cause")

    def test_hears_of_a_third_ranks_death(self, meet, rank, wait):
        with process() as child:
            circles = meet(0, 1, 2, lives={2: child.pid})
            with soon(), meanwhile(child.kill), pytest.raises(RankFailedError) as raised:
                wait(circles[rank])
            assert (raised.value.rank, raised.value.host, raised.value.pid) == (2, "host2", child.pid)
            assert "ended without a report" in raised.value.cause

    def test_does_not_end_with_a_rank_that_had_left_the_call(self, meet, rank, wait):
        with process() as child:
            circles = meet(0, 1, 2, lives={2: child.pid})
            ended(circles[2]).arrive(CALL)
            circles[2].leave(CALL)
            child.kill()
            child.wait()
            other = 1 - rank
            with (
                soon(),
                meanwhile(lambda: circles[other].fail(failure(other))),
                pytest.raises(RankFailedError) as raised,
            ):
                wait(circles[rank])
            assert raised.value.rank == other, "it still waited"

    def test_hears_of_the_failure_of_what_is_around(self, meet, rank, wait):
        circle = meet(0, 1, 2)[rank]
        has_failed = threading.Event()

        def check_around():
            if has_failed.is_set():
                raise KeyError("what is around")

        circle.check_around = check_around
        with soon(), meanwhile(has_failed.set), pytest.raises(KeyError, match="what is around"):
            wait(circle)


def test_a_failure_in_a_later_call_is_none_of_the_call_that_was_left(meet):
    # Rank 2 leaves early and fails in the next call, while rank 1 is still in the body of this one.
    circles = meet(0, 1, 2)
    ended(circles[2]).leave(CALL)
    circles[2].begin(2)
    circles[2].fail(failure(2))
    circles[0].check(CALL)
    circles[1].look(CALL)
    circles[0].end_body()

    def end_late():
        ended(circles[1]).leave(CALL)

    with soon(), meanwhile(end_late):
        circles[0].await_bodies(CALL, Deadline(60))
    circles[0].leave(CALL)
    for rank in (0, 1):
        circles[rank].begin(2)
        with pytest.raises(RankFailedError, match="rank 2"):
            circles[rank].look(2)


@pytest.mark.parametrize("failed", [0, 1])
def test_who_left_a_call_early_knows_that_it_failed_there(meet, failed):
    circles = meet(0, 1, 2)
    ended(circles[2]).leave(CALL)
    circles[2].begin(2)
    circles[failed].fail(failure(failed, number=CALL))
    circles[2].wire.pump(0)
    assert circles[2].has_failed_before()
    assert not circles[1].has_failed_before() and not circles[0].has_failed_before()  # they are there still


def test_a_failure_in_this_call_or_after_the_first_had_left_is_none_before(meet):
    circles = meet(0, 1, 2)
    circles[1].fail(failure(1, number=CALL))
    circles[2].wire.pump(0)
    assert not circles[2].has_failed_before()
    for rank in (0, 2):  # as all are that could be left
        ended(circles[rank]).leave(CALL)
        circles[rank].begin(2)
    circles[2].wire.pump(0)
    assert not circles[2].has_failed_before()  # the first hears of it where this one does


def test_what_came_before_a_failure_counts(meet):
    # The others may have failed in a later call, which this rank is not at yet.
    circles = meet(0, 1, 2)
    circles[1].send(0, Message({"mine": 1}), CALL)
    for rank in (1, 2):
        circles[rank].arrive(CALL)
        ended(circles[rank]).leave(CALL)
    circles[2].begin(2)
    circles[2].fail(failure(2))
    assert circles[0].receive([1], CALL, Deadline(60)) == (1, Message({"mine": 1}))
    circles[0].arrive(CALL)
    ended(circles[0]).await_bodies(CALL, Deadline(60))
    circles[1].await_arrival(0, CALL, Deadline(60))
    circles[0].send(1, Message({"done": 1}), CALL)
    assert circles[1].receive([0], CALL, Deadline(60)) == (0, Message({"done": 1}))
    for rank in (0, 1):
        with pytest.raises(RankFailedError, match="rank 2"):
            circles[rank].check(2)


def test_who_was_stopped_for_longer_than_its_patience_still_hears_of_a_death(meet):
    with process() as child:
        circle = meet(0, 1, lives={1: child.pid})[0]
        child.kill()
        child.wait()
        stopped_meanwhile = Deadline(2, clock=iter([0.0, 3.0]).__next__)
        with pytest.raises(RankFailedError, match="rank 1 failed: its process ended"):
            circle.await_sight(lambda: False, CALL, stopped_meanwhile)


def test_a_source_that_lets_go_is_heard_at_once_after_what_it_sent(meet):
    circles = meet(0, 1, 2)
    circles[1].send(0, Message({"last": 1}), CALL)
    with soon():
        circles[1].close()
        assert circles[0].receive([1, 2], CALL, Deadline(60)) == (1, Message({"last": 1}))
        with pytest.raises(RankFailedError) as raised:
            circles[0].receive([1], CALL, Deadline(60))
    assert raised.value.rank == 1
    # Who waits for another is none the wiser, and need not be.
    with meanwhile(lambda: circles[0].send(2, Message({"done": 1}), CALL)):
        assert circles[2].receive([0], CALL, Deadline(60)) == (0, Message({"done": 1}))


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_has_left_and_lets_go_ends_no_wait_for_another(meet, goes_on):
    # It left early, and ended, or failed in the next call, while the body of a third runs.
    circles = meet(0, 1, 2)
    for circle in circles.values():
        circle.arrive(CALL)
    ended(circles[1]).leave(CALL)
    if goes_on:
        circles[1].begin(2)
        circles[1].fail(failure(2, number=2))
    circles[1].close()
    with soon(), meanwhile(lambda: ended(circles[2])):
        ended(circles[0]).await_bodies(CALL, Deadline(60))
    circles[0].leave(CALL)
    circles[0].begin(2)
    if goes_on:
        with pytest.raises(RankFailedError, match="rank 2 failed: a cause"):
            circles[0].look(2)
    else:
        with soon(), pytest.raises(RankFailedError, match="rank 1 failed: its process ended"):
            circles[0].receive([1, 2], 2, Deadline(60))


def test_a_rank_that_reads_late_is_sent_to_when_it_reads(meet):
    circles = meet(0, 1)
    payload = bytes(circles[0].wire.max_payload_nbytes)
    texts = [str(i) * 10_000 for i in range(100)]  # more than a socket holds

    read = []
    with soon(), meanwhile(lambda: read.extend(circles[1].receive([0], CALL, Deadline(60)) for _ in texts)):
        for text in texts:
            circles[0].send(1, Message({"text": text}, payload), CALL)
    assert read == [(0, Message({"text": text}, payload)) for text in texts]


def test_who_sends_to_a_rank_that_never_reads_hears_of_its_end():
    with process() as child:
        peers = {rank: replace(Peer.from_this_process(rank), pid=child.pid) for rank in (0, 1)}
        wires = host_wires((0, 1), peers)
        circle = RankGroup((0, 1), 0, wires[0], {1: peers[1]})
        with soon(), meanwhile(child.kill), pytest.raises(RankFailedError) as raised:
            while True:
                circle.send(1, Message({}, bytes(32 << 10)), CALL)
        assert raised.value.rank == 1 and raised.value.pid == child.pid
        for wire in wires.values():
            wire.close()
