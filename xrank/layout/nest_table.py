"""Tables of nests, and the operations of `xrank.layout.nests` on whole tables, in a few array operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank.layout.nests import Nest, canonical

IntArray: TypeAlias = npt.NDArray[np.int64]


def int_array(values: Iterable[int] | Sequence[int]) -> IntArray:
    """Return the values as an array of int64."""
    return np.fromiter(values, dtype=np.int64)


class NestTable(Struct, frozen=True, eq=False):
    """n nests, one per row; x and y in elements, as in `Nest`."""

    x: IntArray
    """First x address of each nest; shape [n]."""
    y: IntArray
    """First y address of each nest; shape [n]."""
    loops: IntArray
    """Shape [n, k, 3]: (count, x stride, y stride); a row with fewer than k loops ends in (1, 0, 0)."""

    @classmethod
    def from_nests(cls, nests: Sequence[Nest]) -> NestTable:
        """Convert nests to a table, in their order."""
        depth = max((len(nest.loops) for nest in nests), default=0)
        filler = ((1, 0, 0),)
        rows = [nest.loops + filler * (depth - len(nest.loops)) for nest in nests]
        loops = np.array(rows, dtype=np.int64).reshape(len(nests), depth, 3)
        return cls(int_array(nest.x for nest in nests), int_array(nest.y for nest in nests), loops)

    @classmethod
    def in_order(cls, num_elements: int) -> NestTable:
        """Return the single nest of a row of elements in order; no nest if the row is empty.

        Example:
            >>> NestTable.in_order(6).to_nests(), len(NestTable.in_order(0))
            ([Nest(x=0, y=0, loops=((6, 1, 1),))], 0)
        """
        return cls.from_nests([canonical(Nest(0, 0, ((num_elements, 1, 1),)))] if num_elements else [])

    def __len__(self) -> int:
        return len(self.x)

    def to_nests(self) -> list[Nest]:
        """Return all nests, in order."""
        rows = zip(self.x.tolist(), self.y.tolist(), self.loops.tolist(), strict=True)
        return [Nest(x, y, tuple((n, xs, ys) for n, xs, ys in loops if n != 1)) for x, y, loops in rows]

    def __getitem__(self, row: int) -> Nest:
        loops = tuple((n, xs, ys) for n, xs, ys in self.loops[row].tolist() if n != 1)
        return Nest(int(self.x[row]), int(self.y[row]), loops)

    def take(self, rows: IntArray) -> NestTable:
        """Return the table with these rows, in that order."""
        return NestTable(self.x[rows], self.y[rows], self.loops[rows])

    def with_depth(self, depth: int) -> NestTable:
        """Return the same nests padded to `depth` loops per row; tables of equal depth can be concatenated."""
        if self.loops.shape[1] == depth:
            return self
        filler = np.broadcast_to(int_array((1, 0, 0)), (len(self), depth - self.loops.shape[1], 3))
        return NestTable(self.x, self.y, np.concatenate((self.loops, filler), axis=1))

    def swap(self) -> NestTable:
        """Return the nests with x and y exchanged; the loops keep their order."""
        return NestTable(self.y, self.x, self.loops[:, :, [0, 2, 1]])

    @property
    def sizes(self) -> IntArray:
        """Number of elements that each nest pairs; shape [n]."""
        return np.asarray(self.loops[:, :, 0].prod(axis=1), dtype=np.int64)

    @property
    def y_ends(self) -> IntArray:
        """The address after the last y address of each nest; shape [n]."""
        reach = (self.loops[:, :, 0] - 1) * self.loops[:, :, 2]
        return np.asarray(self.y + reach.sum(axis=1) + 1, dtype=np.int64)


def rows_of(owner: IntArray, chosen: IntArray, num_owners: int) -> tuple[IntArray, IntArray]:
    """Return the rows of the chosen owners, one owner after the other: (row numbers, indices into `chosen`).

    The rows' owners rise; the chosen ones may repeat, in any order.
    """
    counts = np.bincount(owner, minlength=num_owners)
    starts = np.cumsum(counts) - counts
    counts = counts[chosen]
    at = np.repeat(np.arange(len(chosen)), counts)
    ends = np.cumsum(counts)
    # `ends - counts` is an owner's first row in the result, `starts` its first row in the table.
    return np.arange(len(at)) + (starts[chosen] - ends + counts)[at], at


def canonical_rows(nests: NestTable) -> NestTable:
    """Make all rows canonical; loops of several iterations must already be sorted by falling x stride."""
    loops = nests.loops
    kept = np.zeros_like(loops)
    kept[:, :, 0] = 1
    if not loops.shape[1]:
        return nests
    rows = np.arange(len(loops))
    last = np.full(len(loops), -1)
    for column in range(loops.shape[1]):
        loop = loops[:, column]
        real = loop[:, 0] != 1
        outer = kept[rows, last]  # without a previous loop: a single iteration, which never joins
        reach = loop[:, 0] * loop[:, 1], loop[:, 0] * loop[:, 2]
        joins = real & (outer[:, 0] != 1) & (outer[:, 1] == reach[0]) & (outer[:, 2] == reach[1])
        last += real & ~joins
        merged = loop.copy()
        merged[:, 0] = np.where(joins, outer[:, 0] * loop[:, 0], loop[:, 0])
        kept[rows[real], last[real]] = merged[real]
    return NestTable(nests.x, nests.y, _trim(kept))


def product_rows(major: NestTable, minor: NestTable, local_sizes: IntArray, global_size: int) -> NestTable:
    """Return the products of nests of two spaces, row by row; each index of the major one counts a whole minor space.

    Each row's minor space has its local size, and all have the same global size.
    """
    loops = major.loops.copy()
    # Each major stride covers the whole minor space, so the joined strides fall, as `canonical_rows` expects.
    loops[:, :, 1] *= local_sizes[:, None]
    loops[:, :, 2] *= global_size
    x, y = major.x * local_sizes + minor.x, major.y * global_size + minor.y
    return canonical_rows(NestTable(x, y, np.concatenate((loops, minor.loops), axis=1)))


def restrict_rows(nests: NestTable, low: IntArray, high: IntArray) -> tuple[IntArray, NestTable]:
    """Return the parts of canonical, nested rows with x in [low, high) of their row, as `restrict` does.

    The first array has the row of each part, rising; the parts of one row are sorted by rising x.
    """
    rows = np.arange(len(nests))
    x, y, loops = nests.x, nests.y, nests.loops
    found: list[tuple[IntArray, IntArray, IntArray, IntArray]] = []
    # One pass for each loop, over all rows at once: the edges of a split go on to the next pass, one loop shorter.
    while len(rows):
        spans = 1 + ((loops[:, :, 0] - 1) * loops[:, :, 1]).sum(axis=1)
        first_x, last_x = low[rows], high[rows]
        is_inside = (first_x <= x) & (x + spans <= last_x)
        found.append((rows[is_inside], x[is_inside], y[is_inside], loops[is_inside]))
        is_cut = ~is_inside & (x < last_x) & (x + spans > first_x)
        rows, x, y, loops, first_x, last_x = (each[is_cut] for each in (rows, x, y, loops, first_x, last_x))
        if not len(rows):
            break
        # A row that is neither inside nor outside has a loop of several iterations to split: the first one.
        n, xs, ys = loops[:, 0].T
        inner = loops[:, 1:]
        inner_span = 1 + ((inner[:, :, 0] - 1) * inner[:, :, 1]).sum(axis=1)
        first = np.maximum(0, (first_x - x - inner_span) // xs + 1)
        last = np.minimum(n - 1, (last_x - 1 - x) // xs)
        whole_first = np.maximum(first, -((x - first_x) // xs))
        whole_last = np.minimum(last, (last_x - x - inner_span) // xs)
        count = whole_last - whole_first + 1
        # A middle of one iteration drops its loop, so that the result is canonical.
        for is_middle, middle in ((count > 1, loops), (count == 1, inner)):
            kept = middle[is_middle]
            if middle is loops:
                kept[:, 0, 0] = count[is_middle]
            step = whole_first[is_middle]
            start_x = x[is_middle] + step * xs[is_middle]
            found.append((rows[is_middle], start_x, y[is_middle] + step * ys[is_middle], kept))
        # The loops are nested, so each edge is a single iteration.
        edge = np.maximum(whole_last + 1, whole_first)
        sides = ((first, first < np.minimum(whole_first, last + 1)), (edge, edge <= last))
        cut = [(rows[there], (x + step * xs)[there], (y + step * ys)[there], inner[there]) for step, there in sides]
        rows, x, y, loops = (np.concatenate(each) for each in zip(*cut, strict=True))
    if not found:
        return rows, nests
    table = join_rows([NestTable(x, y, loops) for _, x, y, loops in found])
    rows = np.concatenate([each[0] for each in found])
    # The passes find a row's middle before its edges.
    order = np.lexsort((table.x, rows))
    return rows[order], table.take(order)


def join_rows(tables: Sequence[NestTable]) -> NestTable:
    """Concatenate tables, padded to the same number of loops."""
    depth = max(table.loops.shape[1] for table in tables)
    x, y = np.concatenate([table.x for table in tables]), np.concatenate([table.y for table in tables])
    return NestTable(x, y, _trim(np.concatenate([table.with_depth(depth).loops for table in tables])))


def _trim(loops: IntArray) -> IntArray:
    """Return loops without trailing columns of single iterations."""
    depth = loops.shape[1]
    while depth and (loops[:, depth - 1, 0] == 1).all():
        depth -= 1
    return loops[:, :depth]


def count_runs(nests: NestTable) -> IntArray:
    """Return the number of runs of each nest, before they are joined."""
    return nests.sizes // np.maximum(1, run_lengths(nests)[1])


def run_lengths(nests: NestTable) -> tuple[IntArray, IntArray]:
    """Return the number of loops outside each nest's runs, and the elements of a run."""
    depth = (nests.loops[:, :, 0] != 1).sum(axis=1)
    lengths = np.ones(len(nests), np.int64)
    if nests.loops.shape[1]:
        inner = nests.loops[np.arange(len(nests)), np.maximum(depth - 1, 0)]
        is_run = (depth > 0) & (inner[:, 1] == 1) & (inner[:, 2] == 1)
        lengths = np.where(is_run, inner[:, 0], 1)
        depth = depth - is_run
    return depth, lengths
