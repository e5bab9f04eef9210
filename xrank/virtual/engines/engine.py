"""Engines: the interface by which the cluster runs the bodies of its devices.

``"in-process"`` is `in_process.run` (threads), ``"processes"`` is `process_engine.run`.
Both follow this order for each device: the host sends the packets one after another on the channel host -> device,
with the heading ``make_heading("packet", call=number)``; the device calls ``body(links)``; the arrays that the body
sends to the host (``make_heading("return", call=number)``) become its `returned`, its return value its `result`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from xrank.virtual.channels.channel import Array, ChannelStatistics, Links

Body: TypeAlias = Callable[[Links], Any]

Counts: TypeAlias = Mapping[tuple[int, int], ChannelStatistics]
"""Counts by source and target of a channel, `channel.HOST` for the host; unused channels may be absent."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one device."""

    device: int
    body: Body
    packets: tuple[Array, ...] = ()
    """Arrays that the host sends to the device, in this order."""
    num_returned: int = 0
    """Number of arrays that the body sends to the host."""


@dataclass(frozen=True, slots=True)
class EngineOutcome:
    """The results and counts of all devices, in the order of the jobs."""

    results: tuple[Any, ...]
    """Return values of the bodies."""
    returned: tuple[tuple[Array, ...], ...]
    """The arrays that each device sent to the host, in order."""
    sent: Counts
    """Counted by the senders' ends, including the host's."""
    received: Counts
    """Counted by the receivers' ends, including the host's."""


class Engine(Protocol):
    """A function that runs jobs in parallel."""

    def __call__(self, jobs: Sequence[Job], *, timeout_seconds: float) -> EngineOutcome:
        """Run all jobs and return their outcome; release all resources in any case.

        Raises:
            RankFailedError: a device raised or died; the first such error, with all of them in ``failures``.
            RankTimeoutError: the time limit is over, or all devices wait for each other.
        """
        ...
