"""Layouts told as plain lists: what each rank holds, rank by rank."""

from __future__ import annotations

import math

from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import LocalPart, local_part
from xrank.layout.nests import addresses

PAD = -1
"""Stands for a local element of padding."""


def compiled(text: str, grid: str, shape: tuple[int, ...], **sizes: int) -> list[LocalPart | None]:
    """Return the local part of every rank of a grid, by rising rank."""
    mesh = DeviceMesh.parse_grid(grid)
    layout = TensorLayout.parse(text, mesh)
    return [local_part(layout, mesh, mesh.coordinate(rank), shape, sizes=sizes) for rank in mesh.ranks]


def elements(part: LocalPart) -> list[int]:
    """Return the global address of every local element, in local order."""
    held = [PAD] * math.prod(part.shape)
    for nest in part.nests:
        for x, y in addresses(nest):
            assert held[x] == PAD
            held[x] = y
    return held


def held(text: str, grid: str, shape: tuple[int, ...], **sizes: int) -> list[list[int] | None]:
    """Return the global addresses that every rank holds; None for a rank that the layout leaves out."""
    return [None if part is None else elements(part) for part in compiled(text, grid, shape, **sizes)]


def rows(text: str, grid: str, shape: tuple[int, ...], **sizes: int) -> list[int]:
    """Return how long the first dim is on every rank."""
    return [part.shape[0] for part in compiled(text, grid, shape, **sizes)]


def ranges(text: str, grid: str, shape: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return the ranges of global addresses that every rank holds, for parts that are whole ranges."""
    found = []
    for part in compiled(text, grid, shape):
        assert all(len(nest.loops) < 2 and nest.loops[0][1:] == (1, 1) for nest in part.nests)
        found.append([(nest.y, nest.y + nest.loops[0][0]) for nest in part.nests])
    return found
