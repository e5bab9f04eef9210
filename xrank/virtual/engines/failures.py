"""What the caller of a cluster is told when a device fails, is late, or waits for ever: one set of words."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence

from xrank.errors import RankFailedError, RankTimeoutError, XrankError
from xrank.virtual.channels.channel import HOST

__all__ = ["all_wait", "awaited", "failed", "late", "with_all"]


def failed(device: int, error: BaseException, *, pid: int | None = None) -> RankFailedError:
    """Return the error for a device whose body raised; raise it ``from`` what the body raised."""
    cause = f"{type(error).__name__}: {_text(error)}"
    told = RankFailedError(
        f"device {device} failed: {cause}",
        rank=device,
        pid=pid,
        cause=cause,
        got=error.got if isinstance(error, XrankError) else None,
        want=error.want if isinstance(error, XrankError) else None,
        next_step=error.next_step if isinstance(error, XrankError) else None,
    )
    told.add_note(f"on device {device}:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return told


def with_all(errors: Sequence[RankFailedError]) -> RankFailedError:
    """Return the first of several errors, with all of them, itself among them, as its ``failures``."""
    errors[0].failures = tuple(errors)
    return errors[0]


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # it is the user's
        return "(it cannot be told)"


def awaited(source: int, running: Collection[int], what: str) -> str:
    """Return what a device waits for, in words.

    Args:
        source: the device that it waits for, or `HOST`.
        running: the devices that have not ended.
        what: what it is to receive.
    """
    sender = "the host" if source == HOST else f"device {source}"
    ended = ", which has ended" if source != HOST and source not in running else ""
    return f"{sender}{ended} ({what})"


def late(devices: Sequence[int], waits: Mapping[int, str], timeout_seconds: float) -> RankTimeoutError:
    """Return the error for a deadline that has passed.

    Args:
        devices: those that have not ended and wait for nobody.
        waits: those that wait, each with what it waits for, in words.
        timeout_seconds: the time they had.
    """
    if not devices:
        return all_wait(waits)
    several = "" if len(devices) == 1 else "s"
    return RankTimeoutError(
        f"device{several} {_listed(devices)} did not end within {timeout_seconds:g} seconds",
        rank=devices[0],
        waiting_for=tuple(devices),
        got=_told(waits) if waits else None,
        next_step="look at where they stand, below; or give timeout_seconds= of more",
    )


def all_wait(waits: Mapping[int, str], *, others_work: bool = False) -> RankTimeoutError:
    """Return the error for devices that wait for each other, or for such as have ended."""
    return RankTimeoutError(
        f"{'these devices can never' if others_work else 'no device can'} go on: {_told(waits)}",
        rank=min(waits, default=None),
        waiting_for=tuple(waits),
        next_step="let the members of a group call the same collectives in one order, and let each receive have a send",
    )


def _told(waits: Mapping[int, str]) -> str:
    """Return who waits for what, in words, of at most eight devices."""
    told = [f"device {device} waits for {what}" for device, what in list(waits.items())[:8]]
    return "; ".join([*told, *([f"{len(waits) - 8} more wait"] if len(waits) > 8 else [])])


def _listed(devices: Sequence[int]) -> str:
    shown = ", ".join(map(str, devices[:16]))
    return shown if len(devices) <= 16 else f"{shown} and {len(devices) - 16} more"
