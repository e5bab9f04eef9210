"""Misfits: the first elements of a tensor that are not held exactly once, and the ranks that hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from xrank.layout.mesh_parts import MeshParts
from xrank.layout.nests import Nest
from xrank.plan.coverage import contains, range_text
from xrank.plan.planner import divide_pieces


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first elements, in row-major order, that are not held exactly once."""

    kind: str
    """``"gap"``, ``"overlap"`` or ``"outside"``."""
    where: str
    """The elements' range, in words."""
    ranks: tuple[int, ...] = ()
    """Ranks that hold them, by rising number; empty for a gap."""


def find_misfit(parts: MeshParts, shape: tuple[int, ...]) -> Misfit | None:
    """Return the first elements that are not held exactly once; nests with equal y sides are replicas, and count once.

    Args:
        parts: the part of each rank; y is the row-major address in the tensor.
        shape: the tensor's global shape.
    """
    _, _, fault = divide_pieces(parts.first_ranks[parts.owner], parts.nests, math.prod(shape))
    if fault is None:
        return None
    at = fault.address
    if fault.kind == "gap":
        nests = (parts.nests[int(row)] for row in np.flatnonzero(parts.nests.y_ends > at))
        later = [first for nest in nests if (first := _first_from(nest, at)) is not None]
        return Misfit("gap", range_text(shape, at, min(later, default=math.prod(shape)) - 1))
    near = np.flatnonzero((parts.nests.y <= at) & (parts.nests.y_ends > at))
    holding = [int(row) for row in near if contains(parts.nests[int(row)], at)]
    ranks = tuple(parts.ranks[np.isin(parts.part, parts.owner[holding])].tolist())
    if fault.kind == "outside":
        return Misfit("outside", f"address {at:,} of {math.prod(shape):,}", ranks)
    end = min(_run_end(parts.nests[row], at) for row in holding)
    return Misfit("overlap", range_text(shape, at, end), ranks)


def _first_from(nest: Nest, address: int) -> int | None:
    """Return the first y address of a nest at or after `address`."""
    loops = sorted(((n, stride) for n, _, stride in nest.loops), key=lambda loop: -loop[1])

    def first(start: int, depth: int) -> int | None:
        if address <= start:
            return start
        if depth == len(loops):
            return None
        n, stride = loops[depth]
        step = min((address - start) // stride, n - 1)
        # The last iteration that begins before the address may end before it; then the next one is first.
        found = [first(start + i * stride, depth + 1) for i in (step, step + 1) if i < n]
        return min((each for each in found if each is not None), default=None)

    return first(nest.y, 0)


def _run_end(nest: Nest, address: int) -> int:
    """Return the last y address of the contiguous run that contains an address."""
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
