"""The rank that makes each window of a source in ranks' memories: the one with most of its bytes, at equal loads.

Bytes that a rank does not hold come from another, perhaps over a network. Windows of which several ranks hold equally
much, such as those of columns or replicas, go to the rank with the least work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from xrank import dtypes
from xrank.layout.nest_table import IntArray
from xrank.plan import windows
from xrank.plan.planner import FilePlan, TensorPlan

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
