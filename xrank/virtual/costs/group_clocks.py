"""When the members of a large group leave a collective, from when they enter it: all of them at once, in arrays.

The same steps as those of `xrank.virtual.collectives`, by the same rules as `xrank.virtual.costs.link_model`'s, for the
collectives that nobody leaves before all have entered; there are g(g-1) messages and more, too many to be told one by
one where the group has thousands of members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.virtual.collectives import ALWAYS_PUSH, ROOTED
from xrank.virtual.costs.group_traffic import flat_nbytes, part_nbytes
from xrank.virtual.programs.program import Communicate

__all__ = ["GroupTimes", "group_times", "nobody_leaves_early"]

FloatArray: TypeAlias = npt.NDArray[np.float64]


class GroupTimes(NamedTuple):
    """Of each member, in the group's order."""

    left: FloatArray
    """When it leaves."""
    sent: FloatArray
    """The seconds in which it sends."""
    waited: FloatArray
    """The seconds in which it waits for others."""


def nobody_leaves_early(collective: str) -> bool:
    """Return whether every member needs something of every other, so that `group_times` can tell its times."""
    return collective not in ROOTED


def group_times(
    instruction: Communicate, algorithm: str, entered: FloatArray, latency: float, bandwidth: float
) -> GroupTimes:
    """Return when members leave.

    Args:
        instruction: any member's.
        algorithm: ``"push"`` or ``"ring"``.
        entered: when each member comes to it, in the group's order.
        latency: of each message.
        bandwidth: of each sender.
    """
    given, size, collective = instruction.given, len(instruction.group), instruction.collective
    if algorithm == "ring" and collective not in ALWAYS_PUSH:
        shifts: tuple[int, ...]
        if collective == "all_gather":
            slots, shifts = [spec.nbytes for spec in given], (0,)
        elif collective == "all_reduce":
            slots, shifts = flat_nbytes(given[0], size), (1, 0)
        else:
            slots, shifts = part_nbytes(given[0], size, instruction.dim), (1,)
        return _ring(entered, np.array(slots) / bandwidth, shifts, latency)
    whole = np.array([spec.nbytes for spec in given]) / bandwidth
    if collective not in ("reduce_scatter", "all_to_all"):
        return _push(entered, lambda _: whole, latency)
    dim = instruction.dim or 0
    lengths = np.array([spec.shape[dim] for spec in given])
    shorts, longer = np.divmod(lengths, size)
    each = whole / np.maximum(lengths, 1)
    members = np.arange(size)
    return _push(entered, lambda far: (shorts + ((members + far) % size < longer)) * each, latency)


def _push(entered: FloatArray, seconds_to: Callable[[int], FloatArray], latency: float) -> GroupTimes:
    """Everyone sends to the next member first, to the one before it last, and then waits for all."""
    now, sent = entered.copy(), np.zeros(len(entered))
    last = np.full(len(entered), -np.inf)
    for far in range(1, len(entered)):
        seconds = seconds_to(far)
        now += seconds
        sent += seconds
        np.maximum(last, np.roll(now + latency, far), out=last)
    left = np.maximum(now, last)
    return GroupTimes(left, sent, left - now)


def _ring(entered: FloatArray, slots: FloatArray, shifts: tuple[int, ...], latency: float) -> GroupTimes:
    """Slots go around, once for each shift: a member first sends the slot so many places before its own number."""
    now, sent, waited = entered.copy(), np.zeros(len(entered)), np.zeros(len(entered))
    for shift in shifts:
        for turn in range(len(entered) - 1):
            seconds = np.roll(slots, turn + shift)
            now += seconds
            sent += seconds
            arrived = np.maximum(now, np.roll(now + latency, 1))
            waited += arrived - now
            now = arrived
    return GroupTimes(now, sent, waited)
