"""A circle: ranks of one host that have met, and how each waits for the others.

The first rank has a link to every other. All see one board, and each watches the life of all others, so that whoever
raises, dies, leaves or stays away is named by everybody who waits.
"""

from __future__ import annotations

import os
import select
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.board import Board
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.link import Link, is_readable

__all__ = ["Circle", "Peer"]

_TICK_SECONDS = 0.1
"""How long a wait sleeps before it looks at the board: a failure is known to all within that time."""
_SPIN_SECONDS = 50e-6
"""How long a wait looks without sleeping: most answers come at once, and a sleep costs as much as the whole call."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank's process."""

    rank: int
    host: str
    pid: int


class Circle:
    """This rank's view of the ranks that have met; one thread at a time uses it.

    Args:
        ranks: all, the first rank first.
        rank: this one.
        board: of all, by position in `ranks`.
        links: on the first rank to every other, elsewhere to the first alone.
        peers: every other rank's process.
        lives: pidfds of the peers whose processes can be watched; the others' ends show in their links.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        board: Board,
        links: dict[int, Link],
        peers: dict[int, Peer],
        lives: dict[int, int],
    ) -> None:
        self.ranks, self.rank, self.board, self.links, self.peers = tuple(ranks), rank, board, links, peers
        self._lives = lives
        self._position = {r: i for i, r in enumerate(self.ranks)}
        self._last = 0
        self._open: set[int] = set()  # calls begun and not left; nested ones end before those around them

    @property
    def first(self) -> int:
        """The rank that gathers."""
        return self.ranks[0]

    def begin(self, call: int) -> None:
        """Take part in a call, until `leave`."""
        self._last = call
        self._open.add(call)

    def arrive(self, call: int) -> None:
        """Say that this rank has done its part of a call: sent its message or, on the first rank, received all."""
        self.board.arrive(self._position[self.rank], call)

    def leave(self, call: int) -> None:
        """Say that nobody needs this rank any more for a call, and for those before it that it has left too."""
        self._open.discard(call)
        self.board.leave(self._position[self.rank], min(self._open, default=self._last + 1) - 1)

    def fail(self, record: FailureRecord) -> None:
        """Let all others know that this rank failed."""
        self.board.fail(self._position[self.rank], record)

    def absent(self, call: int) -> tuple[int, ...]:
        """Return the other ranks that have not come to a call yet; the first, which follows them, only by itself."""
        absent = [r for r in self.ranks if r != self.rank and self.board.arrived(self._position[r]) < call]
        return tuple(r for r in absent if r != self.first or len(absent) == 1)

    def check(self, call: int) -> None:
        """Raise if any other rank has failed, or died before it left the call.

        Raises:
            RankFailedError: names the first, in rank order; all are in its `failures`.
        """
        records = {
            record.rank: record  # those that only follow another repeat its record
            for r in self.ranks
            if r != self.rank and (record := self.board.failure(self._position[r])) is not None
        }
        if not records:
            records = {r: self._death(r) for r, fd in self._lives.items() if self._is_dead(r, fd, call)}
        if records:
            raise self._error(list(records.values()))

    def send(self, rank: int, message: dict[str, Any], call: int, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message to a rank.

        Raises:
            RankFailedError: that rank is gone.
        """
        try:
            self.links[rank].send(message, descriptors)
        except (BrokenPipeError, ConnectionResetError):
            self.check(call)
            raise self._error([self._death(rank)]) from None

    def has_message(self, rank: int) -> bool:
        """Say whether a message of a rank can be received without waiting."""
        return is_readable(self.links[rank].fileno())

    def receive(self, sources: set[int], call: int, deadline: Deadline) -> tuple[int, dict[str, Any], list[int]]:
        """Return the next message of any of these ranks: (rank, message, descriptors).

        The deadline counts until all ranks have come to the call; from then on their lives are what is waited on:
        the first rank's body may take any time.

        Raises:
            RankFailedError: a rank failed or died.
            RankTimeoutError: the deadline passed; `waiting_for` has the ranks that did not come.
        """
        poller = select.poll()
        for source in sources:
            poller.register(self.links[source].fileno(), select.POLLIN)
        spin_end = monotonic() + _SPIN_SECONDS
        while not (ready := poller.poll(0)):
            if monotonic() >= spin_end:
                ready = self._sleep(poller, call, deadline)
                break
        numbers = {self.links[source].fileno(): source for source in sources}
        source = numbers[ready[0][0]]
        received = self.links[source].receive()
        if received is None:
            self.check(call)
            raise self._error([self._death(source)])
        return source, *received

    def _sleep(self, poller: select.poll, call: int, deadline: Deadline) -> list[tuple[int, int]]:
        """Wait for a message; look at the board and at the deadline at every tick."""
        for r, fd in self._lives.items():
            if not self._has_left(r, call):
                poller.register(fd, select.POLLIN)
        lives = set(self._lives.values())
        while True:
            self.check(call)
            absent = self.absent(call)
            if absent and deadline.has_passed:
                raise self._timeout(absent, deadline)
            seconds = min(_TICK_SECONDS, deadline.remaining_seconds) if absent else _TICK_SECONDS
            ready = poller.poll(seconds * 1000)
            messages = [event for event in ready if event[0] not in lives]
            if messages:
                return messages
            for fd, _ in ready:
                # Its process has ended: `check` raises, unless the rank had left the call.
                self.check(call)
                poller.unregister(fd)

    def _has_left(self, rank: int, call: int) -> bool:
        return self.board.left(self._position[rank]) >= call

    def _is_dead(self, rank: int, fd: int, call: int) -> bool:
        return is_readable(fd) and not self._has_left(rank, call)

    def _death(self, rank: int) -> FailureRecord:
        peer = self.peers[rank]
        return FailureRecord(rank, peer.host, peer.pid, "its process ended without a word", "a gather")

    def _error(self, records: Sequence[FailureRecord]) -> RankFailedError:
        errors = tuple(record.to_error() for record in records)
        errors[0].failures = errors
        return errors[0]

    def _timeout(self, absent: tuple[int, ...], deadline: Deadline) -> RankTimeoutError:
        names = ", ".join(
            f"rank {r} (host {self.peers[r].host}, pid {self.peers[r].pid})" for r in absent if r in self.peers
        )
        return RankTimeoutError(
            f"{names} did not come to the gather within {deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=absent,
            got=f"ranks {[r for r in self.ranks if r not in absent]} came",
            want=f"all of ranks {list(self.ranks)}",
            next_step="find out where those ranks are (py-spy dump --pid PID); raise timeout_seconds if they are slow",
        )

    def close(self) -> None:
        """Let go of everything; ranks that still wait hear of it."""
        for link in self.links.values():
            link.close()
        for fd in self._lives.values():
            with suppress(OSError):
                os.close(fd)
        self._lives.clear()
        self.board.close()
