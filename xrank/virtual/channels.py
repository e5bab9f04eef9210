"""Channels: one direction from a device, or the host, to another; their message headings and counts.

A transport is a subclass of `VirtualChannel` with `put` and `take`, and `Links` that return one device's ends of its
channels. The call order of one device::

    links.from_host.receive(...)      the packets that the host sent before the device began
    links.to_device(d).send(...)      never waits for the receiver: two devices may both send first
    links.from_device(d).receive(...) waits; messages of one device arrive in the order of sending
    links.to_host.send(...)           the outputs of a program

Only the device's own thread uses its ends. The engine ends a wait with an exception when another device has failed or
the time limit is over. Both sides of a channel count every array independently of the devices' statistics, and tests
compare the two. A received array has the kind (numpy or torch) of the sent one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from zlib import crc32

from xrank.errors import UsageError
from xrank.virtual.arrays import Array, nbytes_of
from xrank.virtual.collectives import ALGORITHMS, COLLECTIVES, REDUCTIONS

HOST = -1
"""The host, as source or target of a channel."""

KINDS = ("packet", "return", "send", *COLLECTIVES)
"""Kinds of messages; a heading contains the place in this list."""


class Heading(NamedTuple):
    """The call that a message belongs to: ``len(Heading())`` integers from 0 to 2**32 - 1, for any transport.

    A receiver passes the heading that it expects; a different one means that two devices call different things.
    """

    kind: int = KINDS.index("send")
    """Place in `KINDS`."""
    algorithm: int = 0
    """Place in `ALGORITHMS`."""
    reduction: int = 0
    """Place in `REDUCTIONS`, plus 1; 0 without a reduction."""
    root: int = 0
    """The root device, plus 1; 0 without a root."""
    group: int = 0
    """CRC-32 of the members' numbers, in the group's order; 0 outside of collectives."""
    call: int = 0
    """Number of earlier collectives of this group, counted by the device; for packets, their number."""
    shape: int = 0
    """CRC-32 of the shape of the members' arrays, if the sent pieces do not show it; otherwise 0."""

    def __str__(self) -> str:
        words = [KINDS[self.kind] if self.kind < len(KINDS) else f"kind {self.kind}"]
        if self.reduction:
            words.append(REDUCTIONS[self.reduction - 1])
        if self.root:
            words.append(f"with root {self.root - 1}")
        if self.group:
            words.append(f"by {ALGORITHMS[self.algorithm]}, call {self.call} of group #{self.group:08x}")
        elif self.call:
            words.append(f"number {self.call}")
        return " ".join(words)


PLAIN = Heading()


def make_heading(
    kind: str,
    *,
    algorithm: str = "push",
    reduction: str | None = None,
    root: int | None = None,
    group: Sequence[int] = (),
    call: int = 0,
    shape: Sequence[int] | None = None,
) -> Heading:
    """Encode the description of a message as a heading."""
    return Heading(
        KINDS.index(kind),
        ALGORITHMS.index(algorithm),
        0 if reduction is None else REDUCTIONS.index(reduction) + 1,
        0 if root is None else root + 1,
        _digest(group) if group else 0,
        call % 2**32,
        0 if shape is None else _digest(shape),
    )


def _digest(numbers: Sequence[int]) -> int:
    return crc32(",".join(map(str, numbers)).encode())


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Arrays that passed one end of a channel, and the bytes of their elements. Objects are not counted."""

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: ChannelStatistics) -> ChannelStatistics:
        return ChannelStatistics(self.messages + other.messages, self.nbytes + other.nbytes)


class VirtualChannel(ABC):
    """One direction from one device, or the host, to another: first in, first out, lossless.

    Args:
        source: the sending device; `HOST` for the host.
        target: the receiving device; `HOST` for the host.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.sent = ChannelStatistics()
        """Counted by this end; if one process has both ends, by the sender."""
        self.received = ChannelStatistics()
        """Counted by this end; if one process has both ends, by the receiver."""

    def send(self, array: Array, heading: Heading = PLAIN) -> None:
        """Send an array without waiting for the receiver; the caller may change the array afterwards."""
        nbytes = nbytes_of(array)
        self.put(array, heading)
        # After the put, which may end with an exception: only sent messages count.
        self.sent += ChannelStatistics(1, nbytes)

    def receive(self, heading: Heading = PLAIN) -> Array:
        """Wait for the next array and return it; the receiver may keep and change it.

        Raises:
            UsageError: the message has a different heading.
        """
        found, array = self.take(heading)
        self.received += ChannelStatistics(1, nbytes_of(array))
        if found != heading:
            raise contradiction(self.source, self.target, found, heading)
        return array

    @abstractmethod
    def put(self, array: Array, heading: Heading) -> None:
        """Send without counting: copy the array, whatever its strides."""

    @abstractmethod
    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive without counting or checks; the expected heading is shown if the receiver hangs."""


class Links(Protocol):
    """One device's ends of its channels, created by the engine."""

    @property
    def from_host(self) -> VirtualChannel:
        """The end that receives the host's packets."""
        ...

    @property
    def to_host(self) -> VirtualChannel:
        """The end that sends a program's outputs."""
        ...

    def to_device(self, device: int) -> VirtualChannel:
        """Return the end that sends to another device."""
        ...

    def from_device(self, device: int) -> VirtualChannel:
        """Return the end that receives from another device."""
        ...


def contradiction(source: int, target: int, found: Heading, wanted: Heading) -> UsageError:
    """Return the error for a message with an unexpected heading."""
    sender, receiver = ("the host" if end == HOST else f"device {end}" for end in (source, target))
    if found._replace(group=wanted.group) == wanted:
        description = "the same of another group"
    elif found._replace(shape=wanted.shape) == wanted:
        description = "a piece of an array of another shape"
    else:
        description = str(found)
    return UsageError(
        f"{receiver} expects {wanted}, but {sender} sent it {description}",
        rank=target,
        got=str(found),
        want=str(wanted),
        next_step="let all members of a group call the same collectives in the same order",
    )
