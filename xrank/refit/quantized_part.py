"""A trainer rank's quantised tensors: it measures and encodes its own elements, with the scales of whole tensors.

Ranks that hold parts of one block exchange their maxima of it, by reading each other's memory. Nothing else is
exchanged: a block that lies on one rank takes no exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np
import numpy.typing as npt

from xrank.decisions.quantization import BlockGrid, Quantization
from xrank.errors import UsageError
from xrank.layout.nest_table import IntArray, NestTable
from xrank.plan.planner import Copies, TensorPlan
from xrank.refit.matrix_tiles import MatrixTile, cut_matrix_tiles

if TYPE_CHECKING:
    import torch

_CHUNK_ELEMENTS = 1 << 19
"""Elements that are measured or encoded at once."""

Maxima: TypeAlias = npt.NDArray[np.float32]
Box: TypeAlias = tuple[int, int, int, int]
"""First and end row, first and end column of blocks."""
ReadMaxima: TypeAlias = Callable[[int, int, int], Maxima]
"""Position of a rank, first number and count in its maxima -> the numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A tensor of which this rank quantises a part."""

    name: str
    grid: BlockGrid
    box: Box
    """Blocks that have elements on this rank, and blocks between them."""
    start: int
    """Position of their maxima in this rank's."""
    needed: Box
    """Blocks whose scales this rank needs."""
    shared: tuple[tuple[int, int, Box], ...]
    """Position, start of its maxima, and blocks of each other rank that has elements of these."""
    pieces: tuple[tuple[int, MatrixTile], ...]
    """View of this rank, and a rectangle in it."""
    owns_scales: bool
    """Whether this rank lends the scales of the whole tensor."""


def plan_quantized(
    tensors: Sequence[TensorPlan], quantization: Quantization, holder: IntArray, position: int
) -> tuple[list[QuantizedTensor], int]:
    """Return the quantised tensors of which a rank has a part, and the number of its maxima.

    Args:
        tensors: the plans of all of the model's tensors; a plan covers its whole tensor.
        quantization: the quantization.
        holder: record -> position of the rank that holds it.
        position: this rank's.

    Raises:
        UsageError: a tensor's values are changed under its Hugging Face name, or it is tied to another one.
    """
    filled = np.zeros(max(int(holder.max(initial=0)), position) + 1, np.int64)
    first = int(np.searchsorted(holder, position))
    found = []
    for one in tensors:
        name, shape = one.output.name, one.output.shape
        if not quantization.applies_to(name, one.source_dtype, shape):
            continue
        _check_plain(one)
        grid = quantization.find_grid(shape)
        holders, boxes = _find_boxes([one.copies, one.replicas], holder, grid)
        sizes = (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])
        starts = filled[holders]
        filled[holders] += sizes
        at = np.flatnonzero(holders == position)
        if not len(at):
            continue
        owner = int(holders[crc32(name.encode()) % len(holders)])
        box = _as_box(boxes[at[0]])
        needed = (0, grid.shape[0], 0, grid.shape[1]) if owner == position else box
        primary = set(np.unique(holder[one.copies.record]).tolist()) - {position}
        others = [
            (int(other), int(start), _as_box(its))
            for other, start, its in zip(holders, starts, boxes, strict=True)
            if int(other) in primary and _meet(needed, _as_box(its))
        ]
        pieces = _cut_pieces(one, holder, position, first, grid.columns)
        found.append(
            QuantizedTensor(
                name, grid, box, int(starts[at[0]]), needed, tuple(others), tuple(pieces), owner == position
            )
        )
    return found, int(filled[position])


class QuantizedPart:
    """Measures and encodes this rank's elements at each step.

    Args:
        quantization: the quantization.
        tensors: of `plan_quantized`.
        maxima: this rank's maxima, which the other ranks read.
        views: this rank's tensors.
        codes: view -> its quantised elements, which are lent.
        scales: name -> the scales of a whole tensor, which are lent; of the tensors that own them.
    """

    def __init__(
        self,
        quantization: Quantization,
        tensors: Sequence[QuantizedTensor],
        maxima: Maxima,
        views: Sequence[torch.Tensor],
        codes: Mapping[int, torch.Tensor],
        scales: Mapping[str, torch.Tensor],
    ) -> None:
        self._quantization, self._tensors, self._maxima = quantization, tensors, maxima
        self._views, self._codes, self._scales = views, codes, scales

    def measure(self) -> None:
        """Fill the maxima from the present values."""
        self._maxima[:] = 0
        for tensor in self._tensors:
            into = _select(self._maxima, tensor.start, tensor.box)
            for view, tile in tensor.pieces:
                for part in _cut_rows(tile):
                    rows, columns = _find_blocks(part, tensor.grid)
                    _raise_maxima(into, tensor.box, rows, columns, _take(self._views[view], part))

    def encode(self, read: ReadMaxima) -> None:
        """Fill the codes and scales from the present values and all ranks' maxima.

        Raises:
            ContradictionError: a value is not finite.
        """
        import torch

        for tensor in self._tensors:
            maxima = torch.from_numpy(self._join_maxima(tensor, read))
            scales, factors = self._quantization.find_scales(tensor.name, maxima)
            if tensor.owns_scales:
                lent = self._scales[tensor.name]
                lent.copy_(scales.view(lent.shape))
            for view, tile in tensor.pieces:
                for part in _cut_rows(tile):
                    rows, columns = _find_blocks(part, tensor.grid)
                    at = (
                        torch.from_numpy(rows - tensor.needed[0])[:, None],
                        torch.from_numpy(columns - tensor.needed[2]),
                    )
                    values = _take(self._views[view], part)
                    codes = self._quantization.encode(values, factors[at].to(values.device))
                    _take(self._codes[view], part).copy_(codes)

    def _join_maxima(self, tensor: QuantizedTensor, read: ReadMaxima) -> Maxima:
        """Return the maxima of the blocks that the tensor needs, over all ranks."""
        r0, r1, c0, c1 = tensor.needed
        joined = np.zeros((r1 - r0, c1 - c0), np.float32)
        _raise_box(joined, tensor.needed, _select(self._maxima, tensor.start, tensor.box), tensor.box)
        for position, start, box in tensor.shared:
            theirs = read(position, start, _count(box)).reshape(box[1] - box[0], box[3] - box[2])
            _raise_box(joined, tensor.needed, theirs, box)
        return joined


def _check_plain(one: TensorPlan) -> None:
    if one.changed or one.update is not None or one.tied:
        raise UsageError(
            f"{one.output.name} cannot be quantised part by part",
            tensor=one.output.name,
            got="a tensor that is tied to another one" if one.tied else "a recipe that changes its values",
            want="a tensor whose values are those of the ranks",
            next_step="name it in keep of the Quantization, or give a function as transform=, which gets whole tensors",
        )


def _find_boxes(parts: Sequence[Copies], holder: IntArray, grid: BlockGrid) -> tuple[IntArray, IntArray]:
    """Return the positions of the ranks that hold elements, and the blocks between the first and the last of each."""
    owners = np.concatenate([holder[part.record] for part in parts])
    boxes = np.concatenate([_find_nest_boxes(part.nests, grid) for part in parts])
    holders, at = np.unique(owners, return_inverse=True)
    found = np.empty((len(holders), 4), np.int64)
    found[:, (0, 2)], found[:, (1, 3)] = np.iinfo(np.int64).max, 0
    for side, ufunc in enumerate((np.minimum, np.maximum, np.minimum, np.maximum)):
        column = found[:, side].copy()
        ufunc.at(column, at, boxes[:, side])
        found[:, side] = column
    return holders, found


def _find_nest_boxes(nests: NestTable, grid: BlockGrid) -> IntArray:
    """Return first and end row, first and end column of the blocks of each nest."""
    n, ys = nests.loops[:, :, 0], nests.loops[:, :, 2]
    column = nests.y % grid.columns
    across = np.where(ys % grid.columns != 0, (n - 1) * ys, 0).sum(axis=1)
    last = nests.y + ((n - 1) * ys).sum(axis=1)
    is_inside = column + across < grid.columns
    return np.stack(
        (
            _row_blocks(nests.y // grid.columns, grid),
            _row_blocks(last // grid.columns, grid) + 1,
            np.where(is_inside, column, 0) // grid.block_columns,
            np.where(is_inside, column + across, grid.columns - 1) // grid.block_columns + 1,
        ),
        axis=1,
    )


def _cut_pieces(
    one: TensorPlan, holder: IntArray, position: int, first: int, columns: int
) -> Iterator[tuple[int, MatrixTile]]:
    for part in (one.copies, one.replicas):
        for row in np.flatnonzero(holder[part.record] == position).tolist():
            nest = part.nests[row]
            for tile in cut_matrix_tiles(nest.x, nest.y, nest.loops, columns):
                yield int(part.record[row]) - first, tile


def _cut_rows(tile: MatrixTile) -> Iterator[MatrixTile]:
    """Yield the tile in parts of a bounded number of elements."""
    step = max(1, _CHUNK_ELEMENTS // tile.num_columns)
    for low in range(0, tile.num_rows, step):
        yield replace(
            tile,
            x=tile.x + low * tile.x_row,
            row=tile.row + low * tile.row_step,
            num_rows=min(step, tile.num_rows - low),
        )


def _find_blocks(tile: MatrixTile, grid: BlockGrid) -> tuple[IntArray, IntArray]:
    """Return the row of blocks of each row, and the column of blocks of each column."""
    rows = tile.row + np.arange(tile.num_rows, dtype=np.int64) * tile.row_step
    columns = tile.column + np.arange(tile.num_columns, dtype=np.int64) * tile.column_step
    return _row_blocks(rows, grid), columns // grid.block_columns


def _row_blocks(rows: IntArray, grid: BlockGrid) -> IntArray:
    matrix: IntArray = rows // grid.rows
    row: IntArray = rows % grid.rows
    return matrix * grid.block_rows_of_matrix + row // grid.block_rows


def _take(tensor: torch.Tensor, tile: MatrixTile) -> torch.Tensor:
    """Return the elements of a tile, in place if the tensor's are in a row."""
    flat = tensor.contiguous()
    return flat.as_strided(
        (tile.num_rows, tile.num_columns), (tile.x_row, tile.x_column), flat.storage_offset() + tile.x
    )


def _raise_maxima(into: Maxima, box: Box, rows: IntArray, columns: IntArray, values: torch.Tensor) -> None:
    """Raise maxima of blocks to the magnitudes of values, whose blocks are these."""
    import torch

    row_starts, column_starts = _run_starts(rows), _run_starts(columns)
    ends = [*column_starts[1:], len(columns)]
    by_block = [
        values[:, low:high].abs().amax(dim=1) for low, high in zip(column_starts, ends, strict=True)
    ]  # of rows, before those of a block of rows are joined
    largest = torch.stack(by_block, dim=1).float().cpu().numpy()
    largest = np.maximum.reduceat(largest, row_starts, axis=0)
    at = np.ix_(rows[row_starts] - box[0], columns[column_starts] - box[2])
    into[at] = np.maximum(into[at], largest)


def _run_starts(blocks: IntArray) -> list[int]:
    """Return the first index of each run of equal numbers."""
    return [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist()]


def _raise_box(into: Maxima, region: Box, values: Maxima, box: Box) -> None:
    """Raise maxima of a region of blocks to those of a box, where they meet."""
    r0, r1 = max(region[0], box[0]), min(region[1], box[1])
    c0, c1 = max(region[2], box[2]), min(region[3], box[3])
    if r0 < r1 and c0 < c1:
        part = into[r0 - region[0] : r1 - region[0], c0 - region[2] : c1 - region[2]]
        np.maximum(part, values[r0 - box[0] : r1 - box[0], c0 - box[2] : c1 - box[2]], out=part)


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _count(box: Box) -> int:
    return (box[1] - box[0]) * (box[3] - box[2])


def _as_box(row: IntArray) -> Box:
    return int(row[0]), int(row[1]), int(row[2]), int(row[3])


def _select(maxima: Maxima, start: int, box: Box) -> Maxima:
    return maxima[start : start + _count(box)].reshape(box[1] - box[0], box[3] - box[2])
