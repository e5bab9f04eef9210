"""Many nests as one table of arrays, small enough for plans of a million shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.layout.nests import Nest

IntArray: TypeAlias = npt.NDArray[np.int64]


def int_array(values: Iterable[int] | Sequence[int]) -> IntArray:
    """Return the values as an array of int64."""
    return np.fromiter(values, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class NestTable:
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
        return cls(
            int_array(nest.x for nest in nests),
            int_array(nest.y for nest in nests),
            np.array(rows, dtype=np.int64).reshape(len(nests), depth, 3),
        )

    def __len__(self) -> int:
        return len(self.x)

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
