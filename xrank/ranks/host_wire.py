"""The wire of one host: a board of shared memory, a socket to the first rank, and a pidfd for every rank."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from xrank.ranks.board import Board
from xrank.ranks.failure import FailureRecord
from xrank.ranks.link import MAX_PAYLOAD_NBYTES, Link, decode_message, encode_message
from xrank.ranks.peer import Peer
from xrank.ranks.wire import Message, Sleep, Status

_COMMON = (Status.ARRIVED, Status.ENDED)
"""Statuses that the first rank waits for until all others have reached them."""


class Bells:
    """Descriptors that wake the ranks of a circle: one for the first rank, one for all others (eventfd(2)).

    Sleeping ranks poll for the edge, and no rank reads the counter: a ring wakes all sleepers of that descriptor and
    costs the ranks that are awake nothing.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self.descriptors = tuple(descriptors)

    @classmethod
    def create(cls) -> Bells:
        """Return new bells."""
        return cls([os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2)])

    def ring(self, *, is_for_first: bool) -> None:
        """Wake the first rank, or all others."""
        os.eventfd_write(self.descriptors[0 if is_for_first else 1], 1)

    def close(self) -> None:
        """Close the descriptors; a second call does nothing."""
        for fd in self.descriptors:
            os.close(fd)
        self.descriptors = ()


class HostWire:
    """A `Wire`; all processes share memory and process numbers.

    Args:
        ranks: all ranks, the first rank first.
        rank: this rank.
        board: shared by all, by position in `ranks`.
        bells: shared by all; the wire closes them.
        links: on the first rank to every other, elsewhere to the first alone.
        peers: processes of the other ranks.
    """

    shares_memory = True
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
        self._first_sleeps = board.index(0, Status.SLEEPS)
        self._own = board.index(self._position[rank], Status(0))
        self._others = {r: board.index(i, Status(0)) for r, i in self._position.items() if r != rank}
        # Messages to the first rank go through letter boxes or links; numbers keep their order across both.
        boxes = {r: board.box(i) for r, i in self._position.items()}
        self._box = boxes[rank]
        self._num_sent = 0
        self._boxes = {r: boxes[r] for r in links} if rank == self._first else {}
        self._num_taken = dict.fromkeys(self._boxes, 0)
        self._lives: dict[int, int] = {}
        # One epoll queue for all descriptors: a poll costs the same for two ranks and for a hundred.
        self._events = select.epoll()
        self._sources: dict[int, int] = {}
        for r, link in self._links.items():
            self._watch(link.fileno(), r)
        for r, peer in peers.items():
            life = None
            with suppress(ProcessLookupError):
                life = peer.open_life()
            if life is None:
                self.ended.add(r)  # the meeting proved that it can be watched, so it has ended already
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
            parts = encode_message(message)
            if self._box.put(self._num_sent + 1, parts, sum(map(len, parts))):
                if self._words[self._first_sleeps] == Sleep.LIGHT:
                    self._bells.ring(is_for_first=True)
            else:
                self._links[rank].send(message, wait=False)
            self._num_sent += 1
        else:
            self._links[rank].send(message, wait=False)

    def look(self) -> None:
        """Receive the messages in the letter boxes."""
        for rank, box in self._boxes.items():
            if (content := box.take(self._num_taken[rank] + 1)) is not None:
                self._num_taken[rank] += 1
                self.inboxes[rank].append(decode_message(content))

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends; see `Wire`."""
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
                self._receive_by_link(rank, message)
                continue
            else:
                self.silent.add(rank)
            self._events.unregister(fd)  # a closed descriptor stays readable and would end every later poll at once
        self.look()

    def _receive_by_link(self, rank: int, message: Message) -> None:
        if (box := self._boxes.get(rank)) is not None:
            self.look()  # a message in its box was sent before this one
            self._num_taken[rank] += 1
            box.skip(self._num_taken[rank])
        self.inboxes[rank].append(message)

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses; see `Wire`."""
        words = self._words
        # The value first, then the look for a sleeper: the first rank announces its sleep before it looks for values.
        words[self._own + status] = value
        if (
            words[self._first_sleeps] == Sleep.UNTIL_ALL
            and status in _COMMON
            and self._rank != self._first
            and all(words[at + status] >= value for rank, at in self._others.items() if rank != self._first)
        ):
            self._bells.ring(is_for_first=True)

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks; see `Wire`."""
        sleeping = [r for r in ranks if self._words[self._others[r] + Status.SLEEPS] == Sleep.LIGHT]
        if sleeping:
            if self._first in sleeping:
                self._bells.ring(is_for_first=True)
            if sleeping != [self._first]:
                self._bells.ring(is_for_first=False)

    def get_status(self, rank: int, status: Status) -> int:
        """Return the present status of any rank."""
        return self._words[(self._own if rank == self._rank else self._others[rank]) + status]

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure; see `Wire`."""
        self._board.fail(self._position[self._rank], record)

    def failures(self) -> dict[int, FailureRecord]:
        """Return the other ranks' failure records."""
        if not self._board.is_alarmed:
            return {}
        failures = {r: self._board.failure(i) for r, i in self._position.items() if r != self._rank}
        return {rank: failure for rank, failure in failures.items() if failure is not None}

    def close(self) -> None:
        """Release all resources; see `Wire`."""
        self._events.close()
        for link in self._links.values():
            link.close()
        for fd in self._lives.values():
            os.close(fd)
        self._lives.clear()
        self._bells.close()
        self._board.close()
