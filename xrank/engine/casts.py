"""Strided copies between typed views of bytes, with or without a cast, and the tiles that a copy is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank import dtypes
from xrank.layout.nests import Loop, Nest

SMALLEST_DENSITY = 4
"""Most bytes that a tile reads, as a multiple of the wanted ones."""


class Tile(NamedTuple):
    """A read of elements [start, start + length) of the source; loops select those that go to `target` and after."""

    start: int
    length: int
    target: int
    loops: tuple[Loop, ...]
    """(count, source stride, target stride), by falling source stride."""

    @property
    def is_dense(self) -> bool:
        """Whether every element of the read is wanted."""
        return prod(n for n, _, _ in self.loops) == self.length


def cut_tiles(nest: Nest, max_elements: int) -> Iterator[Tile]:
    """Cut a nest (x = source, y = target) into tiles that span at most `max_elements` of the source each."""
    loops = sorted(nest.loops, key=lambda loop: -loop[1])
    inner: list[Loop] = []
    span = wanted = 1
    chunked: Loop | None = None
    while loops:
        n, xs, ys = loops[-1]
        whole = (n - 1) * xs + span
        if whole <= max_elements and whole <= SMALLEST_DENSITY * wanted * n:
            inner.insert(0, loops.pop())
            span, wanted = whole, wanted * n
            continue
        # The loop does not fit whole: take as many iterations at a time as fit, if they are dense enough.
        step = (max_elements - span) // xs + 1
        if step > 1 and (step - 1) * xs + span <= SMALLEST_DENSITY * wanted * step:
            chunked = (step, xs, ys)
        break
    for indices in product(*(range(n) for n, _, _ in (loops[:-1] if chunked else loops))):
        # Not strict: a chunked loop is the last one, and `indices` leaves it out.
        x = nest.x + sum(i * xs for i, (_, xs, _) in zip(indices, loops, strict=False))
        y = nest.y + sum(i * ys for i, (_, _, ys) in zip(indices, loops, strict=False))
        if chunked is None:
            yield Tile(x, span, y, tuple(inner))
            continue
        step, xs, ys = chunked
        total = loops[-1][0]
        for i in range(0, total, step):
            n = min(step, total - i)
            yield Tile(x + i * xs, (n - 1) * xs + span, y + i * ys, ((n, xs, ys), *inner))


Array: TypeAlias = npt.NDArray[Any]

_UNSIGNED: dict[int, np.dtype[Any]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}
_EXPONENT = {
    "F16": (np.uint16, np.int16, 0x7C00),
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F32": (np.uint32, np.int32, 0x7F800000),
}
"""By type: integers of its width without and with a sign, and the bits of its exponent."""


class CastOverflowError(Exception):
    """A finite value would become infinite by a cast."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = value


def _view_strided(data: memoryview, dtype: np.dtype[Any], offset: int, loops: tuple[Loop, ...], side: int) -> Array:
    """Return a view of bytes with a dim for each loop; `side` (1 or 2) selects the loops' strides, in elements."""
    width = dtype.itemsize
    shape = tuple(loop[0] for loop in loops)
    strides = tuple(loop[side] * width for loop in loops)
    return np.ndarray(shape, dtype, data, offset * width, strides)


def copy_same(source: memoryview, target: memoryview, target_offset: int, loops: tuple[Loop, ...], width: int) -> None:
    """Copy elements of `width` bytes: from the start of `source` by stride 1 of each loop to `target` by stride 2."""
    source_view, target_view = _wide_views(source, target, target_offset, loops, width)
    np.copyto(target_view, source_view)


def count_different(
    source: memoryview, target: memoryview, target_offset: int, loops: tuple[Loop, ...], width: int
) -> int:
    """Return how many elements differ in their bytes between the two sides of the copy that `copy_same` would make."""
    source_view, target_view = _wide_views(source, target, target_offset, loops, width)
    # Replicas are nearly always equal: compare in wide integers, and count elements only after a difference.
    if np.array_equal(source_view, target_view):
        return 0
    source_view, target_view = _typed_views(source, target, target_offset, loops, width)
    return int(np.count_nonzero(source_view != target_view))


def _typed_views(
    source: memoryview, target: memoryview, target_offset: int, loops: tuple[Loop, ...], width: int
) -> tuple[Array, Array]:
    kind = _UNSIGNED[width]
    return _view_strided(source, kind, 0, loops, 1), _view_strided(target, kind, target_offset, loops, 2)


def _wide_views(
    source: memoryview, target: memoryview, target_offset: int, loops: tuple[Loop, ...], width: int
) -> tuple[Array, Array]:
    """Return both views as the widest integers that runs, strides and offset allow: fewer, faster moves."""
    if loops and loops[-1][1:] == (1, 1):
        for factor in (8 // width, 4 // width, 2 // width):
            if factor > 1 and target_offset % factor == 0 and loops[-1][0] % factor == 0:
                outer = loops[:-1]
                if all(xs % factor == 0 and ys % factor == 0 for _, xs, ys in outer):
                    wide = (*((n, xs // factor, ys // factor) for n, xs, ys in outer), (loops[-1][0] // factor, 1, 1))
                    return _typed_views(source, target, target_offset // factor, wide, width * factor)
    return _typed_views(source, target, target_offset, loops, width)


def copy_cast(
    source: memoryview,
    source_dtype: str,
    target: memoryview,
    target_dtype: str,
    target_offset: int,
    loops: tuple[Loop, ...],
) -> None:
    """Copy as `copy_same` does, converting each element as torch's ``Tensor.to`` would: to nearest, ties to even.

    Raises:
        CastOverflowError: a finite value has no finite counterpart in the target type.
    """
    source_view = _view_strided(source, dtypes.numpy_dtype(source_dtype), 0, loops, 1)
    target_view = _view_strided(target, dtypes.numpy_dtype(target_dtype), target_offset, loops, 2)
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target_view, _first_rounding(source_view, target_dtype), casting="unsafe")
        if target_dtype not in _EXPONENT:
            return
        kind, signed, mask = _EXPONENT[target_dtype]
        bits = _view_strided(target, np.dtype(kind), target_offset, loops, 2)
        # Infinity and NaN have all exponent bits set. As integers they are the largest of their sign, so two maxima,
        # which need no memory, mostly show that there is none.
        if bits.max() < (1 << 8 * bits.itemsize - 1 | mask) and bits.view(signed).max() < mask:
            return
        # A finite source there was too large.
        special = source_view[(bits & kind(mask)) == mask].astype(np.float64)
    lost = special[np.isfinite(special)]
    if lost.size:
        raise CastOverflowError(float(lost[0]))


def change_elements(source: memoryview, dtype: str, factor: float, added: int) -> tuple[memoryview, str]:
    """Return floating-point elements times a factor plus a number, and the wider type that they then have.

    Rounded to their own type, they are those of torch, which computes in at least 32 bits, too.

    Raises:
        CastOverflowError: a finite element has no finite product.
    """
    wide = "F64" if dtype == "F64" else "F32"
    kind = dtypes.numpy_dtype(wide)
    values = np.frombuffer(source, dtypes.numpy_dtype(dtype)).astype(kind)
    if factor != 1.0:
        finite = np.isfinite(values)
        largest = float(np.max(np.abs(values), initial=0.0, where=finite))
        with np.errstate(over="ignore", invalid="ignore"):
            values *= kind.type(factor)
        # A cast to a narrower type would take such a product for an element that was infinite before.
        if not np.isfinite(values[finite]).all():
            raise CastOverflowError(largest * factor)
    return (values + added if added else values).data.cast("B"), wide


def _first_rounding(values: Array, target_dtype: str) -> Array:
    """Return doubles as floats if the target has 16 bits: torch rounds twice, too (c10/util/Half.h: Half)."""
    return values.astype(np.float32) if values.dtype == np.float64 and target_dtype in ("F16", "BF16") else values


def count_cast_different(
    source: memoryview,
    source_dtype: str,
    target: memoryview,
    target_dtype: str,
    target_offset: int,
    loops: tuple[Loop, ...],
) -> int:
    """Return how many elements `copy_cast` would change in `target`."""
    kind = _UNSIGNED[dtypes.dtype(target_dtype).nbytes]
    with np.errstate(over="ignore", invalid="ignore"):
        source_view = _view_strided(source, dtypes.numpy_dtype(source_dtype), 0, loops, 1)
        cast = _first_rounding(source_view, target_dtype).astype(dtypes.numpy_dtype(target_dtype))
    return int(np.count_nonzero(cast.view(kind) != _view_strided(target, kind, target_offset, loops, 2)))


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

    left: Array
    right: Array
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
    """Write the stored elements of a tensor from row-major address `low` on, with the product of its factors added.

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
        made, into = flat.data.cast("B"), target[start * width : (start + count) * width]
        copy_cast(made, "F64" if kind == np.float64 else "F32", into, target_dtype, 0, ((count, 1, 1),))


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
