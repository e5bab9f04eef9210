"""The wire between ranks of several hosts: messages, statuses, failures and heartbeats as small values in the store.

Names are never used twice: the n-th message from one rank to another has n in its name, and its reader removes it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from xrank.errors import RankFailedError
from xrank.ranks.failure import FailureRecord
from xrank.ranks.processes import PERIOD_SECONDS, Heartbeat, Peer, is_readable
from xrank.ranks.store import Store
from xrank.ranks.wire import NUDGE, Message, Status

_LOOK_SECONDS = 0.1
"""Seconds between two reads of failures and ends."""
_POLL_SECONDS = (0.0005, 0.02)
"""Shortest and longest sleep of a wait between two reads of the store; each is twice as long as the last."""
_FAILURE_READ_SECONDS = 5.0
"""Longest stay of rank 0 after a failure. Its process usually keeps the store, and a rank that a busy machine delays
for seconds would otherwise find the store gone and take rank 0's end for the failure."""


class StoreWire:
    """A `Wire`; its heartbeat begins with its construction.

    Args:
        ranks: all ranks, the first rank first.
        rank: this rank.
        store: shared by all ranks.
        name: name of the meeting, with which the names in the store begin.
    """

    shares_memory = False
    max_payload_nbytes = 0

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        store: Store,
        name: str,
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        sources = ranks[1:] if rank == ranks[0] else ranks[:1]
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in sources}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self._ranks, self._rank, self._store, self._name, self._clock = tuple(ranks), rank, store, name, clock
        self._sent = dict.fromkeys(sources, 0)
        self._taken = dict.fromkeys(sources, 0)
        self._statuses = [0] * len(Status)
        self._lives: dict[int, int] = {}
        self._peers: dict[int, Peer] = {}
        self._failures: dict[int, FailureRecord] = {}
        self._looked = -_LOOK_SECONDS
        self._is_closed = False
        self._failure: FailureRecord | None = None
        self._pid = os.getpid()
        position = ranks.index(rank)

        def report(store: Store, missed: int) -> None:
            # The alarm last, here and below: the others read the rest only once they see it.
            store.put(f"{name}/missed/{missed}", "1")
            store.put(f"{name}/alarm", "1")

        self._heartbeat = Heartbeat(
            store.clone(),
            f"{name}/beat/{rank}",
            {r: f"{name}/beat/{r}" for r in (*ranks[position + 1 :], *ranks[:position])},
            report,
            period_seconds=period_seconds,
            clock=clock,
        )

    def watch(self, peers: Mapping[int, Peer]) -> None:
        """Record the other ranks' processes; from now on those of this host are watched by pidfd."""
        for rank, peer in peers.items():
            if rank not in self._peers:
                self._peers[rank] = peer
                try:
                    if (life := peer.open_life()) is not None:
                        self._lives[rank] = life
                except ProcessLookupError:
                    self.ended.add(rank)

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        assert not message.payload
        self._sent[rank] += 1
        self._put(f"{self._rank}-{rank}/{self._sent[rank]}", json.dumps(message.content, separators=(",", ":")))

    def look(self) -> None:
        """Do nothing: messages are in the store, which `pump` reads."""

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends; see `Wire`."""
        end, pause = self._clock() + seconds, _POLL_SECONDS[0]
        while not self._take() and not self._look() and (remaining := end - self._clock()) > 0:
            sleep(min(pause, remaining))
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _take(self) -> bool:
        """Move messages from the store to the inboxes; return whether there were any."""
        any_came = False
        for rank, inbox in self.inboxes.items():
            while (text := self._peek(key := f"{rank}-{self._rank}/{self._taken[rank] + 1}")) is not None:
                self._taken[rank] += 1
                self._ask(self._store.remove, f"{self._name}/{key}")
                any_came = True
                if (message := Message(json.loads(text))) != NUDGE:
                    inbox.append(message)
        return any_came

    def _look(self) -> bool:
        """Read failures and ends from the store, every 0.1 s at most; return whether any are new."""
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        before = len(self._failures), len(self.ended), len(self.silent)
        self._check_lives()
        if self._peek("alarm") is not None:
            for rank in self._ranks:
                if rank == self._rank:
                    continue
                # The failure is read last: a rank writes it before it closes, so an end is never seen without it.
                if rank not in self.silent and self._peek(f"closed/{rank}") is not None:
                    self.silent.add(rank)
                # The kernel reports the end of a process on this host; a late beat there shows a busy host, not an end.
                is_here = rank in self._lives
                if rank not in self.ended and not is_here and self._peek(f"missed/{rank}") is not None:
                    self.ended.add(rank)
                if rank not in self._failures and (text := self._peek(f"failed/{rank}")) is not None:
                    self._failures[rank] = FailureRecord.from_text(text)
        return (len(self._failures), len(self.ended), len(self.silent)) != before

    def _check_lives(self) -> None:
        self.ended.update(rank for rank, life in self._lives.items() if is_readable(life))

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        for rank in ranks:
            self.send(rank, NUDGE)

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses."""
        if status == Status.SLEEPS:  # writing it would take as long as a nudge
            return
        if status == Status.LEFT:
            self._looked = -_LOOK_SECONDS  # the next call begins with a look: it is not to begin if a rank has failed
        self._statuses[status] = value
        self._put(f"words/{self._rank}", json.dumps(self._statuses))

    def get_status(self, rank: int, status: Status) -> int:
        """Return a status of any rank."""
        text = self._peek(f"words/{rank}")
        return 0 if text is None else int(json.loads(text)[status])

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure; see `Wire`."""
        self._failure = record
        with suppress(RankFailedError):  # the failure may be the store's
            if self._peek(f"failed/{self._rank}") is None:
                self._put(f"failed/{self._rank}", record.to_text())
                self._put("alarm", "1")

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failure records."""
        self._look()
        return {rank: self._failures[rank] for rank in self._ranks if rank in self._failures}

    def close(self) -> None:
        """Release all resources; see `Wire`."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:  # a forked process is not the rank, and shares its connection to the store
            if self._rank == 0 and self._failure is not None:
                # While the heart still beats, so that the others see a failure instead of a death.
                self._await_readers()
            self._heartbeat.stop()
            with suppress(RankFailedError):
                self._put(f"closed/{self._rank}", "1")
                self._put("alarm", "1")
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()

    def _await_readers(self) -> None:
        """Wait until all others have closed, failed or ended: the store that they read may end with this process."""
        assert self._failure is not None
        end = self._clock() + _FAILURE_READ_SECONDS
        # A rank that this one has waited for in vain may not read anything for hours.
        others = set(self._ranks) - {self._rank, self._failure.rank, *self._failure.absent}
        with suppress(RankFailedError):
            while self._clock() < end:
                named = {record.rank for record in self._failures.values()}  # dead, or the first to know
                others -= {*self.ended, *self.silent, *self._failures, *named}
                others = {rank for rank in others if self._peek(str(rank)) is None}  # those of `Meeting.refuse` know
                if not others:
                    break
                self.pump(_POLL_SECONDS[1])

    def _put(self, key: str, value: str) -> None:
        self._ask(self._store.put, f"{self._name}/{key}", value)

    def _peek(self, key: str) -> str | None:
        text: str | None = self._ask(self._store.peek, f"{self._name}/{key}")
        return text

    def _ask(self, operation: Callable[..., Any], *arguments: str) -> Any:
        """Return the store's answer; if the store is gone, name the process that most likely kept it."""
        try:
            return operation(*arguments)
        except RankFailedError as error:
            if (peer := self._peers.get(error.rank or 0)) is not None:
                raise FailureRecord(peer.rank, peer.host, peer.pid, str(error.cause), "a gather").to_error() from error
            raise
