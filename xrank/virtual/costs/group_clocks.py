"""Times at which the members of a large group leave a collective, computed for all members at once with arrays.

The steps are those of `xrank.virtual.collectives` and the timing rules those of `xrank.virtual.costs.link_model`, for
collectives that every member leaves only after all have entered. A group of g members exchanges g(g-1) messages or
more, too many to simulate one by one for thousands of members.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.virtual.collectives import ALWAYS_PUSH, ROOTED
from xrank.virtual.costs.group_traffic import flat_nbytes, part_nbytes
from xrank.virtual.programs.program import Communicate

FloatArray: TypeAlias = npt.NDArray[np.float64]


class GroupTimes(NamedTuple):
    """Times of each member, in the group's order, in seconds."""

    left: FloatArray
    """Time at which the member leaves."""
    sent: FloatArray
    """Time spent sending."""
    waited: FloatArray
    """Time spent waiting for others."""


def waits_for_all(collective: str) -> bool:
    """Return whether every member needs data of every other, as `group_times` assumes."""
    return collective not in ROOTED


def group_times(
    instruction: Communicate, algorithm: str, entered: FloatArray, latency: float, bandwidth: float
) -> GroupTimes:
    """Compute when the members leave a collective.

    Args:
        instruction: the instruction of any member.
        algorithm: ``"push"`` or ``"ring"``.
        entered: time at which each member enters, in the group's order.
        latency: seconds per message.
        bandwidth: bytes per second of each sender.
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
    # As numpy.array_split cuts: the first `longer` parts have one element of the dim more.
    shorts, longer = np.divmod(lengths, size)
    each = whole / np.maximum(lengths, 1)
    members = np.arange(size)
    return _push(entered, lambda far: (shorts + ((members + far) % size < longer)) * each, latency)


def _push(entered: FloatArray, seconds_to: Callable[[int], FloatArray], latency: float) -> GroupTimes:
    """Each member sends to the next member first and to the previous one last, then waits for all."""
    now, sent = entered.copy(), np.zeros(len(entered))
    last = np.full(len(entered), -np.inf)
    for far in range(1, len(entered)):
        seconds = seconds_to(far)
        now += seconds
        sent += seconds
        # The roll moves each sender's arrival time to its receiver.
        np.maximum(last, np.roll(now + latency, far), out=last)
    left = np.maximum(now, last)
    return GroupTimes(left, sent, left - now)


def _ring(entered: FloatArray, slots: FloatArray, shifts: tuple[int, ...], latency: float) -> GroupTimes:
    """Slots go around once per shift; a member first sends the slot `shift` places before its own number."""
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
