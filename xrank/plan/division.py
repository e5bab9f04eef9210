"""Division of a plan among ranks: the windows that each makes, and the source records that several of them read.

The work is done in rounds of some files each, so that the files of earlier rounds survive a failure. In a round all
ranks make nearly equally many bytes: each one contiguous stretch of the windows, also inside files, or, if ranks hold
the source in their own memories, mostly windows whose bytes they hold.
The division follows from the plan alone: ranks with equal plans divide it equally, without messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from xrank import dtypes
from xrank.layout.nest_table import IntArray
from xrank.plan import windows
from xrank.plan.checksums import BoolArray
from xrank.plan.makers import assign_makers
from xrank.plan.planner import Copies, Plan, TensorPlan

ROUND_NBYTES = 2 << 30
"""Bytes of a round for each rank: after each, the ranks wait for the slowest."""


@dataclass(frozen=True, slots=True)
class Round:
    """Files that are made together."""

    files: tuple[int, ...]
    shares: tuple[Mapping[int, tuple[range, ...]], ...]
    """By rank: file -> ranges of its windows that the rank makes, rising; files without any are left out."""


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """A plan's unfinished files in rounds, and the ranks that read each source record."""

    rounds: tuple[Round, ...]
    first_rank: IntArray
    """By record: the lowest rank that reads it; the number of ranks if none does."""
    last_rank: IntArray
    """By record: the highest rank that reads it; -1 if none does."""
    last_round: IntArray
    """By record: the last round in which a rank reads it; -1 if none does."""

    @property
    def left_open(self) -> BoolArray:
        """Mask of the records that several ranks read, so that none of them can check one alone."""
        return self.first_rank < self.last_rank

    def find_own_records(self, rank: int, number: int) -> list[int]:
        """Return the records that this rank alone reads, for the last time in that round."""
        mine = (self.first_rank == rank) & (self.last_rank == rank) & (self.last_round == number)
        return [int(record) for record in np.flatnonzero(mine)]

    def find_open_records(self, number: int) -> list[int]:
        """Return the records that several ranks read, for the last time in that round."""
        return [int(record) for record in np.flatnonzero(self.left_open & (self.last_round == number))]


def divide(
    plan: Plan,
    files: Sequence[int],
    num_ranks: int,
    *,
    holder: IntArray | None = None,
    round_nbytes: int | None = None,
    units: Mapping[int, int] | None = None,
) -> Division:
    """Divide a plan's files among ranks.

    Args:
        plan: the whole plan.
        files: indices of the files to make, in order.
        num_ranks: number of ranks.
        holder: by record, the rank that holds it; None if the source is files, which all ranks read equally well.
        round_nbytes: bytes of a round for each rank; `ROUND_NBYTES` if None.
        units: by file, the bytes of which a multiple is the beginning of every rank's stretch, itself a multiple of a
            window; a window for files that are not among them.
    """
    num_records = len(plan.source.records)
    first, last, last_round = (np.full(num_records, value, np.int64) for value in (num_ranks, -1, -1))
    rounds = []
    least = num_ranks * (ROUND_NBYTES if round_nbytes is None else round_nbytes)
    for number, group in enumerate(group_files(plan, files, least)):
        counts = [-(-plan.files[index].output.nbytes // windows.WINDOW_NBYTES) for index in group]
        starts = [0, *accumulate(counts)]
        if holder is None:
            makers = np.arange(starts[-1]) * num_ranks // max(1, starts[-1])
        else:
            makers = assign_makers([plan.files[index] for index in group], starts, holder, num_ranks)
        for index, start, stop in zip(group, starts, starts[1:], strict=False):
            unit = (units or {}).get(index, windows.WINDOW_NBYTES) // windows.WINDOW_NBYTES
            if unit > 1:  # the maker of a unit's first window makes all of it
                makers[start:stop] = np.repeat(makers[start:stop:unit], unit)[: stop - start]
        rounds.append(Round(tuple(group), _shares(group, starts, makers, num_ranks)))
        for index, start in zip(group, starts, strict=False):
            for tensor in plan.files[index].tensors:
                for copies in tensor.read:
                    lowest, highest = _readers(tensor, copies, start, makers, is_rising=holder is None)
                    # `at`: several pieces may be in one record, and an assignment would keep only the last rank.
                    np.minimum.at(first, copies.record, lowest)
                    np.maximum.at(last, copies.record, highest)
                    last_round[copies.record] = number
    return Division(tuple(rounds), first, last, last_round)


def _shares(
    group: Sequence[int], starts: Sequence[int], makers: IntArray, num_ranks: int
) -> tuple[Mapping[int, tuple[range, ...]], ...]:
    """Return by rank its windows of each file; the i-th file of the group has the windows from starts[i] on."""
    shares: list[dict[int, list[range]]] = [{} for _ in range(num_ranks)]
    for index, start, stop in zip(group, starts, starts[1:], strict=False):
        changes = np.flatnonzero(np.diff(makers[start:stop])) + 1
        for low, high in pairwise((0, *changes.tolist(), stop - start)):
            shares[int(makers[start + low])].setdefault(index, []).append(range(low, high))
    return tuple({index: tuple(ranges) for index, ranges in share.items()} for share in shares)


def group_files(plan: Plan, files: Sequence[int], least_nbytes: int) -> Iterator[list[int]]:
    """Yield consecutive groups of the files, each of at least that many bytes but for the last."""
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


def _readers(
    tensor: TensorPlan, copies: Copies, start: int, makers: IntArray, *, is_rising: bool
) -> tuple[IntArray, IntArray]:
    """Return, for each piece, the lowest and the highest rank that may read it; `start` is its file's first window.

    A piece with holes is taken for one without: a rank too many costs a message, one too few breaks the proof.
    """
    output = tensor.output
    width = dtypes.dtype(output.dtype).nbytes
    lows, ends = copies.nests.y * width, copies.nests.y_ends * width
    # Factors of an update are read whole, whichever windows of the tensor a rank makes.
    if copies is not tensor.copies and copies is not tensor.replicas:
        lows, ends = np.zeros_like(lows), np.full_like(ends, output.nbytes)
    low = start + (output.offset + lows) // windows.WINDOW_NBYTES
    # A factor without bytes would end in the window before its first.
    high = np.maximum(low, start + (output.offset + ends - 1) // windows.WINDOW_NBYTES)
    if is_rising or not len(low):
        return makers[low], makers[high]
    # Minimum and maximum of each range; reduceat needs a valid index as the end of the last one.
    borders, padded = np.stack((low, high + 1), axis=1).ravel(), np.append(makers, makers[-1])
    return np.minimum.reduceat(padded, borders)[::2], np.maximum.reduceat(padded, borders)[::2]
