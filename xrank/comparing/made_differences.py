"""Finds the differences of two tensors of one plan, copied or computed: makes both once more, stretch by stretch."""

from __future__ import annotations

from xrank import dtypes
from xrank.plan.budget import Budget
from xrank.plan.decoding import open_source
from xrank.plan.differences import Differences
from xrank.plan.executor import execute
from xrank.plan.planner import Plan, TensorPlan, select_tensors
from xrank.plan.windows import WINDOW_NBYTES

_STRETCH = 4
"""Number of windows of each copy that are in memory at a time."""


class _Stretch:
    """A target that holds the same part of two files."""

    def __init__(self) -> None:
        self.start = 0
        self.rooms = [memoryview(bytearray(_STRETCH * WINDOW_NBYTES)) for _ in range(2)]

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Copy bytes to `offset` of a file, inside the part."""
        at = offset - self.start
        self.rooms[file][at : at + len(data)] = data


def find_differences(plan: Plan, ours: TensorPlan, theirs: TensorPlan, budget: Budget) -> Differences:
    """Return the differences of two tensors of a plan, of one element type and shape."""
    plan = select_tensors(plan, (ours, theirs))
    dtype, nbytes = ours.output.dtype, ours.output.nbytes
    target, found = _Stretch(), Differences(dtype)
    source = open_source(plan.source)
    try:
        for start in range(0, nbytes, _STRETCH * WINDOW_NBYTES):
            stop = min(start + _STRETCH * WINDOW_NBYTES, nbytes)
            windows = range(start // WINDOW_NBYTES, -(-stop // WINDOW_NBYTES))
            target.start = start
            execute(plan, source, target, budget=budget, shares={0: (windows,), 1: (windows,)})
            mine, other = (room[: stop - start] for room in target.rooms)
            found.add(start // dtypes.dtype(dtype).nbytes, mine, other)
    finally:
        source.close()
    return found
