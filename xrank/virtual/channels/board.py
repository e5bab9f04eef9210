"""The board: the current wait of each end, in shared memory, so that the host can distinguish deadlocks from waits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from xrank.virtual.channels.channel import Heading
from xrank.virtual.channels.segment import BOARD_NBYTES, Segment

_WORD = 8
_TURN, _SOURCE, _SINCE, _TAKEN, _HEADING = range(5)
"""Places of words. An odd turn is a wait, an even turn is not; each change adds 1."""
assert (_HEADING + 1 + len(Heading())) * _WORD <= BOARD_NBYTES


@dataclass(frozen=True, slots=True)
class Wait:
    """The record that an end waits for."""

    turn: int
    """Number of the wait, unique for this end."""
    source: int
    """The end that must send the record."""
    since: float
    """Start of the wait, in seconds of the monotonic clock, which all processes of the host share."""
    num_taken: int
    """Number of records that the end had received from the source before."""
    heading: Heading | None
    """The expected heading; None for an object."""


class WaitBoard:
    """One place per end, written by the end and read by the host.

    Args:
        segment: the segment shared by all ends.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def begin(self, end: int, source: int, num_taken: int, heading: Heading | None) -> None:
        """Record that an end starts to wait."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        words[first + _SOURCE] = source
        words[first + _SINCE] = time.monotonic_ns()
        words[first + _TAKEN] = num_taken
        words[first + _HEADING] = heading is not None
        for place, number in enumerate(heading or (), first + _HEADING + 1):
            words[place] = number
        # The turn comes last: a reader that sees it also sees the words before it.
        words[first + _TURN] += 1

    def finish(self, end: int) -> None:
        """Record that the end has stopped waiting."""
        self._segment.words[self._segment.board(end) // _WORD + _TURN] += 1

    def read(self, end: int) -> Wait | None:
        """Return the wait of an end; None if it does not wait."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        while True:
            turn = words[first + _TURN]
            if turn % 2 == 0:
                return None
            start = first + _HEADING + 1
            heading = Heading(*words[start : start + len(Heading())]) if words[first + _HEADING] else None
            wait = Wait(turn, words[first + _SOURCE], words[first + _SINCE] / 1e9, words[first + _TAKEN], heading)
            # The words belong together only if the wait has not ended while they were read.
            if words[first + _TURN] == turn:
                return wait
