"""Pieces of a part of a tensor from pieces of the whole: both sides' nests share the tensor's addresses."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, intersect, swap


def compose(pieces: NestTable, part: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    """Return the pieces of a part, sorted by y: for each its row in `pieces` and its nest.

    Args:
        pieces: x is an address in a record, y in the tensor.
        part: canonical; x is an address in the part, y in the tensor.

    Returns:
        Rows, and nests from the records' addresses to the part's.

    Raises:
        LayoutError: two cuts have strides that do not divide each other, and would make too many pieces.
    """
    return _compose(_Pieces(pieces), part)


class _Pieces:
    """A table as a cache key: a model has some dozens of distinct ones at most."""

    def __init__(self, table: NestTable) -> None:
        self.table = table
        self._key = (table.x.tobytes(), table.y.tobytes(), table.loops.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pieces) and self._key == other._key


@lru_cache(maxsize=1024)
def _compose(pieces: _Pieces, part: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    starts, ends = pieces.table.y, pieces.table.y_ends
    found: list[tuple[int, Nest]] = []
    for nest in part:
        to_part = swap(nest)
        end = nest.y + sum((n - 1) * ys for n, _, ys in nest.loops) + 1
        # Only pieces whose address range meets the nest's can intersect it.
        for row in np.flatnonzero((starts < end) & (ends > nest.y)).tolist():
            found += [(row, piece) for piece in intersect(pieces.table[row], to_part)]
    # They were found piece by piece of the source; `Copies` has them by rising destination.
    found.sort(key=lambda item: item[1].y)
    return int_array(row for row, _ in found), NestTable.from_nests([nest for _, nest in found])
