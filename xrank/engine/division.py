"""Division of a plan among ranks: the windows that each makes, and the source records that several of them read.

The work is done in rounds of some files each, so that the files of earlier rounds survive a failure. In a round all
ranks make nearly equally many bytes: each one contiguous stretch of the windows, also inside files. If ranks hold the
source in their own memories, a window goes to the rank with most of its bytes, at equal loads; windows of which several
ranks hold equally much, such as those of columns or replicas, go to the rank with the least work.
The division follows from the plan alone: ranks with equal plans divide it equally, without messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
from msgspec import Struct

from xrank import dtypes
from xrank.engine import windows
from xrank.engine.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.engine.windows import BoolArray
from xrank.layout.nest_table import IntArray

_NEARLY = 0.9
"""Fraction of the most bytes of a window on any rank; a rank with that much is near to the window."""
_MOST_PERCENT = 105
"""Most windows of a rank, in percent of the mean."""
_MOST_PLACES = 1 << 20
"""A tensor in more (window, rank) places than this is not near to any rank: its pieces are thin slices."""


def assign_makers(files: Sequence[FilePlan], starts: Sequence[int], holder: IntArray, num_ranks: int) -> IntArray:
    """Return the rank that makes each window; all ranks make nearly equally many.

    Args:
        files: the windows' files.
        starts: number of each file's first window, and the number of windows at the end.
        holder: by source record, the rank that holds it.
        num_ranks: number of ranks.
    """
    makers = np.full(starts[-1], -1, np.int64)
    loads = np.zeros(num_ranks, np.int64)
    for low, high, near in _runs(files, starts, holder, num_ranks):
        # One contiguous part for each near rank.
        step = -(-(high - low) // len(near))
        for start in range(low, high, step):
            rank = int(near[loads[near].argmin()])  # the lowest of equals
            stop = min(start + step, high)
            makers[start:stop] = rank
            loads[rank] += stop - start
    _even_out(makers, loads)
    return makers


def _runs(
    files: Sequence[FilePlan], starts: Sequence[int], holder: IntArray, num_ranks: int
) -> Iterator[tuple[int, int, IntArray]]:
    """Yield (first window, one past the last, near ranks) of runs of windows with the same near ranks."""
    everyone = np.arange(num_ranks)
    for file, start, stop in zip(files, starts, starts[1:], strict=False):
        window, rank = _find_near_ranks(file, stop - start, holder, num_ranks)
        counts = np.bincount(window, minlength=stop - start)
        firsts = np.cumsum(counts) - counts
        # A run ends where the number of near ranks changes, or one of them.
        is_new = np.append(True, counts[1:] != counts[:-1])[: stop - start]
        before = firsts[window - 1] + np.arange(len(window)) - firsts[window]
        compared = ~is_new[window]
        is_new[window[compared][rank[compared] != rank[before[compared]]]] = True
        for low, high in pairwise((*np.flatnonzero(is_new).tolist(), stop - start)):
            near = rank[firsts[low] : firsts[low] + counts[low]]
            yield start + low, start + high, near if len(near) else everyone


def _find_near_ranks(file: FilePlan, num_windows: int, holder: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Return (window, rank) for all near ranks of each window of a file, by rising window, then rank."""
    held = [_measure_held(tensor, holder, num_ranks) for tensor in file.tensors]
    none = np.empty(0, np.int64)
    keys, nbytes = (np.concatenate([none, *column]) for column in zip(*held, strict=True)) if held else (none, none)
    # Several tensors may be in one window: equal keys are added up.
    order = np.argsort(keys, kind="stable")  # fast on rising runs
    keys = keys[order]
    firsts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])[: len(keys)])
    sums = np.add.reduceat(nbytes[order], firsts) if len(firsts) else none
    keys = keys[firsts]
    window, rank = keys // num_ranks, keys % num_ranks
    most = np.zeros(num_windows, np.int64)
    np.maximum.at(most, window, sums)
    is_near = sums >= _NEARLY * most[window]
    return window[is_near], rank[is_near]


def _measure_held(tensor: TensorPlan, holder: IntArray, num_ranks: int) -> tuple[IntArray, IntArray]:
    """Return (window * ranks + rank, bytes) for all pieces of a tensor; holes are spread evenly."""
    output, width = tensor.output, dtypes.dtype(tensor.output.dtype).nbytes
    found = []
    for copies in (tensor.copies, tensor.replicas):
        start, end = (output.offset + side * width for side in (copies.nests.y, copies.nests.y_ends))
        low, high = start // windows.WINDOW_NBYTES, (end - 1) // windows.WINDOW_NBYTES
        counts = high - low + 1
        if counts.sum() > _MOST_PLACES:
            continue
        piece = np.repeat(np.arange(len(copies)), counts)
        window = low[piece] + np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        inside = np.minimum(end[piece], (window + 1) * windows.WINDOW_NBYTES)
        inside -= np.maximum(start[piece], window * windows.WINDOW_NBYTES)
        share = copies.nests.sizes * width / np.maximum(1, end - start)
        found.append((window * num_ranks + holder[copies.record[piece]], (inside * share[piece]).astype(np.int64)))
    none = np.empty(0, np.int64)
    return np.concatenate([none, *(keys for keys, _ in found)]), np.concatenate([none, *(nb for _, nb in found)])


def _even_out(makers: IntArray, loads: IntArray) -> None:
    """Move the last windows of overloaded ranks to those with the fewest."""
    mean, most = len(makers) // len(loads), -(-_MOST_PERCENT * len(makers) // (100 * len(loads)))
    surplus = np.concatenate([np.flatnonzero(makers == rank)[most:] for rank in range(len(loads))])
    # In the order of the files, so a rank receives windows that follow each other.
    surplus.sort()
    done = 0
    kept = np.minimum(loads, most)
    while done < len(surplus):
        rank = int(kept.argmin())
        # Up to the mean at once: one window at a time would deal neighbours out to all ranks in turn.
        count = max(1, mean - int(kept[rank]))
        makers[surplus[done : done + count]] = rank
        kept[rank] += count
        done += count


ROUND_NBYTES = 2 << 30
"""Bytes of a round for each rank: after each, the ranks wait for the slowest."""


class Round(Struct, frozen=True):
    """Files that are made together."""

    files: tuple[int, ...]
    shares: tuple[Mapping[int, tuple[range, ...]], ...]
    """By rank: file -> ranges of its windows that the rank makes, rising; files without any are left out."""


class Division(Struct, frozen=True, eq=False):
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
