"""The wire of one host: a board of shared memory, a socket to the first rank, and a watch on every rank's life."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence

from xrank.ranks.board import Board
from xrank.ranks.failure import FailureRecord
from xrank.ranks.link import MAX_PAYLOAD_NBYTES, Link, framed, parsed
from xrank.ranks.peer import Peer
from xrank.ranks.wire import Message, Sleep, Word

__all__ = ["Bells", "HostWire"]

_COMMON = (Word.ARRIVED, Word.ENDED)
"""What the first rank waits for until all have said it."""


class Bells:
    """What wakes the ranks of a circle: one descriptor for the first, one for all others (eventfd(2)).

    Who sleeps polls for the edge, and nobody reads: a ring wakes everybody who sleeps, and costs whoever is awake
    nothing.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    @classmethod
    def create(cls) -> Bells:
        """Return new ones."""
        return cls([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)])

    def ring(self, *, is_for_first: bool) -> None:
        """Wake the first rank, or all others."""
        os.eventfd_write(self.descriptors[0 if is_for_first else 1], 1)

    def close(self) -> None:
        """Let go of them; calling it again does nothing."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = ()


class HostWire:
    """A `Wire`; all processes share memory and process numbers.

    Args:
        ranks: all, the first rank first.
        rank: this one.
        board: of all, by position in `ranks`.
        bells: of all; they belong to the wire from now on.
        links: on the first rank to every other, elsewhere to the first alone.
        peers: every other rank's process.
    """

    max_payload_nbytes = MAX_PAYLOAD_NBYTES

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        board: Board,
        bells: Bells,
        links: Mapping[int, Link],
        peers: Mapping[int, Peer],
    ) -> None:
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in links}
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        self._rank, self._board, self._bells, self._links = rank, board, bells, dict(links)
        self._words = board.words
        self._position = {r: i for i, r in enumerate(ranks)}
        self._first = ranks[0]
        self._first_sleeps = board.index(0, Word.SLEEPS)
        self._own = board.index(self._position[rank], Word(0))
        self._others = {r: board.index(i, Word(0)) for r, i in self._position.items() if r != rank}
        # Of the messages to the first rank, or from the others to it: how many went, and the boxes that some lay in.
        boxes = {r: board.box(i) for r, i in self._position.items()}
        self._box = boxes[rank]
        self._num_sent = 0
        self._boxes = {r: boxes[r] for r in links} if rank == self._first else {}
        self._num_taken = dict.fromkeys(self._boxes, 0)
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
        self._bell = bells.descriptors[0 if rank == self._first else 1]
        self._events.register(self._bell, select.EPOLLIN | select.EPOLLET)

    def _watch(self, fd: int, rank: int) -> None:
        self._events.register(fd, select.EPOLLIN)
        self._sources[fd] = rank

    def send(self, rank: int, message: Message) -> None:
        """Send; see `Wire`."""
        if rank == self._first:
            parts = framed(message)
            if self._box.put(self._num_sent + 1, parts, sum(map(len, parts))):
                if self._words[self._first_sleeps] == Sleep.LIGHT:
                    self._bells.ring(is_for_first=True)
            else:
                self._links[rank].send(message, wait=False)
            self._num_sent += 1
        else:
            self._links[rank].send(message, wait=False)

    def look(self) -> None:
        """Take in what lies in the boxes."""
        for rank, box in self._boxes.items():
            if (content := box.take(self._num_taken[rank] + 1)) is not None:
                self._num_taken[rank] += 1
                self.inboxes[rank].append(parsed(content))

    def pump(self, seconds: float) -> None:
        """Take in what has come; see `Wire`."""
        for fd, _ in self._events.poll(seconds):
            if fd == self._bell:
                continue
            rank = self._sources[fd]
            if fd == self._lives.get(rank):
                self.ended.add(rank)
            elif (received := self._links[rank].receive()) is not None:
                message, descriptors = received
                for descriptor in descriptors:
                    os.close(descriptor)
                self._came_by_link(rank, message)
                continue
            else:
                self.silent.add(rank)
            self._events.unregister(fd)  # it would wake every wait from now on
        self.look()

    def _came_by_link(self, rank: int, message: Message) -> None:
        if (box := self._boxes.get(rank)) is not None:
            self.look()  # what lies in its box was sent before
            self._num_taken[rank] += 1
            box.took(self._num_taken[rank])
        self.inboxes[rank].append(message)

    def say(self, word: Word, value: int) -> None:
        """Set one of this rank's own words; see `Wire`."""
        words = self._words
        words[self._own + word] = value
        if (
            words[self._first_sleeps] == Sleep.UNTIL_ALL
            and word in _COMMON
            and self._rank != self._first
            and all(words[at + word] >= value for rank, at in self._others.items() if rank != self._first)
        ):
            self._bells.ring(is_for_first=True)

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        words = self._words
        for is_first in (True, False):
            if any(
                words[self._others[r] + Word.SLEEPS] == Sleep.LIGHT for r in ranks if (r == self._first) is is_first
            ):
                self._bells.ring(is_for_first=is_first)

    def heard(self, rank: int, word: Word) -> int:
        """Return a word of any rank, as it is this moment."""
        return self._words[self._own + word] if rank == self._rank else self._words[self._others[rank] + word]

    def fail(self, record: FailureRecord) -> None:
        """Let all others know; the first record stays."""
        self._board.fail(self._position[self._rank], record)

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failures."""
        if not self._board.is_alarmed:
            return {}
        failures = {r: self._board.failure(i) for r, i in self._position.items() if r != self._rank}
        return {rank: failure for rank, failure in failures.items() if failure is not None}

    def close(self) -> None:
        """Let go of everything; see `Wire`."""
        self._events.close()
        for link in self._links.values():
            link.close()
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()
        self._bells.close()
        self._board.close()
