"""The board: what each end waits for, in shared memory, so that the host can tell who is stuck and who only waits."""

from __future__ import annotations

import time
from dataclasses import dataclass

from xrank.virtual.channels.channel import Heading
from xrank.virtual.channels.segment import BOARD_NBYTES, Segment

__all__ = ["Board", "Wait"]

_WORD = 8
_TURN, _SOURCE, _SINCE, _TAKEN, _HEADING = range(5)
"""Places of words; an odd turn is a wait, an even one is none, and each change is the next turn."""
assert (_HEADING + 1 + len(Heading())) * _WORD <= BOARD_NBYTES


@dataclass(frozen=True, slots=True)
class Wait:
    """What an end waits for."""

    turn: int
    """No other wait of this end has the number."""
    source: int
    """The end whose record is to come."""
    since: float
    """On the monotonic clock, which all processes of the host share."""
    num_taken: int
    """How many records of that end it had taken before."""
    heading: Heading | None
    """What it is to be part of; None for an object."""


class Board:
    """Written by each end at its own place, read by the host.

    Args:
        segment: shared by all.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def begin(self, end: int, source: int, num_taken: int, heading: Heading | None) -> None:
        """Say that this end waits from now on."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        words[first + _SOURCE] = source
        words[first + _SINCE] = time.monotonic_ns()
        words[first + _TAKEN] = num_taken
        words[first + _HEADING] = heading is not None
        for place, number in enumerate(heading or (), first + _HEADING + 1):
            words[place] = number
        words[first + _TURN] += 1

    def finish(self, end: int) -> None:
        """Say that this end goes on."""
        self._segment.words[self._segment.board(end) // _WORD + _TURN] += 1

    def read(self, end: int) -> Wait | None:
        """Return what an end waits for, None where it does not."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        while True:
            turn = words[first + _TURN]
            if turn % 2 == 0:
                return None
            start = first + _HEADING + 1
            heading = Heading(*words[start : start + len(Heading())]) if words[first + _HEADING] else None
            wait = Wait(turn, words[first + _SOURCE], words[first + _SINCE] / 1e9, words[first + _TAKEN], heading)
            if words[first + _TURN] == turn:
                return wait
