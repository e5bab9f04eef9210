"""Meetings across hosts: in one process, each rank a thread, through a store in memory."""

import gc
import itertools
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.ranks.failure import Deadline, FailureRecord
from xrank.ranks.meeting import Meeting, meet, meet_across_hosts
from xrank.ranks.store import GroupStore, LocalStore
from xrank.ranks.waits import Awaits, Heartbeat, LongWait, Membership, Peer, Wait
from xrank.ranks.wire import Message, Status

pytestmark = pytest.mark.usefixtures("nothing_left")

NAME = "meeting/0.1.2/1"
FIRST = 0
SOON_SECONDS = 20.0
"""Far less than the minute that these meetings may take, and more than a busy machine needs for a moment."""


class AskedStore(LocalStore):
    """A store that lets others wait for what is asked and told."""

    def __init__(self):
        super().__init__()
        self.asked = Counter()
        self.found = set()
        self.touched = threading.Condition()

    def put(self, name, value):
        super().put(name, value)
        with self.touched:
            self.touched.notify_all()

    def peek(self, name):
        with self.touched:
            self.asked[name, threading.current_thread().name] += 1
            self.touched.notify_all()
        value = super().peek(name)
        if value is not None:
            self.found.add((name, threading.current_thread().name))
        return value

    def wait_for(self, is_so):
        with self.touched:
            assert self.touched.wait_for(is_so, 30)

    def await_coming(self, rank):
        """Wait until a rank, in the thread of that name, has come: announced itself, or asked for the first."""
        self.wait_for(lambda: self.asked[NAME, f"rank {rank}"] or (NAME in self._values and rank == FIRST))


class Attending:
    """Ranks that come to one meeting, each when it is told to."""

    def __init__(self, ranks, store=None, timeout_seconds=60.0):
        self.ranks, self.timeout_seconds = ranks, timeout_seconds
        self.store = AskedStore() if store is None else store
        self.came, self.threads = {}, []

    def come(self, rank, *, through="a directory", check=lambda: None, deadline=None, period_seconds=1000.0):
        def attend():
            until = deadline or Deadline(self.timeout_seconds)
            meeting = Meeting(self.ranks, rank, self.store, NAME, until, through, check)
            try:
                if through == "memory":
                    self.came[rank] = meet(meeting)
                else:
                    self.came[rank] = meet_across_hosts(meeting, period_seconds=period_seconds)
            except XrankError as error:
                self.came[rank] = error

        self.threads.append(threading.Thread(target=attend, name=f"rank {rank}"))
        self.threads[-1].start()

    def all_said(self):
        """Return by rank the circle, or the error, that each rank got."""
        for thread in self.threads:
            thread.join(50)
        return self.came


@contextmanager
def meeting_of(ranks, **how):
    attending = Attending(ranks, **how)
    try:
        yield attending
    finally:
        for result in attending.all_said().values():
            if not isinstance(result, XrankError):
                result.close()


@contextmanager
def soon():
    started = time.monotonic()
    yield
    assert time.monotonic() - started < SOON_SECONDS


@pytest.mark.parametrize("order", list(itertools.permutations([0, 2, 1])), ids=str)
def test_all_meet_in_whatever_order_they_come(order):
    with meeting_of([FIRST, 2, 1]) as meeting, soon():
        for rank in order:
            meeting.come(rank)
            meeting.store.await_coming(rank)
        circles = meeting.all_said()
        for rank, circle in circles.items():
            assert circle.rank == rank and circle.first == FIRST and circle.ranks == (0, 2, 1)
            assert circle.peers == {r: Peer.from_this_process(r) for r in (0, 1, 2) if r != rank}
            circle.wire.set_status(Status.ARRIVED, 4)
        assert circles[0].find_absent(4) == ()
        circles[2].wire.send(0, Message({"hello": 2}))
        circles[0].wire.pump(5)
        assert circles[0].wire.inboxes[2].popleft().content == {"hello": 2}


def test_ranks_that_stay_away_are_named_on_all_that_came_and_on_who_comes_later():
    with meeting_of([0, 1, 2, 3]) as meeting:
        # It passes when rank 0 has seen that rank 1 has come.
        seen = (f"{NAME}/here/1", "rank 0")
        meeting.come(0, deadline=Deadline(60, clock=lambda: 100.0 if seen in meeting.store.found else 0.0))
        meeting.come(1)
        said = meeting.all_said()
        assert isinstance(said[0], RankTimeoutError) and said[0].waiting_for == (2, 3)
        assert isinstance(said[1], RankFailedError) and "ranks 2-3 did not arrive" in str(said[1])
        with soon():
            meeting.come(3)
            late = meeting.all_said()[3]
        assert isinstance(late, RankFailedError) and late.rank == 0 and "ranks 2-3 did not arrive" in str(late)


@contextmanager
def process():
    """A process whose life stands for a rank's."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def announced(rank, **other):
    return json.dumps({**replace(Peer.from_this_process(rank), **other).to_dict(), "way": "a directory"})


def test_a_first_rank_that_came_and_died_is_named_before_all_have_come():
    with meeting_of([0, 1, 2]) as meeting, process() as child:
        meeting.store.put(NAME, announced(0, pid=child.pid))
        meeting.come(1)
        meeting.store.await_coming(1)
        with soon():
            child.kill()
            error = meeting.all_said()[1]
        assert isinstance(error, RankFailedError) and error.rank == 0 and error.pid == child.pid


def test_a_first_rank_that_died_and_was_reaped_before_any_other_looked_is_named():
    with meeting_of([0, 1, 2]) as meeting, process() as child:
        child.kill()
        child.wait()
        meeting.store.put(NAME, announced(0, pid=child.pid))
        with soon():
            meeting.come(1)
            meeting.come(2)
            for error in meeting.all_said().values():
                assert isinstance(error, RankFailedError) and (error.rank, error.pid) == (0, child.pid)


def test_a_first_rank_announces_itself_after_its_first_beat():
    # Else it could die in between, and no rank of another host would miss a beat that never was.
    store = AskedStore()
    put, beat_at_announcement = store.put, []

    def put_and_look(name, value):
        if name == NAME:
            beat_at_announcement.append(store.peek(f"{NAME}/beat/0"))
        put(name, value)

    store.put = put_and_look
    with meeting_of([0, 1], store=store) as meeting:
        meeting.come(0)
        meeting.come(1)
        assert not any(isinstance(said, Exception) for said in meeting.all_said().values())
    assert beat_at_announcement != [None] and len(beat_at_announcement) == 1


def test_a_first_rank_of_another_host_that_died_on_the_way_to_this_wire_is_named():
    """It had announced a meeting in memory, found the others apart, and died before its first beat here."""
    far = {"host": "far", "pid": 77, "space": "another boot.1"}
    store = AskedStore()
    store.put(NAME, announced(0, **far))
    store.put("here/0", announced(0, **far))
    store.put("beat/0", "3")
    membership = Membership(store, 1, period_seconds=0.1)
    wait = Wait("", 1, (0, 1), 1, 0, "a directory", "a gather", Awaits.FIRST, ())
    long_wait = LongWait(wait, membership, lambda wait: False)
    meeting = Meeting([0, 1], 1, store, NAME, Deadline(60.0), "a directory", begin_long_wait=lambda awaits: long_wait)
    with soon(), pytest.raises(RankFailedError) as caught:
        meet_across_hosts(meeting, period_seconds=0.1)
    membership.close()
    assert (caught.value.rank, caught.value.host, caught.value.pid) == (0, "far", 77)
    assert store.peek(f"{NAME}/beat/0") is None


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_of_another_host_that_came_and_died_is_named_by_its_beat(dead):
    # Rank 3, which would watch the first, has not come; rank 2 watches rank 3, and then whoever comes after it.
    far = {"host": "far", "pid": 77, "space": "another boot.1"}
    with meeting_of([0, 1, 2, 3]) as meeting:
        store = meeting.store
        if dead == 0:
            store.put(NAME, announced(0, **far))
        store.put(f"{NAME}/here/{dead}", announced(dead, **far))
        heartbeat = Heartbeat(store, f"{NAME}/beat/{dead}", {}, lambda store, rank: None, period_seconds=1000)
        for rank in {0, 1, 2} - {dead}:
            meeting.come(rank, period_seconds=0.5)  # five are far more than a busy machine lets one wait
        heartbeat.stop()
        with soon():
            said = meeting.all_said()
        for error in said.values():
            assert isinstance(error, RankFailedError)
            assert (error.rank, error.host, error.pid) == (dead, "far", 77)


@pytest.mark.parametrize("through", ["a directory", "memory"])
def test_a_rank_that_gives_up_says_why_to_all_others(through):
    with meeting_of([0, 1, 2]) as meeting:
        meeting.come(0, through=through)
        meeting.store.await_coming(0)
        has_failed = threading.Event()

        def check():
            if has_failed.is_set():
                raise RankFailedError("the gather around this one failed", rank=9, host="far", pid=7, cause="a cause")

        meeting.come(1, through=through, check=check)
        meeting.store.await_coming(1)
        with soon():
            has_failed.set()
            said = meeting.all_said()
        meeting.come(2, through=through)
        said = meeting.all_said()
        for error in said.values():
            assert isinstance(error, RankFailedError) and (error.rank, error.cause) == (9, "a cause")


@pytest.mark.parametrize("waits", [0, 1])
def test_who_waits_for_another_hears_that_what_is_around_has_failed(waits):
    def check():
        raise RankFailedError("the gather around this one failed", rank=2, host="h", cause="a cause")

    with meeting_of([0, 1]) as meeting, soon():
        meeting.come(waits, check=check)
        assert meeting.all_said()[waits].rank == 2


@pytest.mark.parametrize("reporter", [0, 1])
def test_a_rank_that_reported_the_reason_before_its_end_is_not_the_culprit(monkeypatch, reporter):
    monkeypatch.setattr("xrank.ranks.waits.START_SECONDS", 0)
    ranks, store = [0, 1, 2, 3], LocalStore()
    deaths = {rank: FailureRecord(rank, "a", 7, "its process ended", "a gather") for rank in (reporter, 3)}

    class Looking:
        def look(self, awaited, watched):
            # The other rank finds rank 3's death, reports it and ends, while this one looks from rank to rank.
            Meeting(ranks, reporter, store, NAME, Deadline(60), "a directory").refuse(deaths[3].to_error())
            raise deaths[reporter].to_error()

    meeting = Meeting(ranks, 2, store, NAME, Deadline(60), "a directory", begin_long_wait=lambda awaits: Looking())
    with pytest.raises(RankFailedError) as raised:
        meeting.check([0, 1, 3])
    assert raised.value.rank == 3


@pytest.mark.parametrize("told", ["{}", '{"rank": 1, "host": 5, "pid": 7, "space": "s"}'])
def test_a_rank_that_does_not_say_who_it_is_ends_the_meeting(told):
    with meeting_of([0, 1]) as meeting, soon():
        meeting.store.put(f"{NAME}/here/1", told)
        meeting.come(0)
        assert "description of its process" in str(meeting.all_said()[0])


def test_a_store_that_goes_away_ends_the_meeting():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    port = server.port

    def client():
        return GroupStore(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))

    with ThreadPoolExecutor(2) as pool, soon():
        coming = [
            pool.submit(meet_across_hosts, Meeting([0, 1, 2], rank, client(), NAME, Deadline(60), "a directory"))
            for rank in (0, 1)
        ]
        looking = client()
        # Until rank 1 waits for the others, and rank 0 has all its connections: to make one it would wait for minutes.
        while any(looking.peek(f"{NAME}/{sign}") is None for sign in ("here/1", "beat/0")):
            assert not any(future.done() for future in coming)
        del server
        gc.collect()
        for future in coming:
            with pytest.raises(RankFailedError, match="the store that connects the ranks is gone") as raised:
                future.result(40)
            assert raised.value.rank == 0
