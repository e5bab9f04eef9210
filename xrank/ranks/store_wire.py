"""The wire between ranks of several hosts: messages, words, failures and lives as small values in the store.

Names are never used twice: the n-th message from one rank to another has n in its name, and goes once it is taken.
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
from xrank.ranks.heartbeat import PERIOD_SECONDS, Heartbeat
from xrank.ranks.link import is_readable
from xrank.ranks.peer import Peer
from xrank.ranks.store import Store
from xrank.ranks.wire import NUDGE, Message, Word

__all__ = ["StoreWire"]

_LOOK_SECONDS = 0.1
"""How often failures and ends are asked for."""
_POLL_SECONDS = (0.0005, 0.02)
"""How long a wait sleeps between two looks at the store, at first and at last."""
_HEARING_SECONDS = 5.0
"""How long rank 0, whose process as a rule keeps the store, stays after a failure for the others to hear of it: those
that wait hear at once, and one that a busy machine holds up for seconds would take rank 0's end for the failure."""


class StoreWire:
    """A `Wire`; from its construction on this rank is known to live.

    Args:
        ranks: all, the first rank first.
        rank: this one.
        store: seen by all.
        name: of the meeting; names in the store begin with it.
    """

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
        self._words = [0] * len(Word)
        self._lives: dict[int, int] = {}
        self._peers: dict[int, Peer] = {}
        self._failures: dict[int, FailureRecord] = {}
        self._looked = -_LOOK_SECONDS
        self._is_closed = self._has_failed = False
        self._pid = os.getpid()
        position = ranks.index(rank)

        def tell(store: Store, missed: int) -> None:
            store.put(f"{name}/missed/{missed}", "1")
            store.put(f"{name}/alarm", "1")

        self._heartbeat = Heartbeat(
            store.clone(),
            f"{name}/beat/{rank}",
            {r: f"{name}/beat/{r}" for r in (*ranks[position + 1 :], *ranks[:position])},
            tell,
            period_seconds=period_seconds,
            clock=clock,
        )

    def watch(self, peers: Mapping[int, Peer]) -> None:
        """Learn whose processes the other ranks are; those of this host are watched directly from now on."""
        for rank, peer in peers.items():
            if rank not in self._peers:
                self._peers[rank] = peer
                if (life := peer.open_life()) is not None:
                    self._lives[rank] = life

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        assert not message.payload
        self._sent[rank] += 1
        self._put(f"{self._rank}-{rank}/{self._sent[rank]}", json.dumps(message.content, separators=(",", ":")))

    def look(self) -> None:
        """Take in nothing: what has come is in the store, which `pump` asks."""

    def pump(self, seconds: float) -> None:
        """Take in what has come; see `Wire`."""
        end, pause = self._clock() + seconds, _POLL_SECONDS[0]
        while not self._take() and not self._look() and (remaining := end - self._clock()) > 0:
            sleep(min(pause, remaining))
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _take(self) -> bool:
        """Move messages from the store to the inboxes; say whether there was any."""
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
        """Ask, not too often, who has failed or ended; say whether there is news."""
        if self._clock() - self._looked < _LOOK_SECONDS:
            return False
        self._looked = self._clock()
        before = len(self._failures), len(self.ended), len(self.silent)
        self._see_deaths()
        if self._peek("alarm") is not None:
            for rank in self._ranks:
                if rank == self._rank:
                    continue
                # Why a rank goes is asked last: it was told before the rank went.
                if rank not in self.silent and self._peek(f"closed/{rank}") is not None:
                    self.silent.add(rank)
                if rank not in self.ended and self._peek(f"missed/{rank}") is not None:
                    self.ended.add(rank)
                if rank not in self._failures and (text := self._peek(f"failed/{rank}")) is not None:
                    self._failures[rank] = FailureRecord.from_bytes(text.encode())
        return (len(self._failures), len(self.ended), len(self.silent)) != before

    def _see_deaths(self) -> None:
        self.ended.update(rank for rank, life in self._lives.items() if is_readable(life))

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        for rank in ranks:
            self.send(rank, NUDGE)

    def say(self, word: Word, value: int) -> None:
        """Set one of this rank's own words."""
        if word == Word.SLEEPS:  # to say it would take as long as a nudge
            return
        self._words[word] = value
        self._put(f"words/{self._rank}", json.dumps(self._words))

    def heard(self, rank: int, word: Word) -> int:
        """Return a word of any rank."""
        text = self._peek(f"words/{rank}")
        return 0 if text is None else int(json.loads(text)[word])

    def fail(self, record: FailureRecord) -> None:
        """Let all others know; the first record stays."""
        self._has_failed = True
        with suppress(RankFailedError):  # the store is what failed
            if self._peek(f"failed/{self._rank}") is None:
                self._put(f"failed/{self._rank}", record.to_bytes().decode())
                self._put("alarm", "1")

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failures."""
        self._look()
        return {rank: self._failures[rank] for rank in self._ranks if rank in self._failures}

    def close(self) -> None:
        """Let go of everything; see `Wire`."""
        if self._is_closed:
            return
        self._is_closed = True
        if os.getpid() == self._pid:  # a forked process is not the rank, and shares its connection to the store
            if self._rank == 0 and self._has_failed:
                self._await_hearers()
            self._heartbeat.stop()
            with suppress(RankFailedError):
                self._put(f"closed/{self._rank}", "1")
                self._put("alarm", "1")
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()

    def _await_hearers(self) -> None:
        """Wait a moment until all others have closed, failed or ended: with this process what they might hear goes."""
        end, others = self._clock() + _HEARING_SECONDS, set(self._ranks) - {self._rank}
        with suppress(RankFailedError):
            while others - self.ended - self.silent - set(self._failures) and self._clock() < end:
                self.pump(_POLL_SECONDS[1])

    def _put(self, key: str, value: str) -> None:
        self._ask(self._store.put, f"{self._name}/{key}", value)

    def _peek(self, key: str) -> str | None:
        text: str | None = self._ask(self._store.peek, f"{self._name}/{key}")
        return text

    def _ask(self, operation: Callable[..., Any], *arguments: str) -> Any:
        """Return what the store answers; where it is gone, name the process that most likely kept it."""
        try:
            return operation(*arguments)
        except RankFailedError as error:
            if (peer := self._peers.get(error.rank or 0)) is not None:
                raise FailureRecord(peer.rank, peer.host, peer.pid, str(error.cause), "a gather").to_error() from error
            raise
