"""The processes of a world's ranks as far as this rank knows them, and the signs of their deaths.

Each rank publishes its process in the world's store with its first gather. From then on every rank of its host can
watch it by a pidfd, and the ranks of other hosts by a number that it counts up in the store, whether or not the two
have met. The connections of the process group, and the launcher's other children, show ends of ranks before they come.

If the list of ranks is itself the error, the ranks of the failed call are not known. Such a failure "at large" is
published here too: the ranks that wait for this one may be in that call.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic

from xrank.errors import RankFailedError
from xrank.ranks.failure import FailureRecord, failure_of
from xrank.ranks.heartbeat import MAX_MISSED, PERIOD_SECONDS, Heartbeat
from xrank.ranks.link import is_readable
from xrank.ranks.peer import Peer, process_space
from xrank.ranks.store import Store

SignOfDeath = Callable[[int], str | None]
"""Returns the reason why an absent rank has ended; None if the sign does not show its end."""


class Membership:
    """The processes of a world, as one of its ranks sees them; threads may share it.

    Args:
        store: the world's store.
        rank: this rank.
        signs: further signs, for ranks that have published no process yet.
        beats: whether this rank counts up its number: ranks of other hosts may wait for it.
        peers: processes that the caller knows; others are read from the store.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        signs: Iterable[SignOfDeath] = (),
        *,
        beats: bool = True,
        peers: Iterable[Peer] = (),
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store, self._rank, self._signs = store, rank, tuple(signs)
        self._period_seconds, self._clock = period_seconds, clock
        self._peers = {peer.rank: peer for peer in peers}
        self._lives: dict[int, int] = {}
        self._counts: dict[int, _Count] = {}
        self._deaths: dict[int, str] = {}
        self.known_failures: set[str] = set()
        """Ids of failures that have failed a call of this rank; each fails one."""
        self._at_large: list[str] = []
        """Ids of this rank's own failures at large."""
        self._num_seen: dict[int, int] = {}
        self._paired: dict[int, set[str]] = {}
        """Rank -> own failures at large that have failed one of that rank's calls, or were the same call's."""
        self._waits: dict[str, str] = {}
        self._waits_lock = threading.Lock()
        self._pid = os.getpid()
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
        if rank not in self._peers and (text := self._store.peek(f"here/{rank}")) is not None:
            self._peers[rank] = Peer.from_dict(json.loads(text))
        return self._peers.get(rank)

    def find_death(self, ranks: Iterable[int], call: str) -> FailureRecord | None:
        """Return the record of the first of these ranks that is known to have ended.

        Args:
            ranks: other ranks.
            call: the call in which they are awaited.
        """
        for rank in ranks:
            if (why := self._find_end(rank)) is not None:
                peer = self._peers.get(rank)
                host, pid = ("unknown", 0) if peer is None else (peer.host, peer.pid)
                return FailureRecord(rank, host, pid, why, call)
        return None

    def _find_end(self, rank: int) -> str | None:
        if rank not in self._deaths:
            peer = self.find_peer(rank)
            if peer is None:
                why = next(filter(None, (sign(rank) for sign in self._signs)), None)
            elif peer.space == process_space():
                why = self._find_end_here(rank, peer)
            else:
                why = self._find_end_elsewhere(rank)
            if why is None:
                return None
            self._deaths[rank] = why
        return self._deaths[rank]

    def _find_end_here(self, rank: int, peer: Peer) -> str | None:
        life = self._lives.get(rank)
        if life is None:
            try:
                if (life := peer.open_life()) is None:
                    return None
                self._lives[rank] = life
            except ProcessLookupError:
                return "its process ended without a report"
        return "its process ended without a report" if is_readable(life) else None

    def _find_end_elsewhere(self, rank: int) -> str | None:
        """Count the reads that find a rank's number as it was, as `xrank.ranks.heartbeat` does."""
        now, count = self._clock(), self._counts.setdefault(rank, _Count())
        if now < count.next_read_at:
            return None
        count.next_read_at = now + self._period_seconds
        number = self._store.peek(f"beat/{rank}")
        if number is None or number != count.number:
            count.number, count.since, count.num_missed = number, now, 0
            return None
        count.num_missed += 1
        is_over = count.num_missed >= MAX_MISSED and now - count.since >= MAX_MISSED * self._period_seconds
        return f"its host was not heard from for {now - count.since:.0f} s" if is_over else None

    def describe(self, rank: int) -> str:
        """Return the place of an awaited rank's process, as a phrase."""
        peer = self.find_peer(rank)
        if peer is None:
            return "it has not called xrank in this process group"
        return f"it runs on host {peer.host}, pid {peer.pid}"

    # ---- waits

    @property
    def store(self) -> Store:
        """The world's store."""
        return self._store

    def publish_wait(self, wait_id: str, text: str | None) -> None:
        """Publish a long wait of this rank beside those of its other threads; None: it has ended."""
        with self._waits_lock:
            self._waits.pop(wait_id, None)
            if text is not None:
                self._waits[wait_id] = text
            self._store.put(f"wait/{self._rank}", json.dumps([*self._waits.values()]))

    def read_waits(self, rank: int) -> list[str]:
        """Return the published long waits of a rank."""
        waits: list[str] = json.loads(self._store.peek(f"wait/{rank}") or "[]")
        return waits

    # ---- failures of calls whose ranks are not known

    @property
    def num_at_large(self) -> int:
        """Number of this rank's failures at large."""
        return len(self._at_large)

    def report_at_large(self, error: BaseException, call: str) -> FailureRecord:
        """Publish this rank's failure in a call whose ranks are not known, and return its record."""
        record = replace(FailureRecord.from_error(error, self._rank, call), is_at_large=True)
        self._at_large.append(record.id)
        self.known_failures.add(record.id)
        with suppress(RankFailedError):  # the store may be what failed
            self._store.put(f"raised/{self._rank}/{len(self._at_large)}", record.to_bytes().decode())
        return record

    def find_at_large(self, ranks: Iterable[int], claim: str) -> FailureRecord | None:
        """Return the first failure at large of these ranks that belongs to a call of this rank.

        If this rank failed as well, the two failed the same call. If several calls wait for a rank, its failure belongs
        to the first that claims it.

        Args:
            ranks: awaited ranks.
            claim: the list of ranks whose call awaits them.
        """
        for rank in ranks:
            while True:
                text = self._store.peek(f"raised/{rank}/{self._num_seen.get(rank, 0) + 1}")
                if text is None:
                    break
                self._num_seen[rank] = self._num_seen.get(rank, 0) + 1
                record = FailureRecord.from_bytes(text.encode())
                if record.id in self.known_failures:
                    continue
                if not self._pair(rank) and self._store.claim(f"claim/{record.id}", claim) == claim:
                    return record
        return None

    def _pair(self, rank: int) -> bool:
        """Return whether a rank's failure belongs to a call in which this rank failed as well.

        If another rank has claimed this rank's failure, that failed a call there: the two failed different calls.
        """
        paired = self._paired.setdefault(rank, set())
        for failure_id in self._at_large:
            if failure_id not in paired and self._store.peek(f"claim/{failure_id}") is None:
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
                self._paired.setdefault(rank, set()).update(self._at_large)
        if failure_id in self.known_failures:
            return True
        return is_at_large and self._store.claim(f"claim/{failure_id}", claim) != claim

    def note(self, error: BaseException, claim: str) -> None:
        """Note that an error has failed a call of this rank, in the list of ranks `claim`."""
        failure_id, is_at_large = failure_of(error)
        self.known_failures.add(failure_id)
        if is_at_large:
            with suppress(RankFailedError):  # the store may be what failed
                self._store.claim(f"claim/{failure_id}", claim)

    # ---- end

    def close(self) -> None:
        """Stop the beat and release all resources. A second call does nothing."""
        if self._heartbeat is not None and os.getpid() == self._pid:
            self._heartbeat.stop()
        self._heartbeat = None
        for life in self._lives.values():
            os.close(life)
        self._lives.clear()

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_finalizing():  # then the modules that `close` needs are gone, and the process soon is
            self.close()  # its process group is gone


class _Count:
    """The last number of a rank of another host, and the reads that found it unchanged."""

    def __init__(self) -> None:
        self.number: str | None = None
        self.since = 0.0
        self.num_missed = 0
        self.next_read_at = 0.0
