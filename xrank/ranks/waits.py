"""Processes of ranks: their lives, their heartbeats, and long waits for them."""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import cache
from time import monotonic
from typing import Annotated, Any
from weakref import WeakSet

import xxhash
from msgspec import Meta, Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from xrank.errors import ContradictionError, RankFailedError, XrankError
from xrank.ranks.failure import FailureRecord, damage_error, failure_of, mark_failure
from xrank.ranks.store import Store
from xrank.system import after_fork_in_child, host_name
from xrank.words import join_words, list_text, ranks_text

PERIOD_SECONDS = 2.0
MAX_MISSED = 5


class Peer(Struct, frozen=True):
    """A rank's process."""

    rank: int
    host: str
    pid: Annotated[int, Meta(gt=0, lt=1 << 31)]
    space: str
    """Kernel and process namespace in which `pid` is this process."""
    network: str = ""
    """Kernel and network namespace, in which processes reach each other's abstract sockets (unix(7))."""

    @classmethod
    def from_this_process(cls, rank: int) -> Peer:
        """Return the peer of a rank that runs in this process."""
        space = process_space()
        network = host = host_name()
        with suppress(FileNotFoundError):  # another system than Linux
            network = f"{space.partition('.')[0]}.{os.stat('/proc/self/ns/net').st_ino}"
        return cls(rank, host, os.getpid(), space, network)

    def to_dict(self) -> dict[str, Any]:
        """Return the peer as a JSON object."""
        record: dict[str, Any] = to_builtins(self)
        return record

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Peer:
        """Return the peer of a `to_dict`, which may have other entries; CorruptError if an entry is not as it wrote."""
        try:
            return convert(description, cls)
        except ValidationError:
            raise damage_error(
                "a rank's description of its process is damaged", ascii(description)[:200], "rank, host, pid and space"
            ) from None

    def open_life(self) -> int | None:
        """Return a pidfd (pidfd_open(2)), readable once the process has ended; None if it can't be watched.

        ProcessLookupError: the process has ended, and its parent has noticed it.
        """
        if self.space == process_space():
            try:
                return os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise
            except OSError:  # no descriptor left
                pass
        return None


@cache
def process_space() -> str:
    """Return an id of the space in which process numbers are unique: boot and namespace (pid_namespaces(7))."""
    try:
        # No module beyond those imported anyway.
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:
            return f"{boot.read().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except FileNotFoundError:
        return host_name()  # another system than Linux


# A forked process may be the first of a namespace of its own.
after_fork_in_child(process_space.cache_clear)


def is_readable(fd: int) -> bool:
    """Return whether a descriptor can be read without waiting; a pidfd can once its process has ended."""
    poller = select.poll()  # not select.select, which takes no descriptor above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


def record_end(rank: int, peer: Peer | None, cause: str, call: str) -> FailureRecord:
    """Return the record of a rank that has ended without one of its own; its process may be unknown."""
    return FailureRecord(rank, peer.host if peer else "unknown", peer.pid if peer else 0, cause, call)


class Heartbeat:
    """By which ranks on several hosts notice each other's deaths, from construction until `stop`.

    Each rank's thread counts up a number in the store and watches the number of the next rank in the list, by its own
    clock: clocks of two hosts are never compared. While the next rank has not come yet, or has ended, it watches the
    one after it, so that every rank is watched. Deaths are found whatever the main threads do, and each rank reads one
    number a period, however many ranks there are. The first beat is in the store when the construction returns.

    Args:
        store: a store that no other thread uses.
        mine: name of this rank's number.
        others: names of the other ranks' numbers, in the order in which this rank watches them. A rank without a
            number has not come yet.
        report: called on the heartbeat's thread, once for each rank that has missed five beats.
    """

    def __init__(
        self,
        store: Store,
        mine: str,
        others: Mapping[int, str],
        report: Callable[[Store, int], None],
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stopped = threading.Event()
        with suppress(XrankError):  # if the store is gone, its next user in the main thread raises
            store.put(mine, "0")
        # Only the thread refers to the store. So the connection closes when the thread ends, even if this object is
        # still in use.
        arguments = (self._stopped, store, mine, dict(others), report, period_seconds, clock)
        self._thread = threading.Thread(target=_beat, args=arguments, name="xrank heartbeat", daemon=True)
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Stop the beat; the others soon see this rank as gone."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # it may be in a store that does not answer


class _Stillness:
    """The last number of another rank, and the reads that found it unchanged."""

    def __init__(self) -> None:
        self.seen: object = None
        self.since, self.num_missed, self.next_read_at = 0.0, 0, 0.0

    def is_over(self, seen: object, now: float, period_seconds: float) -> bool:
        """Return whether a number, as read now, has been still for so long that its rank has ended."""
        if seen is None or seen != self.seen:
            self.seen, self.since, self.num_missed = seen, now, 0
            return False
        # Both count: if the store itself is stalled, seconds pass, but this rank makes no reads either.
        self.num_missed += 1
        return self.num_missed >= MAX_MISSED and now - self.since >= MAX_MISSED * period_seconds


def _beat(
    stopped: threading.Event,
    store: Store,
    mine: str,
    others: dict[int, str],
    report: Callable[[Store, int], None],
    period_seconds: float,
    clock: Callable[[], float],
) -> None:
    stillness, count = _Stillness(), 0
    with suppress(XrankError):
        while True:
            count += 1
            store.put(mine, str(count))
            beats = ((rank, number) for rank, name in others.items() if (number := store.peek(name)) is not None)
            beat = next(beats, None)  # of the first of the others that has come
            if stillness.is_over(beat, clock(), period_seconds) and beat is not None:
                report(store, beat[0])
                del others[beat[0]]  # from now on this rank watches the next one in the list
            if stopped.wait(period_seconds):
                return


_running: WeakSet[Heartbeat] = WeakSet()


@atexit.register
def _stop_all() -> None:
    # No thread may be inside the store's C++ code when the interpreter ends.
    for heartbeat in list(_running):
        heartbeat.stop()


after_fork_in_child(_running.clear)  # threads stay with the parent


class Membership:
    """The processes of a world, as one of its ranks sees them; threads may share it.

    This rank counts up its number if it `beats`, as ranks of other hosts may wait for it. Processes that are not among
    `peers` are read from the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        beats: bool = True,
        peers: Iterable[Peer] = (),
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.store, self._rank = store, rank
        """The world's store."""
        self._period_seconds, self._clock = period_seconds, clock
        self._peers = {peer.rank: peer for peer in peers}
        self._lives: dict[int, int] = {}
        self._stillness: dict[int, _Stillness] = {}
        self._deaths: dict[int, str] = {}
        self.known_failures: set[str] = set()
        """Ids of failures that have failed a call of this rank; each fails one."""
        self.at_large: list[str] = []
        """Ids of this rank's own failures in calls whose ranks it could not name."""
        self._num_seen: dict[int, int] = {}
        self._paired: dict[int, set[str]] = {}
        """Rank -> own failures at large that have failed one of that rank's calls, or were the same call's."""
        self._waits: dict[str, str] = {}
        self._waits_lock = threading.Lock()
        self.pid = os.getpid()
        self._heartbeat: Heartbeat | None = None
        if beats:
            self._heartbeat = Heartbeat(
                store.clone(), f"beat/{rank}", {}, lambda store, rank: None, period_seconds=period_seconds, clock=clock
            )
        # After the first beat: from now on other ranks may wait for this one.
        store.put(f"here/{rank}", json.dumps(Peer.from_this_process(rank).to_dict()))

    # ---- processes

    def find_peer(self, rank: int) -> Peer | None:
        """Return a rank's process, if it has published one."""
        if rank not in self._peers and (text := self.store.peek(f"here/{rank}")) is not None:
            self._peers[rank] = Peer.from_dict(json.loads(text))
        return self._peers.get(rank)

    def find_death(self, ranks: Iterable[int], call: str) -> FailureRecord | None:
        """Return the record of the first of these ranks that is known to have ended; they are awaited in `call`."""
        for rank in ranks:
            if (why := self._find_end(rank)) is not None:
                return record_end(rank, self._peers.get(rank), why, call)
        return None

    def _find_end(self, rank: int) -> str | None:
        if rank not in self._deaths and (peer := self.find_peer(rank)) is not None:
            if peer.space == process_space():
                try:
                    if rank not in self._lives and (life := peer.open_life()) is not None:
                        self._lives[rank] = life
                    has_ended = rank in self._lives and is_readable(self._lives[rank])
                except ProcessLookupError:
                    has_ended = True
                if has_ended:
                    self._deaths[rank] = "its process ended without a report"
            else:
                now, stillness = self._clock(), self._stillness.setdefault(rank, _Stillness())
                if now >= stillness.next_read_at:
                    stillness.next_read_at = now + self._period_seconds
                    if stillness.is_over(self.store.peek(f"beat/{rank}"), now, self._period_seconds):
                        self._deaths[rank] = f"its host has sent no sign of life for {now - stillness.since:.0f} s"
        return self._deaths.get(rank)

    # ---- waits

    def publish_wait(self, wait_id: str, text: str | None) -> None:
        """Publish a long wait of this rank beside those of its other threads; None: it has ended."""
        with self._waits_lock:
            self._waits.pop(wait_id, None)
            if text is not None:
                self._waits[wait_id] = text
            self.store.put(f"wait/{self._rank}", json.dumps([*self._waits.values()]))

    def read_waits(self, rank: int) -> list[Wait]:
        """Return the published long waits of a rank."""
        return [Wait.from_text(text) for text in json.loads(self.store.peek(f"wait/{rank}") or "[]")]

    # ---- failures of calls whose ranks are not known

    def report_at_large(self, error: BaseException, call: str) -> FailureRecord:
        """Publish this rank's failure in a call whose ranks are not known, and return its record."""
        record = replace(FailureRecord.from_error(error, self._rank, call), is_at_large=True)
        self.at_large.append(record.id)
        self.known_failures.add(record.id)
        with suppress(RankFailedError):  # the store may be what failed
            self.store.put(f"raised/{self._rank}/{len(self.at_large)}", record.to_text())
        return record

    def find_at_large(self, ranks: Iterable[int], claim: str) -> FailureRecord | None:
        """Return the first failure at large of these ranks that belongs to a call of this rank, in the ranks `claim`.

        If this rank failed as well, the two failed the same call. If several calls wait for a rank, its failure belongs
        to the first that claims it.
        """
        for rank in ranks:
            while (text := self.store.peek(f"raised/{rank}/{self._num_seen.get(rank, 0) + 1}")) is not None:
                self._num_seen[rank] = self._num_seen.get(rank, 0) + 1
                record = FailureRecord.from_text(text)
                is_new = record.id not in self.known_failures and not self._pair(rank)
                if is_new and self.store.claim(f"claim/{record.id}", claim) == claim:
                    return record
        return None

    def _pair(self, rank: int) -> bool:
        """Return whether a rank's failure belongs to a call in which this rank failed as well.

        If another rank has claimed this rank's failure, that failed a call there: the two failed different calls.
        """
        paired = self._paired.setdefault(rank, set())
        for failure_id in self.at_large:
            if failure_id not in paired and self.store.peek(f"claim/{failure_id}") is None:
                paired.add(failure_id)
                return True
        return False

    def is_settled(self, error: RankFailedError, ranks: Sequence[int], claim: str) -> bool:
        """Return whether a failure belongs to another call than the present one of these ranks.

        It does if it has failed a call of this rank already, or if another list of ranks has claimed it.
        """
        failure_id, is_at_large = failure_of(error)
        if error.rank == self._rank and is_at_large:
            for rank in ranks:
                self._paired.setdefault(rank, set()).update(self.at_large)
        if failure_id in self.known_failures:
            return True
        return is_at_large and self.store.claim(f"claim/{failure_id}", claim) != claim

    def note(self, error: BaseException, claim: str) -> None:
        """Note that an error has failed a call of this rank, in the list of ranks `claim`."""
        failure_id, is_at_large = failure_of(error)
        self.known_failures.add(failure_id)
        if is_at_large:
            with suppress(RankFailedError):  # the store may be what failed
                self.store.claim(f"claim/{failure_id}", claim)

    # ---- end

    def close(self) -> None:
        """Stop the beat and release all resources. A second call does nothing."""
        if self._heartbeat is not None and os.getpid() == self.pid:
            self._heartbeat.stop()
        self._heartbeat = None
        for life in self._lives.values():
            os.close(life)
        self._lives.clear()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():  # then the modules that `close` needs are gone, and the process soon is
            self.close()  # its process group is gone


START_SECONDS = 0.25
"""Length of a wait that is long, and time between two of its looks: a death is to be named within 2 seconds."""
_CYCLE_SECONDS = (0.25, 4.0)
"""Shortest and longest time between two looks for ranks that wait for each other; each is twice as long."""
_LOG_SECONDS = 10.0
_MAX_READ = 64
"""Waits that one look reads at most: a store serves all ranks."""
_MAX_LISTED = 64
_NO_PEER = "it has not called xrank in this process group"
_logger = logging.getLogger(__name__)


class Awaits(StrEnum):
    """The event that a wait is for."""

    ARRIVAL = "arrival"
    """The first rank waits until others have come to the call."""
    BODY_END = "end of the body"
    """The first rank waits until others have ended their bodies."""
    FIRST = "the first"
    """Another rank waits for the first rank."""


class Wait(Struct, frozen=True):
    """One wait of a rank, as all ranks of the group can read it."""

    id: str
    rank: int
    ranks: tuple[int, ...]
    meeting: int
    """The number of the meeting of these ranks."""
    number: int
    """The number of the call since this meeting."""
    way: str
    """The medium of the gather."""
    call: str
    """The call, for people."""
    awaits: str
    awaited: tuple[int, ...]
    group: str = ""
    thread: str = ""

    @property
    def is_of_work(self) -> bool:
        """Whether the ranks begin a piece of work (`xrank.ranks.registration`), and `way` is its name."""
        return self.meeting == 0

    def __str__(self) -> str:
        return f"rank {self.rank} waits for {ranks_text(self.awaited)} in {self.call} of {list_text(self.ranks, 16)}"

    def to_text(self) -> str:
        """Return the wait as JSON."""
        return json.dumps(to_builtins(self))

    @classmethod
    def from_text(cls, text: str) -> Wait:
        """Return the wait of a `to_text`."""
        content = json.loads(text)
        return cls(**{**content, "ranks": tuple(content["ranks"]), "awaited": tuple(content["awaited"])})


def parties_of(error: BaseException) -> tuple[Wait, ...]:
    """Return the waits of ranks that waited for each other, if an error of `LongWait` reports them."""
    return tuple(getattr(error, "_xrank_parties", ()))


def name_of_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as a part of a name in a store."""
    return ".".join(map(str, ranks))


class LongWait:
    """One long wait of this rank, until `end`; the id and awaited ranks of its `description` are not used.

    `owes` returns whether this rank still owes another rank's wait, which is for this rank, its event.
    """

    def __init__(self, description: Wait, membership: Membership, owes: Callable[[Wait], bool]) -> None:
        self._description, self._membership, self._owes = description, membership, owes
        self._began = monotonic() - START_SECONDS
        self._pause = _CYCLE_SECONDS[0]
        self._next_cycle = self._began + 2 * self._pause
        self._next_log = self._began + _LOG_SECONDS
        self._id = f"{description.rank}-{os.urandom(8).hex()}"
        self._published = ""
        self._votes: dict[str, tuple[Wait, ...]] = {}

    def look(self, awaited: Sequence[int], watched: Sequence[int]) -> None:
        """Raise if the wait will not end.

        Ranks are `awaited` whose event has not come, and `watched` if the call cannot go on without them.
        """
        now = monotonic()
        failure = self._membership.find_death(watched, self._description.call)
        failure = failure or self._membership.find_at_large(awaited, name_of_ranks(self._description.ranks))
        if failure is not None:
            raise failure.to_error()
        self.raise_if_confirmed()
        if now >= self._next_cycle:
            self._next_cycle = now + self._pause
            self._pause = min(2 * self._pause, _CYCLE_SECONDS[1])
            self._vote(awaited)
            self.raise_if_confirmed()
        if now >= self._next_log:
            self._next_log = now + 6 * _LOG_SECONDS
            self._log(awaited, now - self._began)

    def end(self) -> None:
        """Withdraw the published wait."""
        if self._published:
            self._published = ""
            with suppress(RankFailedError):  # the store may be gone
                self._membership.publish_wait(self._id, None)

    # ---- ranks that wait for each other

    def _vote(self, awaited: Sequence[int]) -> None:
        """Publish the wait, and confirm it in every cycle of waits that it is in, if this rank owes the wait for it."""
        mine = replace(self._description, id=self._id, awaited=tuple(awaited[:_MAX_LISTED]))
        if (text := mine.to_text()) != self._published:
            self._membership.publish_wait(self._id, text)
            self._published = text
        waits, read, unread = {mine.id: mine}, {mine.rank}, [*mine.awaited]
        while unread and len(waits) < _MAX_READ:
            if (rank := unread.pop(0)) not in read:
                read.add(rank)
                for wait in self._membership.read_waits(rank):
                    waits[wait.id] = wait
                    unread += wait.awaited
        for cycle in _cycles(mine, waits):
            name = f"cycle/{_digest(cycle)}"
            if name not in self._votes and self._owes(cycle[-1]):
                self._votes[name] = cycle
                self._membership.store.put(f"{name}/{mine.id}", "1")

    def raise_if_confirmed(self) -> None:
        """Raise ContradictionError if all ranks of a cycle have confirmed it: none of them can have gone on since.

        A rank confirms while it waits for the next one and owes the one before, which therefore waits as well. So at
        the last confirmation all of them waited.
        """
        for name, cycle in self._votes.items():
            if all(self._membership.store.peek(f"{name}/{wait.id}") is not None for wait in cycle):
                raise _make_error(cycle)

    # ---- the log

    def _log(self, awaited: Sequence[int], seconds: float) -> None:
        known = []
        for rank in awaited[:4]:
            there = "".join(f"; {wait.call} waits there" for wait in self._membership.read_waits(rank))
            peer = self._membership.find_peer(rank)
            place = f"it runs on host {peer.host}, pid {peer.pid}" if peer else _NO_PEER
            known.append(f"rank {rank}: {place}{there}")
        mine = self._description
        _logger.warning(
            "rank %d has waited %.0f s for %s of %s, in %s (%s)",
            mine.rank, seconds, mine.awaits, ranks_text(awaited), mine.call, "; ".join(known),
        )  # fmt: skip


class WaitMonitor:
    """Looks, now and then, for reasons why a wait will not end.

    `begin` is called once the wait has become long. It returns the long wait, or None where the ranks are not known.
    """

    def __init__(self, begin: Callable[[Awaits], LongWait | None]) -> None:
        self._begin, self._next_look = begin, monotonic() + START_SECONDS
        self._wait: LongWait | None = None

    @property
    def is_due(self) -> bool:
        """Whether the wait is long, and the last look was not a moment ago."""
        return monotonic() >= self._next_look

    def look(self, awaits: Awaits, awaited: Sequence[int], watched: Sequence[int]) -> None:
        """Begin the long wait for `awaits` if none has begun; then look as `LongWait.look` does."""
        self._next_look = monotonic() + START_SECONDS
        if self._wait is None:
            self._wait = self._begin(awaits)
        if self._wait is not None:
            self._wait.look(awaited, watched)

    def raise_if_confirmed(self) -> None:
        """Raise if this rank and others were found to wait for each other."""
        if self._wait is not None:
            self._wait.raise_if_confirmed()

    def end(self) -> None:
        """End the wait."""
        if self._wait is not None:
            self._wait.end()


def _digest(cycle: Sequence[Wait]) -> str:
    """Return a name of a cycle that is the same on all of its ranks."""
    first = min(range(len(cycle)), key=lambda i: (cycle[i].rank, cycle[i].id))
    ids = [wait.id for wait in (*cycle[first:], *cycle[:first])]
    return xxhash.xxh3_128_hexdigest(" ".join(ids).encode())


def _cycles(start: Wait, waits: Mapping[str, Wait]) -> Iterator[tuple[Wait, ...]]:
    """Yield cycles of waits, by id, each from `start` on: the shortest one for each wait for its rank."""
    for last in waits.values():
        if start.rank in last.awaited and last.rank != start.rank:
            before = {start.id: start.id}
            queue = [start]
            while queue and last.id not in before:
                here = queue.pop(0)
                for following in waits.values():
                    if following.rank in here.awaited and following.id not in before:
                        before[following.id] = here.id
                        queue.append(following)
            if last.id in before:
                path = [last.id]
                while path[-1] != start.id:
                    path.append(before[path[-1]])
                yield tuple(waits[one] for one in reversed(path))


def _make_error(cycle: Sequence[Wait]) -> ContradictionError:
    texts, ranks = sorted(map(str, cycle)), join_words(f"rank {wait.rank}" for wait in cycle)
    are_gathers = not any(wait.is_of_work for wait in cycle)
    error = ContradictionError(
        f"{ranks_text(wait.rank for wait in cycle)} are at different {'gathers' if are_gathers else 'calls'}, "
        "and wait for each other",
        rank=cycle[1].rank,
        got="; ".join(texts)[:1500],
        want=f"the same {'gathers' if are_gathers else 'calls'} in the same order on all of their ranks",
        next_step=f"give the same `ranks`, in the same order, on {ranks}"
        if are_gathers
        else f"call the same functions on {ranks}; only one rank writes gathered tensors, with xrank.save_model",
    )
    # One failure, which all of them notice.
    mark_failure(error, _digest(cycle))
    vars(error)["_xrank_parties"] = tuple(cycle)
    return error
