"""Channels: one way from a device, or the host, to another; what their messages say, and what they count.

A transport is a subclass of `VirtualChannel` with `put` and `take` (arrays) and `put_object` and `take_object`
(anything else), and `Links` that hand out the channels' ends that one device holds. The call order of one device::

    links.from_host.receive(...)      what the host sent before the device began
    links.to_device(d).send(...)      never waits for the receiver: two devices may send to each other first
    links.from_device(d).receive(...) waits; what one device sent comes in the order of sending
    links.to_host.send(...)           what a program returns
    links.to_host.send_object(...)    what the body of the device gave back: the engine's own business

Only the device's own thread uses its ends. A wait ends by an exception of the engine when another device has failed
or the time is over. Channels count each array that passes, on both sides, by themselves: the statistics that devices
keep are compared with these counts. What comes out of a channel is of the kind that went in, numpy's or torch's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol
from zlib import crc32

from xrank.errors import UsageError
from xrank.virtual.arrays import Array, nbytes_of
from xrank.virtual.collectives import ALGORITHMS, COLLECTIVES, REDUCTIONS

__all__ = ["HOST", "KINDS", "Array", "ChannelStatistics", "Heading", "Links", "VirtualChannel", "heading_of"]

HOST = -1
"""What stands for the host where channels are named by their two ends."""

KINDS = ("packet", "return", "send", *COLLECTIVES)
"""What a message can be part of; a heading has the place in this list."""


class Heading(NamedTuple):
    """What a message is part of: ``len(Heading())`` whole numbers from 0 to 2**32 - 1, which any transport can carry.

    A receiver says which heading it expects; another is a contradiction between two devices' calls.
    """

    kind: int = KINDS.index("send")
    """Place in `KINDS`."""
    algorithm: int = 0
    """Place in `ALGORITHMS`."""
    reduction: int = 0
    """Place in `REDUCTIONS`, plus 1; 0 where nothing is reduced."""
    root: int = 0
    """The root device, plus 1; 0 where there is none."""
    group: int = 0
    """CRC-32 of the members' numbers, in the group's order; 0 outside of collectives."""
    call: int = 0
    """How many collectives this group has begun before, by the device's own count; of packets, their number."""
    shape: int = 0
    """CRC-32 of the shape of what all members bring, where the pieces that travel do not show it; else 0."""

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


def heading_of(
    kind: str,
    *,
    algorithm: str = "push",
    reduction: str | None = None,
    root: int | None = None,
    group: Sequence[int] = (),
    call: int = 0,
    shape: Sequence[int] | None = None,
) -> Heading:
    """Return the heading of a message, in numbers."""
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
    """What passed one end of a channel: arrays, and the bytes of their elements. Objects are not counted."""

    messages: int = 0
    nbytes: int = 0

    def __add__(self, other: ChannelStatistics) -> ChannelStatistics:
        return ChannelStatistics(self.messages + other.messages, self.nbytes + other.nbytes)


class VirtualChannel(ABC):
    """One way from one device, or the host, to another: first in, first out, nothing lost.

    Args:
        source: the device that sends; `HOST` for the host.
        target: the device that receives; `HOST` for the host.
    """

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self.target = target
        self.sent = ChannelStatistics()
        """By this end; where both ends are of one process, by the sender."""
        self.received = ChannelStatistics()
        """By this end; where both ends are of one process, by the receiver."""

    def send(self, array: Array, heading: Heading = PLAIN) -> None:
        """Send an array, which may be changed afterwards; never waits for the receiver."""
        nbytes = nbytes_of(array)
        self.put(array, heading)
        self.sent += ChannelStatistics(1, nbytes)

    def receive(self, heading: Heading = PLAIN) -> Array:
        """Wait for the next array and return it; it is the receiver's own, to keep and to change.

        Raises:
            UsageError: the sender says that it is part of something else.
        """
        found, array = self.take(heading)
        self.received += ChannelStatistics(1, nbytes_of(array))
        if found != heading:
            raise contradiction(self.source, self.target, found, heading)
        return array

    @abstractmethod
    def put(self, array: Array, heading: Heading) -> None:
        """Send, uncounted: copy the array, whatever its strides."""

    @abstractmethod
    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive, uncounted and unchecked; the heading is what the receiver waits for, to be told where it hangs."""

    @abstractmethod
    def send_object(self, value: Any) -> None:
        """Send what is no array: results of free functions, errors. Arrays inside go out of band where that pays."""

    @abstractmethod
    def receive_object(self) -> Any:
        """Wait for the next object; objects and arrays have an order of their own."""


class Links(Protocol):
    """The ends of channels that one device holds. An engine makes one for each device."""

    @property
    def from_host(self) -> VirtualChannel:
        """The end at which the host's packets come."""
        ...

    @property
    def to_host(self) -> VirtualChannel:
        """The end for what a program returns."""
        ...

    def to_device(self, device: int) -> VirtualChannel:
        """Return the end for what goes to another device."""
        ...

    def from_device(self, device: int) -> VirtualChannel:
        """Return the end at which that device's messages come."""
        ...


def contradiction(source: int, target: int, found: Heading, wanted: Heading) -> UsageError:
    """Return the error for a message that is not part of what its receiver does."""
    sender, receiver = ("the host" if end == HOST else f"device {end}" for end in (source, target))
    if found._replace(group=wanted.group) == wanted:
        told = "the same of another group"
    elif found._replace(shape=wanted.shape) == wanted:
        told = "a piece of an array of another shape"
    else:
        told = str(found)
    return UsageError(
        f"{receiver} is at {wanted}, and {sender} sent it {told}",
        rank=target,
        got=str(found),
        want=str(wanted),
        next_step="let all members of a group call the same collectives in the same order",
    )
