"""How ranks share a plan: which of them makes which windows, and which source records more than one of them reads.

The work goes in rounds of some files each, so that files become finished, and survive a failure, long before all is
done. In a round each rank makes one contiguous stretch of the windows, all of nearly as many bytes, inside files too.
Everything here follows from the plan alone: ranks with equal plans divide it equally, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from xrank import dtypes
from xrank.layout.nest_table import IntArray
from xrank.plan import windows
from xrank.plan.checksums import BoolArray
from xrank.plan.planner import Copies, Plan, TensorPlan

__all__ = ["ROUND_NBYTES", "Division", "Round", "divide"]

ROUND_NBYTES = 2 << 30
"""Bytes of a round for each rank: after each, the ranks wait for the slowest."""


@dataclass(frozen=True, slots=True)
class Round:
    """Files that are made together."""

    files: tuple[int, ...]
    shares: tuple[Mapping[int, range], ...]
    """By rank: file -> the windows that it makes; files without any are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan's unfinished files in rounds, and who reads each source record."""

    rounds: tuple[Round, ...]
    first_rank: IntArray
    """By record: the lowest rank that reads of it; the number of ranks where none does."""
    last_rank: IntArray
    """By record: the highest rank that reads of it; -1 where none does."""
    last_round: IntArray
    """By record: the round after which nobody reads of it; -1 where none does."""

    @property
    def left_open(self) -> BoolArray:
        """Which records no rank alone can check."""
        return self.first_rank < self.last_rank

    def own_records(self, rank: int, number: int) -> list[int]:
        """Return the records that this rank alone reads, and for the last time in that round."""
        mine = (self.first_rank == rank) & (self.last_rank == rank) & (self.last_round == number)
        return [int(record) for record in np.flatnonzero(mine)]

    def open_records(self, number: int) -> list[int]:
        """Return the records that several ranks read, and for the last time in that round."""
        return [int(record) for record in np.flatnonzero(self.left_open & (self.last_round == number))]


def divide(plan: Plan, files: Sequence[int], num_ranks: int, *, round_nbytes: int | None = None) -> Division:
    """Divide a plan's files among ranks.

    Args:
        plan: the whole plan.
        files: indices of the files that are to be made, in order.
        num_ranks: among how many.
        round_nbytes: bytes of a round for each rank; `ROUND_NBYTES` if None.
    """
    num_records = len(plan.source.records)
    first, last, last_round = (np.full(num_records, value, np.int64) for value in (num_ranks, -1, -1))
    rounds = []
    least = num_ranks * (ROUND_NBYTES if round_nbytes is None else round_nbytes)
    for number, group in enumerate(_groups(plan, files, least)):
        counts = [-(-plan.files[index].output.nbytes // windows.WINDOW_NBYTES) for index in group]
        starts = [0, *accumulate(counts)]
        borders = [starts[-1] * rank // num_ranks for rank in range(num_ranks + 1)]
        shares = tuple(
            {
                index: range(low - start, high - start)
                for index, start, count in zip(group, starts, counts, strict=False)
                if (low := max(start, borders[rank])) < (high := min(start + count, borders[rank + 1]))
            }
            for rank in range(num_ranks)
        )
        rounds.append(Round(tuple(group), shares))
        for index, start in zip(group, starts, strict=False):
            for tensor in plan.files[index].tensors:
                for copies in tensor.read:
                    lowest, highest = _readers(tensor, copies, start, borders)
                    np.minimum.at(first, copies.record, lowest)
                    np.maximum.at(last, copies.record, highest)
                    last_round[copies.record] = number
    return Division(tuple(rounds), first, last, last_round)


def _groups(plan: Plan, files: Sequence[int], least_nbytes: int) -> Iterator[list[int]]:
    """Yield the files, so many at a time that they have so many bytes."""
    group: list[int] = []
    nbytes = 0
    for index in files:
        group.append(index)
        nbytes += plan.files[index].output.nbytes
        if nbytes >= least_nbytes:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _readers(tensor: TensorPlan, copies: Copies, start: int, borders: Sequence[int]) -> tuple[IntArray, IntArray]:
    """Return, for each piece, the lowest and the highest rank that may read of it; `start` is its file's first window.

    A piece with holes is taken for one without: a rank too many costs a message, one too few would cost the proof.
    """
    output = tensor.output
    width = dtypes.dtype(output.dtype).nbytes
    lows, ends = copies.nests.y * width, copies.nests.y_ends * width
    if copies is not tensor.copies and copies is not tensor.replicas:  # of an update: all of it, wherever it is needed
        lows, ends = np.zeros_like(lows), np.full_like(ends, output.nbytes)
    low = start + (output.offset + lows) // windows.WINDOW_NBYTES
    high = start + (output.offset + ends - 1) // windows.WINDOW_NBYTES
    # A border that several ranks share belongs to the last of them: the others have nothing.
    return (
        np.searchsorted(borders, low, side="right") - 1,
        np.searchsorted(borders, np.maximum(low, high), side="right") - 1,
    )
