"""Engines: the interface by which the cluster runs the bodies of its devices.

``"in-process"`` is `in_process.run` (threads), ``"processes"`` is `process_engine.run`.
Both follow this order for each device: the host sends the packets one after another on the channel host -> device,
with the heading ``make_heading("packet", call=number)``; the device calls ``body(links)``; the arrays that the body
sends to the host (``make_heading("return", call=number)``) become its `returned`, its return value its `result`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.virtual.arrays import Array
from xrank.virtual.channels import HOST, ChannelStatistics, Links
from xrank.words import first_lines, list_text

Body: TypeAlias = Callable[[Links], Any]

Counts: TypeAlias = Mapping[tuple[int, int], ChannelStatistics]
"""Counts by source and target of a channel, `channel.HOST` for the host; unused channels may be absent."""


@dataclass(frozen=True, slots=True)
class DeviceJob:
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

    def __call__(self, jobs: Sequence[DeviceJob], *, timeout_seconds: float) -> EngineOutcome:
        """Run all jobs and return their outcome; release all resources in any case."""
        ...


def make_failure(device: int, error: BaseException, *, pid: int | None = None) -> RankFailedError:
    """Return the error for a device whose body raised; the caller raises it ``from`` that exception."""
    cause = f"{type(error).__name__}: {_text(error)}"
    failure = RankFailedError(
        f"device {device} failed: {cause}",
        rank=device,
        pid=pid,
        cause=cause,
        got=error.got if isinstance(error, XrankError) else None,
        want=error.want if isinstance(error, XrankError) else None,
        next_step=error.next_step if isinstance(error, XrankError) else None,
    )
    failure.add_note(f"on device {device}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return failure


def join_failures(errors: Sequence[RankFailedError]) -> RankFailedError:
    """Return the first of several errors, with all of them in its ``failures``."""
    errors[0].failures = tuple(errors)
    return errors[0]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the exception's own code failed
        return "(its text cannot be shown)"


def describe_wait(source: int, running: Collection[int], message: str) -> str:
    """Describe a device's wait.

    Args:
        source: the awaited sender: a device, or `HOST`.
        running: the devices that have not ended.
        message: the awaited message.
    """
    sender = "the host" if source == HOST else f"device {source}"
    ended = ", which has ended" if source != HOST and source not in running else ""
    return f"{sender}{ended} ({message})"


def make_timeout_error(devices: Sequence[int], waits: Mapping[int, str], timeout_seconds: float) -> RankTimeoutError:
    """Return the error for a run that exceeded its time limit.

    Args:
        devices: devices that have not ended and do not wait for a message.
        waits: waiting devices, each with the description of its wait.
        timeout_seconds: the time limit.
    """
    if not devices:
        return make_deadlock_error(waits)
    noun = "device" if len(devices) == 1 else "devices"
    return RankTimeoutError(
        f"{noun} {list_text(devices, 16)} did not end within {timeout_seconds:g} seconds",
        rank=devices[0],
        waiting_for=tuple(devices),
        got=_describe_waits(waits) if waits else None,
        next_step="look at their stacks, below; or give a larger timeout_seconds=",
    )


def make_deadlock_error(waits: Mapping[int, str], *, others_work: bool = False) -> RankTimeoutError:
    """Return the error for devices that wait for each other or for devices that have ended."""
    return RankTimeoutError(
        f"{'these devices can never' if others_work else 'no device can'} go on: {_describe_waits(waits)}",
        rank=min(waits, default=None),
        waiting_for=tuple(waits),
        next_step="let the members of a group call the same collectives in one order, and let each receive have a send",
    )


def _describe_waits(waits: Mapping[int, str]) -> str:
    """Describe the waits of up to eight devices."""
    return "; ".join(first_lines([f"device {device} waits for {what}" for device, what in waits.items()], 8))
