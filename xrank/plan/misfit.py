"""Misfits: the first elements of a tensor that are not held exactly once, in words, and the ranks that hold them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest
from xrank.plan.coverage import contains, range_text
from xrank.plan.planner import divided

__all__ = ["Misfit", "find_misfit"]


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first elements, in row-major order, that are not held exactly once."""

    kind: str
    """``"gap"``, ``"overlap"`` or ``"outside"``."""
    where: str
    """The elements' range, in words."""
    ranks: tuple[int, ...] = ()
    """Who holds them, rising; nobody holds a gap."""


def find_misfit(held: Sequence[tuple[tuple[int, ...], tuple[Nest, ...]]], shape: tuple[int, ...]) -> Misfit | None:
    """Return the first elements that are not held exactly once; nests with equal y sides are replicas, and count once.

    Args:
        held: ranks, and the nests that each of them holds; y is the row-major address in the tensor.
        shape: the tensor's global shape.
    """
    rows = [(ranks[0], nest) for ranks, nests in held for nest in nests]
    table = NestTable.of([nest for _, nest in rows])
    _, _, fault = divided(int_array(rank for rank, _ in rows), table, math.prod(shape))
    if fault is None:
        return None
    at = fault.address
    if fault.kind == "gap":
        later = [first for _, nest in rows if (first := _first_from(nest, at)) is not None]
        return Misfit("gap", range_text(shape, at, min(later, default=math.prod(shape)) - 1))
    holders = [(ranks, nest) for ranks, nests in held for nest in nests if contains(nest, at)]
    ranks = tuple(sorted({rank for having, _ in holders for rank in having}))
    if fault.kind == "outside":
        return Misfit("outside", f"address {at:,} of {math.prod(shape):,}", ranks)
    return Misfit("overlap", range_text(shape, at, min(_run_end(nest, at) for _, nest in holders)), ranks)


def _first_from(nest: Nest, address: int) -> int | None:
    """Return the first y address at or after one that a nest pairs."""
    loops = sorted(((n, stride) for n, _, stride in nest.loops), key=lambda loop: -loop[1])

    def first(start: int, depth: int) -> int | None:
        if address <= start:
            return start
        if depth == len(loops):
            return None
        n, stride = loops[depth]
        step = min((address - start) // stride, n - 1)
        found = [first(start + i * stride, depth + 1) for i in (step, step + 1) if i < n]
        return min((each for each in found if each is not None), default=None)

    return first(nest.y, 0)


def _run_end(nest: Nest, address: int) -> int:
    """Return the last y address of the run without a break that an address stands in."""
    run = 1
    outer: list[tuple[int, int]] = []
    for n, stride in sorted(((n, stride) for n, _, stride in nest.loops), key=lambda loop: loop[1]):
        if stride == run and not outer:
            run *= n
        else:
            outer.append((n, stride))
    place = address - nest.y
    for n, stride in reversed(outer):
        place -= min(place // stride, n - 1) * stride
    return address - place + run - 1
