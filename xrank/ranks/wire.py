"""The wire: how the ranks of a circle reach each other, by memory and sockets on one host, or by a store."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from xrank.ranks.failure import FailureRecord

__all__ = ["NUDGE", "Message", "Sleep", "Wire", "Word"]


class Word(IntEnum):
    """How far a rank is: numbers that only grow, which it says and all others hear."""

    ARRIVED = 0
    """The last call it has done its part of: sent its message or, on the first rank, received all."""
    ENDED = 1
    """How many bodies it has ended well; on the first rank, how many have ended well everywhere."""
    LEFT = 2
    """The call up to which nobody needs it any more."""
    SLEEPS = 3
    """Whether it may be asleep, so that only a message or a nudge wakes it: a member of `Sleep`."""


class Sleep(IntEnum):
    """What wakes a rank."""

    NOT = 0
    """It looks by itself."""
    LIGHT = 1
    """Any nudge, any message."""
    UNTIL_ALL = 2
    """The last of all others that comes to where it is: to wake it for each would cost more than the gather."""


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends another: JSON, and bytes beside it."""

    content: dict[str, Any]
    payload: bytes = b""


NUDGE = Message({})
"""Says nothing; whoever gets it looks again at the words that it waits for."""


class Wire(Protocol):
    """One rank's way to the others. One thread at a time uses it; nothing but `pump` waits."""

    max_payload_nbytes: int
    """Of a message; 0 where bytes do not belong on this wire."""
    inboxes: dict[int, deque[Message]]
    """By rank: what has come and was not yet taken, in its order."""
    ended: set[int]
    """Ranks whose processes were seen to have ended."""
    silent: set[int]
    """Ranks that closed their end: nothing more will come from them."""

    def send(self, rank: int, message: Message) -> None:
        """Send; messages to one rank keep their order.

        Raises:
            ConnectionError: that rank is gone.
            BlockingIOError: that rank has too much to read already; nothing was sent.
        """

    def look(self) -> None:
        """Take in what has come, as far as a look at memory tells; who has ended is not seen."""

    def pump(self, seconds: float) -> None:
        """Take in what has come, and who has ended; wait up to `seconds` if nothing has."""

    def say(self, word: Word, value: int) -> None:
        """Set one of this rank's own words; wake the first rank if it sleeps until all have said as much."""

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks that wait for a word of this one's; those that are gone, or awake, need it not."""

    def heard(self, rank: int, word: Word) -> int:
        """Return a word of any rank, as far as it is known here."""

    def fail(self, record: FailureRecord) -> None:
        """Let all others know that this rank failed; the first record stays."""

    def failures(self) -> dict[int, FailureRecord]:
        """Return what other ranks said of their failing, by who says it, in the order of ranks."""

    def close(self) -> None:
        """Let go of everything; ranks that still wait hear of it. Calling it again does nothing."""
