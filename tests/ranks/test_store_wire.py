"""The wire through a store: several ranks' ends of it in one process."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from xrank.errors import RankFailedError
from xrank.ranks import wire as wires_module
from xrank.ranks.failure import FailureRecord
from xrank.ranks.group import RankGroup
from xrank.ranks.store import GroupStore, LocalStore
from xrank.ranks.waits import Peer
from xrank.ranks.wire import Message, Status, StoreWire

pytestmark = pytest.mark.usefixtures("nothing_left")

HOURS = 10_000.0
"""A period in which no rank is missed."""


@pytest.fixture
def join():
    """Return what gives each rank its end of one wire; all are closed in the end."""
    wires = []

    def join(ranks, store=None, **timing):
        store = LocalStore() if store is None else store
        timing = {"period_seconds": HOURS, **timing}
        joined = {rank: StoreWire(ranks, rank, store, "meeting/1", **timing) for rank in ranks}
        wires.extend(joined.values())
        return joined

    yield join
    while wires:
        wires.pop().close()


def failure(rank, cause="a cause"):
    return FailureRecord(rank, f"host{rank}", 100 + rank, cause, "a call")


def test_a_wait_ends_with_what_comes(join):
    wires = join([0, 1, 2])

    def pumped_until(act):
        started = time.monotonic()
        other = threading.Thread(target=act)
        other.start()
        wires[0].pump(50)
        other.join()
        return time.monotonic() - started

    # Fewer than the fifty that the wait may last.
    assert pumped_until(lambda: wires[1].send(0, Message({"i": 1}))) < 40
    assert pumped_until(lambda: wires[1].fail(failure(1))) < 40
    assert pumped_until(wires[2].close) < 40
    started = time.monotonic()
    wires[0].pump(0.05)
    assert time.monotonic() - started >= 0.05, "nothing new"


class SlowHearer(LocalStore):
    """A store in which rank 1 hears of failures, and leaves, only when rank 0 has looked for that three times."""

    def __init__(self):
        super().__init__()
        self.num_looks, self.wire, self.heard = 0, None, {}

    def peek(self, name):
        if name.endswith("closed/1") and self.num_looks < 3:
            self.num_looks += 1
            if self.num_looks == 3:
                assert super().peek("meeting/1/closed/0") is None
                self.heard = self.wire.failures()
                self.wire.close()
        return super().peek(name)


def test_rank_0_stays_after_a_failure_until_the_others_have_heard_of_it(join, monkeypatch):
    monkeypatch.setattr(wires_module, "_FAILURE_READ_SECONDS", 100)  # a busy machine may delay the third look
    store = SlowHearer()
    wires = join([0, 1], store)
    store.wire = wires[1]
    wires[0].fail(failure(2))
    wires[0].close()
    assert store.heard == {0: failure(2)}


def test_rank_0_stays_a_moment_at_most_and_not_at_all_after_a_good_end(join):
    class Ticks:
        now = 0.0

        def __call__(self):
            self.now += 0.05
            return self.now

    def leave(failed=None, refused=False):
        """Return the seconds of rank 0's end; rank 1 may have failed before it had a wire."""
        clock, store = Ticks(), LocalStore()
        wire = join([0, 1], store, clock=clock)[0]
        before = clock.now
        if refused:
            store.put("meeting/1/1", "why")
        if failed is not None:
            wire.fail(failure(failed))
        wire.close()
        return clock.now - before

    stay = wires_module._FAILURE_READ_SECONDS
    assert leave() < 1 and leave(failed=0) > stay
    assert leave(failed=1) < 1, "rank 1 is dead, and will read nothing"
    assert leave(failed=0, refused=True) < 1, "rank 1 has left the meeting"


class Periods:
    """A clock that tests let pass in periods, so slowly that each rank that lives beats in between."""

    seconds = 0.001

    def __init__(self, store):
        self.store, self.now = store, 0.0

    def __call__(self):
        return self.now

    def passing(self, count, living):
        for _ in range(round(count * 2)):
            self.now += self.seconds / 2
            self.await_beats(living)

    def await_beats(self, living):
        """Wait until each of these ranks has beaten, and then looked at the others' beats."""
        for _ in range(3):
            before = {rank: self.beat(rank) for rank in living}
            deadline = time.monotonic() + 20
            while any(self.beat(rank) == before[rank] for rank in living):
                assert time.monotonic() < deadline
                time.sleep(0.0001)  # not to synchronize, but to let them

    def beat(self, rank):
        return self.store.peek(f"meeting/1/beat/{rank}")


@pytest.mark.parametrize("dying", [[0], [2], [1, 2], [3, 0], [0, 2], [0, 1, 2]], ids=str)
def test_ranks_whose_beats_stop_are_known_to_all_that_live(join, monkeypatch, dying):
    monkeypatch.setattr(wires_module, "_LOOK_SECONDS", 0)
    store = LocalStore()
    periods = Periods(store)
    wires = join([0, 1, 2, 3], store, period_seconds=Periods.seconds, clock=periods)
    living = [rank for rank in range(4) if rank not in dying]
    periods.passing(20, range(4))
    for rank in range(4):
        wires[rank].pump(0)
        assert wires[rank].ended == set()
    for rank in dying:
        wires[rank]._heartbeat.stop()  # as a kill stops it: without a word
    periods.await_beats(living)
    periods.passing(4, living)
    for rank in living:
        wires[rank].pump(0)
        assert wires[rank].ended == set()
    # The watcher of the first that died finds it; and then the next, which nobody watched any more.
    periods.passing(2 + 6 * (len(dying) - 1), living)
    for rank in living:
        wires[rank].pump(0)
        assert wires[rank].ended == set(dying)


def test_a_process_of_this_host_ends_when_the_kernel_says_so(join, monkeypatch):
    store = LocalStore()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    wires = join([0, 1, 2], store)
    peer = replace(Peer.from_this_process(1), pid=child.pid)
    wires[0].watch({1: peer})
    wires[0].watch({1: peer})
    for name in ("missed/1", "alarm"):  # another rank missed its beats, on a machine that is busy
        store.put(f"meeting/1/{name}", "1")
    monkeypatch.setattr(wires_module, "_LOOK_SECONDS", 0)
    wires[0].pump(0)
    wires[2].pump(0)
    assert (wires[0].ended, wires[2].ended) == (set(), {1})
    child.kill()
    started = time.monotonic()
    while not wires[0].ended:
        wires[0].pump(50)
    assert time.monotonic() - started < 20 and wires[0].ended == {1} and wires[1].ended == set()
    child.communicate()


@pytest.mark.parametrize("rank_0_is_known", [True, False])
def test_a_store_that_is_gone_is_named_by_its_process(join, rank_0_is_known):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    wires = join([1, 0], GroupStore(client))
    wires[0].set_status(Status.ARRIVED, 1)
    if rank_0_is_known:
        wires[1].watch({0: Peer(0, "the host of rank 0", 77, "elsewhere")})
    del server
    gc.collect()
    started = time.monotonic()
    for use in (
        lambda: wires[1].get_status(0, Status.ARRIVED),
        lambda: wires[1].pump(50),
        lambda: wires[1].send(0, Message({})),
        lambda: wires[1].set_status(Status.LEFT, 1),
    ):
        with pytest.raises(RankFailedError, match="the store that connects the ranks is gone") as raised:
            use()
        assert raised.value.rank == 0
        if rank_0_is_known:
            assert raised.value.host == "the host of rank 0" and "pid 77" in raised.value.got
    # Nobody is left to be told, or asked, and letting go does not wait for an answer: a rank keeps its own error.
    circle = RankGroup([1, 0], 1, wires[1], {0: Peer(0, "the host of rank 0", 77, "elsewhere")})
    circle.fail(failure(1))
    assert not circle.has_failed_before()
    circle.close()
    assert time.monotonic() - started < 30


FORK = """
import os, sys
from xrank.ranks.wire import StoreWire
from xrank.ranks.wire import Message


class Folder:
    # A store that both processes see.
    def put(self, name, value):
        with open(f"{sys.argv[1]}/.new.{name.replace('/', ' ')}", "w") as file:
            file.write(value)
        os.rename(file.name, f"{sys.argv[1]}/{name.replace('/', ' ')}")

    def peek(self, name):
        try:
            with open(f"{sys.argv[1]}/{name.replace('/', ' ')}") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def remove(self, name):
        os.unlink(f"{sys.argv[1]}/{name.replace('/', ' ')}")

    def clone(self):
        return self


ranks = {rank: StoreWire([0, 1], rank, Folder(), "meeting") for rank in (0, 1)}
if (child := os.fork()) == 0:
    ranks[1].close()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
ranks[0].pump(0.2)
print(ranks[0].silent)
ranks[1].send(0, Message({"still": "here"}))
ranks[0].pump(0.2)
print(ranks[0].inboxes[1].popleft().content)
ranks[1].close()
ranks[0].pump(60)  # the news ends it
print(ranks[0].silent)
ranks[0].close()
"""


def test_a_forked_process_ends_without_ending_the_rank(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", FORK, tmp_path], capture_output=True, text=True, timeout=150, cwd=os.getcwd()
    )
    assert (done.stdout, done.stderr) == ("set()\n{'still': 'here'}\n{1}\n", "")
