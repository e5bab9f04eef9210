"""Engines: how the cluster has the bodies of its devices run, and what it gets back.

``"in-process"`` is `in_process.run` (threads), ``"processes"`` is `process_engine.run`.
Both follow this order for each device: the host sends its packets, one after another, by the channel host -> device
with the heading ``heading_of("packet", call=number)``; the device calls ``body(links)``; what the body sent to the
host as arrays (``heading_of("return", call=number)``) are its `returned`, what it gave back its `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from xrank.virtual.channels.channel import Array, ChannelStatistics, Links

__all__ = ["Body", "Counts", "Engine", "Job", "Outcome"]

Body: TypeAlias = Callable[[Links], Any]

Counts: TypeAlias = Mapping[tuple[int, int], ChannelStatistics]
"""By source and target of a channel, the host being `channel.HOST`; channels that carried nothing may be absent."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one device has to do."""

    device: int
    body: Body
    packets: tuple[Array, ...] = ()
    """What the host sends it, in this order."""
    num_returned: int = 0
    """How many arrays the body sends to the host."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all devices did, in the order of the jobs."""

    results: tuple[Any, ...]
    """What the bodies gave back."""
    returned: tuple[tuple[Array, ...], ...]
    """The arrays that each device sent to the host, in order."""
    sent: Counts
    """Counted by the senders' ends, the host's among them."""
    received: Counts
    """Counted by the receivers' ends, the host's among them."""


class Engine(Protocol):
    """Runs jobs, all at once."""

    def __call__(self, jobs: Sequence[Job], *, timeout_seconds: float) -> Outcome:
        """Run all jobs and return what they did; nothing of them is left afterwards, whatever happened.

        Raises:
            RankFailedError: a device raised or ended; the first, with all in ``failures``.
            RankTimeoutError: the time is over, or all devices wait for each other.
        """
        ...
