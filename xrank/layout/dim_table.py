"""Compile dims for many places of a mesh at once: `xrank.layout.dim_part` in arrays.

Rules and results are the same for each place. Only the bounds of cuts are computed one by one, by the same function,
once per size and place along the cutting axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import TypeAlias

import numpy as np

from xrank.layout.dim_part import check_limits, cut_bounds, evaluate_count
from xrank.layout.nest_rows import join_rows, product_rows, restrict_rows, rows_of
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.notation import MAX_SIZE, Count, Flat, Node, Pad, Parts, Product, Size, Split

PlaceArrays: TypeAlias = Mapping[str, tuple[int, IntArray]]
"""Axis -> (its length, the coordinate of each place along it)."""


@dataclass(frozen=True, slots=True, eq=False)
class DimTable:
    """One dim compiled for n places; each as in `DimPart`."""

    global_size: int
    local_sizes: IntArray
    """Local size at each place, [n]."""
    owner: IntArray
    """The place of each nest, rising."""
    nests: NestTable


def compile_places(dim: Node, sizes: Mapping[str, int], places: PlaceArrays, num_places: int) -> DimTable:
    """Compile one dim for all of these places.

    Args:
        dim: the dim.
        sizes: the numbers of its names.
        places: the coordinates along at least the axes that cut it.
        num_places: number of places.

    Raises:
        LayoutError: as `compile_dim`, for at least one place.
    """
    match dim:
        case Size(value):
            return whole_table(value if isinstance(value, int) else sizes[value], num_places)
        case Product(factors):
            return product_table((compile_places(each, sizes, places, num_places) for each in factors), num_places)
        case Parts(parts):
            return _end_to_end([compile_places(part.of, sizes, places, num_places) for part in parts])
        case Pad(of, multiple):
            return _pad(compile_places(of, sizes, places, num_places), multiple, sizes)
        case Split(of, axis):
            return _cut(dim, compile_places(of, sizes, places, num_places), *places[axis], sizes)
        case Flat(members, multiple):
            compiled = [
                product_table((compile_places(each, sizes, places, num_places) for each in member.dims), num_places)
                for member in members
            ]
            whole = _end_to_end(compiled)
            return whole if multiple is None else _pad(whole, multiple, sizes)


def whole_table(size: int, num_places: int) -> DimTable:
    """Return a dim that all places hold whole."""
    num_nests = num_places if size else 0
    zeros = np.zeros(num_nests, dtype=np.int64)
    loops = np.empty((num_nests, int(size > 1), 3), dtype=np.int64)
    loops[:] = (size, 1, 1)
    return DimTable(size, np.full(num_places, size), np.arange(num_nests), NestTable(zeros, zeros, loops))


def take_places(table: DimTable, chosen: IntArray) -> DimTable:
    """Return the table of the chosen places, in that order and with repeats."""
    rows, owner = rows_of(table.owner, chosen, len(table.local_sizes))
    return DimTable(table.global_size, table.local_sizes[chosen], owner, table.nests.take(rows))


def product_table(tables: Iterable[DimTable], num_places: int) -> DimTable:
    """Multiply index spaces of the same places, major first; without tables the result has one index."""
    found = list(tables)
    return reduce(_times, found) if found else whole_table(1, num_places)


def _times(major: DimTable, minor: DimTable) -> DimTable:
    num_places = len(major.local_sizes)
    counts = [np.bincount(table.owner, minlength=num_places) for table in (major, minor)]
    global_size = major.global_size * minor.global_size
    # Before the arrays are multiplied: numpy's int64 overflows without an error.
    largest = _largest(prod, major.local_sizes, minor.local_sizes)
    check_limits(global_size, largest, int((counts[0] * counts[1]).max(initial=0)))
    minor_rows, major_rows = rows_of(minor.owner, major.owner, num_places)
    owner = major.owner[major_rows]
    pairs = major.nests.take(major_rows), minor.nests.take(minor_rows)
    nests = product_rows(*pairs, minor.local_sizes[owner], minor.global_size)
    return DimTable(global_size, major.local_sizes * minor.local_sizes, owner, nests)


def _end_to_end(tables: Sequence[DimTable]) -> DimTable:
    local_sizes = [table.local_sizes for table in tables]
    global_size = sum(table.global_size for table in tables)
    num_nests = sum(np.bincount(table.owner, minlength=len(local_sizes[0])) for table in tables)
    check_limits(global_size, _largest(sum, *local_sizes), int(np.max(num_nests, initial=0)))
    before, shifted = np.zeros_like(tables[0].local_sizes), []
    start = 0
    for table in tables:
        nests = table.nests
        shifted.append(NestTable(nests.x + before[table.owner], nests.y + start, nests.loops))
        before = before + table.local_sizes
        start += table.global_size
    owner = np.concatenate([table.owner for table in tables])
    # Stable, so a place's nests keep the order of the parts, as in `dim_part`.
    order = np.argsort(owner, kind="stable")
    return DimTable(global_size, before, owner[order], join_rows(shifted).take(order))


def _pad(table: DimTable, multiple: Count, sizes: Mapping[str, int]) -> DimTable:
    step = evaluate_count(multiple, sizes)
    local_sizes = np.empty_like(table.local_sizes)
    # In Python's integers, which cannot overflow; there are only a few different sizes.
    for size, rows in _group_by_value(table.local_sizes):
        padded = -(-size // step) * step
        check_limits(table.global_size, padded, 0)
        local_sizes[rows] = padded
    return DimTable(table.global_size, local_sizes, table.owner, table.nests)


def _cut(split: Split, inner: DimTable, length: int, at: IntArray, sizes: Mapping[str, int]) -> DimTable:
    low, high = np.empty_like(at), np.empty_like(at)
    # Ranks far outnumber the different sizes and places, so each pair is cut once.
    for size, rows in _group_by_value(inner.local_sizes):
        bounds = np.zeros((length, 2), dtype=np.int64)
        for place in dict.fromkeys(at[rows].tolist()):
            bounds[place] = cut_bounds(split, size, length, place, sizes)
        low[rows], high[rows] = bounds[at[rows]].T
    rows, nests = restrict_rows(inner.nests, low[inner.owner], high[inner.owner])
    owner = inner.owner[rows]
    check_limits(inner.global_size, 0, int(np.bincount(owner).max(initial=0)))
    return DimTable(inner.global_size, high - low, owner, NestTable(nests.x - low[owner], nests.y, nests.loops))


def _group_by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each value with its rows, in the order of first occurrence."""
    for value in dict.fromkeys(values.tolist()):
        yield value, np.flatnonzero(values == value)


def _largest(combined: Callable[[Iterable[int]], int], *sizes: IntArray) -> int:
    """Return the largest sum or product of a row, which may be too large for an array."""
    # The largest values bound every row; only a bound beyond the limit makes a look at each row necessary.
    most = combined([int(each.max(initial=0)) for each in sizes])
    return most if most <= MAX_SIZE else max(map(combined, zip(*(each.tolist() for each in sizes), strict=True)))
