"""Runs: the bytes that fill a tensor as spans of two processes' memory, in as few calls of the kernel as possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xrank.layout.nest_table import IntArray, NestTable
from xrank.lending.peer_memory import MAX_SPANS, SpanArray

_CALL_NBYTES = 8 << 20
"""Bytes of one call at most: threads share the calls, and look for failures between two of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Runs of bytes; arrays of one length."""

    there: IntArray
    """Address in the other process."""
    here: IntArray
    """Address in this process."""
    nbytes: IntArray

    @property
    def total_nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.nbytes.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of one process_vm_readv(2)."""

    there: SpanArray
    here: SpanArray
    nbytes: int


def mean_run_nbytes(nests: NestTable, width: int) -> float:
    """Return the mean length of the runs that `find_runs` would return, before they are joined."""
    return int(nests.sizes.sum()) * width / max(1, int(count_runs(nests).sum()))


def count_runs(nests: NestTable) -> IntArray:
    """Return the number of runs of each nest, before they are joined."""
    return nests.sizes // np.maximum(1, _run_lengths(nests)[1])


def find_runs(nests: NestTable, width: int) -> Runs:
    """Return the runs of nests from one record (x) to one tensor (y), as byte offsets.

    Args:
        nests: canonical; addresses in elements.
        width: bytes of an element.
    """
    depth, lengths = _run_lengths(nests)
    nest, there, here = np.arange(len(nests)), nests.x, nests.y
    for level in range(int(depth.max(initial=0))):
        n, xs, ys = nests.loops[nest, level].T
        n = np.where(level < depth[nest], n, 1)
        each = np.repeat(np.arange(len(nest)), n)
        step = np.arange(len(each)) - (np.cumsum(n) - n)[each]
        nest, there, here = nest[each], there[each] + step * xs[each], here[each] + step * ys[each]
    return Runs(there * width, here * width, lengths[nest] * width)


def _run_lengths(nests: NestTable) -> tuple[IntArray, IntArray]:
    """Return the number of loops outside each nest's runs, and the elements of a run."""
    rows = np.arange(len(nests))
    depth = (nests.loops[:, :, 0] != 1).sum(axis=1)
    lengths = np.ones(len(nests), np.int64)
    if nests.loops.shape[1]:
        inner = nests.loops[rows, np.maximum(depth - 1, 0)]
        is_run = (depth > 0) & (inner[:, 1] == 1) & (inner[:, 2] == 1)
        lengths = np.where(is_run, inner[:, 0], 1)
        depth = depth - is_run
    return depth, lengths


def join_runs(parts: Sequence[Runs]) -> Runs:
    """Return all runs of one other process by rising address there; runs that continue each other become one."""
    there, here, nbytes = (np.concatenate([getattr(part, name) for part in parts]) for name in Runs.__slots__)
    order = np.argsort(there, kind="stable")
    there, here, nbytes = there[order], here[order], nbytes[order]
    is_first = np.ones(len(there), bool)
    is_first[1:] = (there[1:] != there[:-1] + nbytes[:-1]) | (here[1:] != here[:-1] + nbytes[:-1])
    first = np.flatnonzero(is_first)
    return Runs(there[first], here[first], np.add.reduceat(nbytes, first) if len(first) else nbytes)


def cut_calls(runs: Runs) -> Iterator[Call]:
    """Yield the calls that copy all runs, in order.

    Either side of a call is joined by itself: rows of a matrix that become columns elsewhere are one span here, and
    many there.
    """
    runs = _split_long(runs)
    ends = np.cumsum(runs.nbytes)
    begin = 0
    while begin < len(runs.nbytes):
        limit = (ends[begin - 1] if begin else 0) + _CALL_NBYTES
        end = min(begin + MAX_SPANS, int(np.searchsorted(ends, limit, side="right")))
        end = max(end, begin + 1)
        nbytes = runs.nbytes[begin:end]
        there, here = _join_side(runs.there[begin:end], nbytes), _join_side(runs.here[begin:end], nbytes)
        yield Call(there, here, int(nbytes.sum()))
        begin = end


def _split_long(runs: Runs) -> Runs:
    """Cut runs that are longer than a call."""
    counts = -(-runs.nbytes // _CALL_NBYTES)
    if (counts <= 1).all():
        return runs
    owner = np.repeat(np.arange(len(counts)), counts)
    skip = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * _CALL_NBYTES
    nbytes = np.minimum(_CALL_NBYTES, runs.nbytes[owner] - skip)
    return Runs(runs.there[owner] + skip, runs.here[owner] + skip, nbytes)


def _join_side(addresses: IntArray, nbytes: IntArray) -> SpanArray:
    is_first = np.ones(len(addresses), bool)
    is_first[1:] = addresses[1:] != addresses[:-1] + nbytes[:-1]
    first = np.flatnonzero(is_first)
    return np.ascontiguousarray(np.stack((addresses[first], np.add.reduceat(nbytes, first)), axis=1)).astype(np.uint64)
