"""Pieces of a tensor as rectangles of a matrix, whose elements lie at even distances in a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

_Loop = tuple[int, int, int]
"""Count, stride in the record, and stride in the matrix, as of a nest."""


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """Rows and columns at even distances; element (i, j) is at ``x + i * x_row + j * x_column`` of the record."""

    x: int
    row: int
    num_rows: int
    row_step: int
    x_row: int
    column: int
    num_columns: int
    column_step: int
    x_column: int


def cut_matrix_tiles(x: int, y: int, loops: Sequence[_Loop], columns: int) -> Iterator[MatrixTile]:
    """Yield the rectangles of a nest from a record (x) to a row-major matrix (y) of so many columns."""
    across = [loop for loop in loops if loop[2] % columns]
    down = [loop for loop in loops if not loop[2] % columns]
    column = y % columns
    if column + sum((n - 1) * ys for n, _, ys in across) < columns:
        yield from _make_tiles(x, y, down, across, columns)
    elif len(across) == 1 and columns % across[0][2] == 0:
        yield from _cut_at_rows(x, y, down, across[0], columns)
    else:  # loops that cross the ends of rows in another way
        n, xs, ys = across[0]
        for i in range(n):
            yield from cut_matrix_tiles(x + i * xs, y + i * ys, [*down, *across[1:]], columns)


def _cut_at_rows(x: int, y: int, down: Sequence[_Loop], run: _Loop, columns: int) -> Iterator[MatrixTile]:
    """Yield the rectangles of a run over several rows: its first row, whole ones, and its last row."""
    n, xs, ys = run
    width = columns // ys
    head = min(n, -(-(columns - y % columns) // ys)) % width
    middle, tail = divmod(n - head, width)
    if head:
        yield from _make_tiles(x, y, down, [(head, xs, ys)], columns)
    x, y = x + head * xs, y + head * ys
    if middle:
        yield from _make_tiles(x, y, [(middle, width * xs, columns), *down], [(width, xs, ys)], columns)
    if tail:
        x, y = x + middle * width * xs, y + middle * columns
        yield from _make_tiles(x, y, down, [(tail, xs, ys)], columns)


def _make_tiles(x: int, y: int, down: Sequence[_Loop], across: Sequence[_Loop], columns: int) -> Iterator[MatrixTile]:
    """Yield one tile for each step of all loops but the longest one in either direction."""
    row_loop, rows = _take_longest(down)
    column_loop, others = _take_longest(across)
    for at in product(*(range(n) for n, _, _ in (*rows, *others))):
        steps = list(zip(at, (*rows, *others), strict=True))
        here, there = x + sum(i * xs for i, (_, xs, _) in steps), y + sum(i * ys for i, (_, _, ys) in steps)
        yield MatrixTile(
            here,
            there // columns,
            row_loop[0],
            row_loop[2] // columns,
            row_loop[1],
            there % columns,
            column_loop[0],
            column_loop[2],
            column_loop[1],
        )


def _take_longest(loops: Sequence[_Loop]) -> tuple[_Loop, list[_Loop]]:
    if not loops:
        return (1, 0, 0), []
    at = max(range(len(loops)), key=lambda i: loops[i][0])
    return loops[at], [loop for i, loop in enumerate(loops) if i != at]
