"""The wire between the ranks of a group: memory and sockets on one host, a store across hosts.

To add a transport of short messages, statuses and failures, write a class with the methods of `Wire`, and let
`xrank.ranks.meeting` give it to a `RankGroup`. Large values take a `MessageWorkspace`, lent tensors
`xrank.ranks.loans`, and gradients `xrank.gradients.wires`.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from xrank.ranks.failure import FailureRecord

if TYPE_CHECKING:
    import torch

STORES_ARE_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686", "i586", "i386")
"""Whether all processors see stores in the order they were made in: a message before the number that announces it.
Other processors need barrier instructions for that, which Python does not have."""


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


@runtime_checkable
class MessageWorkspace(Protocol):
    """Carries tensors between live ranks; each message has one sender and one reader.

    Call order: the sender publishes, and passes the receipt to the reader by any channel of its own. The reader fetches
    only after that, because a network file system caches for half a minute that a name is absent. It fetches once, and
    again only if it did not see the message. Once the reader has confirmed, the sender retires the message. A name is
    never used for two messages. A call never waits for another rank.

    Every rank publishes and fetches, from one thread at a time. Only the sender retires. A crash leaves at most the
    messages in flight; the next start of this rank, or ``xrank clean``, removes them.
    """

    patience_seconds: float
    """How long a message may stay invisible to a reader that has its receipt."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message and return its receipt, a text by which any process finds it.

        Args:
            header: JSON that describes the tensors; never a pickle.
            tensors: dense tensors of any strides and device. Their elements are written row-major, as bytes.

        Raises:
            NoSpaceError: the medium is full; no part of the message remains.
        """
        ...

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message of a rank: its header, and the bytes of each tensor, in memory that the caller owns.

        The caller may write to this memory. It stays valid as long as a tensor uses it, also after the message retires.

        Raises:
            IncompleteError: the message is not visible; within `patience_seconds` it may become so.
            CorruptError: the bytes differ from those that were published.
        """
        ...

    def retire(self, receipt: str) -> None:
        """Release a message of this rank after its reader has fetched it."""
        ...

    def close(self) -> None:
        """Release everything that this rank published. Fetched messages stay valid. A second call does nothing."""
        ...
