"""The wire between the ranks of a circle: memory and sockets on one host, a store across hosts.

To add a transport of short messages, statuses and failures, write a class with the methods of `Wire`, and a rendezvous
that gives it to a `xrank.ranks.circle.Circle`. Tensors take other ways: `xrank.workspace.base.MessageWorkspace` in live
gathers, `xrank.lending` in exports and loads, `xrank.gradients.wires` for gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from xrank.ranks.failure import FailureRecord


class Status(IntEnum):
    """Numbers that each rank publishes to all others; the first three only grow."""

    ARRIVED = 0
    """Last call whose part the rank has done: message sent or, on the first rank, all received."""
    ENDED = 1
    """Bodies that the rank has ended without an error; on the first rank, bodies that have ended so on all ranks."""
    LEFT = 2
    """Call up to which no other rank needs this one."""
    SLEEPS = 3
    """Whether the rank may be asleep, so that only a message or a nudge wakes it: a member of `Sleep`."""


class Sleep(IntEnum):
    """The events that wake a rank."""

    NOT = 0
    """None are needed: the rank is awake."""
    LIGHT = 1
    """Any nudge or message."""
    UNTIL_ALL = 2
    """The status of the last of all others: a wake-up for each of them would cost more than the gather."""


class Message(NamedTuple):
    """A message from one rank to another: a JSON object and bytes. A frozen dataclass takes twice as long to make."""

    content: dict[str, Any]
    payload: bytes = b""


NUDGE = Message({})
"""Empty; the receiver looks again at the statuses that it waits for."""


class Wire(Protocol):
    """One rank's connection to the others. One thread at a time uses it; only `pump` waits."""

    shares_memory: bool
    """Whether all ranks share memory."""
    max_payload_nbytes: int
    """Largest payload of a message; 0 if the wire carries JSON only."""
    inboxes: dict[int, deque[Message]]
    """Rank -> received messages that were not yet taken, in their order."""
    ended: set[int]
    """Ranks whose processes were seen to have ended."""
    silent: set[int]
    """Ranks that closed their end, so that they send nothing more."""

    def send(self, rank: int, message: Message) -> None:
        """Send; messages to one rank keep their order.

        Raises:
            ConnectionError: that rank is gone.
            BlockingIOError: that rank's buffer is full; nothing was sent.
        """

    def look(self) -> None:
        """Receive messages that lie in shared memory, without a system call; ends of ranks are not noticed."""

    def pump(self, seconds: float) -> None:
        """Receive messages and notice ends of ranks; wait up to `seconds` for the first."""

    def set_status(self, status: Status, value: int) -> None:
        """Set one of this rank's own statuses; wake the first rank if it sleeps until all ranks have reached it."""

    def nudge(self, ranks: Sequence[int]) -> None:
        """Wake ranks that wait for a status of this one; those that are gone or awake are left alone."""

    def get_status(self, rank: int, status: Status) -> int:
        """Return a status of any rank, as far as it is known here."""

    def fail(self, record: FailureRecord) -> None:
        """Report this rank's failure to all others; the first record stays."""

    def failures(self) -> dict[int, FailureRecord]:
        """Return the failure records of other ranks by the rank that wrote them, in the order of ranks."""

    def close(self) -> None:
        """Release all resources; ranks that still wait see this rank as gone. A second call does nothing."""
