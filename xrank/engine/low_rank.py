"""Low-rank updates: whole tensors to which a product of two small ones is added, W + scale * (B @ A).

This is the only operation on elements that is not a copy. It is computed some thousand elements at a time, in float32
(float64 if W is), in a fixed order: products for k = 0, 1, … are summed one after the other, scaled and added to W, and
only the result is rounded to the output's type. A matrix library may choose the order by its version, its threads and
the borders of windows; with a fixed order the same input gives the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank import dtypes
from xrank.engine.casts import copy_cast

_Array: TypeAlias = npt.NDArray[Any]

_BLOCK = 1 << 15
"""Elements computed at a time: sum and product of float32 stay in a core's own cache."""


class LowRank(Struct, frozen=True):
    """An update of a tensor by two other tensors of the source, A [r, n] and B [m, r]."""

    a: str
    """Name of the source's tensor A."""
    b: str
    scale: float
    is_transposed: bool = False
    """Whether the transpose of B @ A is added: to an embedding, or a weight stored [in, out]."""
    num_blocks: int = 1
    """Number of matrices in the updated tensor, such as experts: A [blocks * r, n] has the rows of one after the other,
    B [m, r * blocks] the columns of all for each of the r."""
    start: int = 0
    """Row-major address of the output's first element in the updated tensor; an output may be a part of it."""


class Factors(Struct, frozen=True, eq=False):
    """A and B as they are multiplied, block by block: `left` [blocks, rows, r] @ `right` [blocks, r, columns]."""

    left: _Array
    right: _Array
    scale: float
    start: int = 0
    """Address of the output's first element in the tensor of all blocks."""


def read_factors(
    a: memoryview, a_dtype: str, b: memoryview, b_dtype: str, num_rows: int, update: LowRank, *, kind: str
) -> Factors:
    """Return the factors in these bytes, converted to the element type `kind`; `num_rows` is A's."""
    wide = dtypes.numpy_dtype(kind)
    count = update.num_blocks
    rank = num_rows // count
    found_a = np.frombuffer(a, dtypes.numpy_dtype(a_dtype)).reshape(count, rank, -1).astype(wide)
    found_b = np.frombuffer(b, dtypes.numpy_dtype(b_dtype)).reshape(-1, rank, count).transpose(2, 0, 1).astype(wide)
    left, right = (found_b, found_a) if not update.is_transposed else (found_a.swapaxes(1, 2), found_b.swapaxes(1, 2))
    return Factors(np.ascontiguousarray(left), np.ascontiguousarray(right), update.scale, update.start)


def add_low_rank(
    stored: memoryview, dtype: str, factors: Factors, low: int, target: memoryview, target_dtype: str
) -> None:
    """Write elements of a tensor, with the product of the factors added, to `target`.

    Args:
        stored: the tensor's elements from address `low` on, as the source stores them.
        dtype: element type of `stored`.
        factors: factors of the whole tensor.
        low: row-major address of the first element.
        target: receives as many elements.
        target_dtype: element type of `target`.

    Raises:
        CastOverflowError: a finite sum has no finite counterpart in the target type.
    """
    kind = factors.left.dtype
    values = np.frombuffer(stored, dtypes.numpy_dtype(dtype))
    width = dtypes.dtype(target_dtype).nbytes
    sums, products = np.empty((2, _BLOCK), kind)
    rows, columns = factors.left.shape[1], factors.right.shape[2]
    for start, whole_row, num_rows, column, num_columns in _blocks(low + factors.start, len(values), rows, columns):
        count = num_rows * num_columns
        total, product = (room[:count].reshape(num_rows, num_columns) for room in (sums, products))
        block, row = divmod(whole_row, rows)
        left = factors.left[block, row : row + num_rows]
        right = factors.right[block, :, column : column + num_columns]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(left[:, :1], right[0], out=total)
            for k in range(1, len(right)):
                np.multiply(left[:, k : k + 1], right[k], out=product)
                np.add(total, product, out=total)
            np.multiply(total, kind.type(factors.scale), out=total)
            flat = sums[:count]
            np.add(flat, values[start : start + count].astype(kind), out=flat)
        copy_cast(
            flat.data.cast("B"),
            "F64" if kind == np.float64 else "F32",
            target[start * width : (start + count) * width],
            target_dtype,
            0,
            ((count, 1, 1),),
        )


def _blocks(low: int, num_elements: int, num_rows: int, num_columns: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (first element here, row, rows, column, columns) of consecutive rectangles of matrices on one another."""
    start = 0
    while start < num_elements:
        row, column = divmod(low + start, num_columns)
        left = num_elements - start
        if column or left < num_columns or num_columns >= _BLOCK:
            rows, columns = 1, min(num_columns - column, left, _BLOCK)
        else:
            rows, columns = min(left // num_columns, _BLOCK // num_columns, num_rows - row % num_rows), num_columns
        yield start, row, rows, column, columns
        start += rows * columns
