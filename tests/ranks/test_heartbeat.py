"""Heartbeats by a clock of the test's own: its seconds pass when the test says so, the threads' looks in between."""

import os
import subprocess
import sys
import threading
import time

import pytest

from xrank.ranks.store import LocalStore
from xrank.ranks.waits import Heartbeat

pytestmark = pytest.mark.usefixtures("nothing_left")

PERIOD_SECONDS = 0.001
"""Between two looks; the test's clock counts in the same periods."""


class WatchedStore(LocalStore):
    """A store that knows how often rank 0 has beaten; after each beat it looks at another's."""

    def __init__(self):
        super().__init__()
        self.num_beats = 0
        self.beaten = threading.Condition()

    def put(self, name, value):
        super().put(name, value)
        if name == "beat/0":
            with self.beaten:
                self.num_beats += 1
                self.beaten.notify_all()

    def await_looks(self, count):
        with self.beaten:
            end = self.num_beats + count + 1
            assert self.beaten.wait_for(lambda: self.num_beats >= end, 20)


class Watch:
    """Rank 0's heartbeat among three; `told` has whom it found missing."""

    def __init__(self, store):
        self.store, self.told, self.periods = store, [], 0.0
        self.heartbeat = Heartbeat(
            store,
            "beat/0",
            {1: "beat/1", 2: "beat/2"},
            lambda store, rank: self.told.append(rank),
            period_seconds=PERIOD_SECONDS,
            clock=lambda: self.periods * PERIOD_SECONDS,
        )

    def pass_periods(self, count):
        """Let a time pass in which it looks often enough."""
        self.store.await_looks(1)  # it has seen what is there now
        self.periods += count
        self.store.await_looks(10)


@pytest.fixture
def watch_over():
    watches = []

    def watch_over(store):
        watches.append(Watch(store))
        return watches[-1]

    yield watch_over
    for watch in watches:
        watch.heartbeat.stop()


@pytest.fixture
def watch(watch_over):
    return watch_over(WatchedStore())


def test_five_missed_periods_are_an_end_which_is_told_once(watch):
    watch.store.put("beat/1", "7")
    watch.pass_periods(4.9)
    assert watch.told == []
    watch.pass_periods(0.2)
    assert watch.told == [1]
    watch.pass_periods(100)
    assert watch.told == [1]


def test_who_has_not_come_is_not_missed_and_the_next_is_watched_meanwhile(watch):
    watch.pass_periods(1000)
    assert watch.told == []
    watch.store.put("beat/2", "1")
    watch.pass_periods(5.1)
    assert watch.told == [2]
    watch.store.put("beat/1", "1")
    watch.pass_periods(5.1)
    assert watch.told == [2, 1]


def test_when_the_next_has_ended_the_one_after_it_is_watched(watch):
    watch.store.put("beat/1", "1")
    watch.store.put("beat/2", "1")
    watch.pass_periods(5.1)
    assert watch.told == [1]
    watch.store.put("beat/2", "2")
    watch.pass_periods(4.9)
    assert watch.told == [1]
    watch.pass_periods(0.2)
    assert watch.told == [1, 2]


def test_a_store_that_stood_still_is_nobodys_end(watch_over):
    class Stalled(WatchedStore):
        """Answers one look a hundred periods late; the other rank, which waited too, beats four looks later."""

        num_looks = 0
        watch = None

        def peek(self, name):
            if name == "beat/1" and self.watch is not None:
                self.num_looks += 1
                if self.num_looks == 10:
                    self.watch.periods += 100
                if not 10 <= self.num_looks < 14:
                    self.put(name, str(self.num_looks))
            return super().peek(name)

    watch = watch_over(Stalled())
    watch.store.watch = watch
    watch.store.await_looks(30)
    assert watch.store.num_looks >= 30 and watch.told == []


PROGRAM = """
import os, sys, time
from xrank.ranks.waits import Heartbeat
from xrank.ranks.store import LocalStore

store = LocalStore()
heartbeat = Heartbeat(store, "beat/0", {}, print, period_seconds=0.001)
if sys.argv[1] == "forked":
    if (child := os.fork()) == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    number = store.peek("beat/0")
    while store.peek("beat/0") == number:
        time.sleep(0.001)
print("done")
"""


@pytest.mark.parametrize("how", ["at once", "forked"])
def test_it_holds_up_neither_the_end_of_a_process_nor_that_of_a_forked_one(how):
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=150, cwd=os.getcwd()
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done\n", "", 0)
    assert time.monotonic() - started < 40, "it ends; to start it takes most of the time"
