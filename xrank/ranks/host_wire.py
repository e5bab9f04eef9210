"""The wire of one host: a board of shared memory, a socket to the first rank, and a watch on every rank's life."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from xrank.ranks.board import Board
from xrank.ranks.failure import FailureRecord
from xrank.ranks.link import MAX_PAYLOAD_NBYTES, Link
from xrank.ranks.peer import Peer
from xrank.ranks.wire import NUDGE, Message, Word

__all__ = ["HostWire"]


class HostWire:
    """A `Wire`; all processes share memory and process numbers.

    Args:
        ranks: all, the first rank first.
        rank: this one.
        board: of all, by position in `ranks`.
        links: on the first rank to every other, elsewhere to the first alone.
        peers: every other rank's process.
    """

    max_payload_nbytes = MAX_PAYLOAD_NBYTES

    def __init__(
        self, ranks: Sequence[int], rank: int, board: Board, links: Mapping[int, Link], peers: Mapping[int, Peer]
    ) -> None:
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in links}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self._rank, self._board, self._links = rank, board, dict(links)
        self._position = {r: i for i, r in enumerate(ranks)}
        self._lives: dict[int, int] = {}
        # One queue of events for all that may come: asking it costs the same for two ranks and for a hundred.
        self._events = select.epoll()
        self._sources: dict[int, int] = {}
        for r, link in self._links.items():
            self._watch(link.fileno(), r)
        for r, peer in peers.items():
            life = peer.open_life()
            if life is None:
                self.ended.add(r)  # the meeting made sure that it can be watched: it is gone already
            else:
                self._lives[r] = life
                self._watch(life, r)

    def _watch(self, fd: int, rank: int) -> None:
        self._events.register(fd, select.EPOLLIN)
        self._sources[fd] = rank

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        self._links[rank].send(message, wait=False)

    def pump(self, seconds: float) -> None:
        """Take in what has come; see `Wire`."""
        for fd, _ in self._events.poll(seconds):
            rank = self._sources[fd]
            if fd == self._lives.get(rank):
                self.ended.add(rank)
            elif (received := self._links[rank].receive()) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                if message != NUDGE:
                    self.inboxes[rank].append(message)
                continue
            else:
                self.silent.add(rank)
            self._events.unregister(fd)  # it would wake every wait from now on

    def say(self, word: Word, value: int) -> None:
        """Set one of this rank's own words."""
        self._board.say(self._position[self._rank], word, value)

    def nudge(self, rank: int) -> None:
        """Wake a rank; see `Wire`."""
        if self.heard(rank, Word.SLEEPS):
            with suppress(ConnectionError, BlockingIOError):  # gone, or with more to read than it needs to wake
                self._links[rank].send(NUDGE, wait=False)

    def heard(self, rank: int, word: Word) -> int:
        """Return a word of any rank, as it is this moment."""
        return self._board.heard(self._position[rank], word)

    def fail(self, record: FailureRecord) -> None:
        """Let all others know; the first record stays."""
        self._board.fail(self._position[self._rank], record)

    def failures(self) -> list[FailureRecord]:
        """Return the other ranks' failures."""
        failures = (self._board.failure(i) for r, i in self._position.items() if r != self._rank)
        return [failure for failure in failures if failure is not None]

    def close(self) -> None:
        """Let go of everything; see `Wire`."""
        self._events.close()
        for link in self._links.values():
            link.close()
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()
        self._board.close()
