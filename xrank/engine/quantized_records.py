"""Records with the values of quantized matrices, decoded from codes and scales where they are read.

Any range of the decoded matrix can be read: only the codes and scales of the rows and columns below it are. A matrix is
decoded in chunks that stay in a core's own cache, so that memory is the same for a tensor of any size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank import dtypes
from xrank.engine.buffers import OpenSource
from xrank.engine.encodings import Encoding
from xrank.engine.made_records import SourceLayer
from xrank.engine.windows import Read
from xrank.layout.stored_model import QuantizedMatrix, QuantizedPart, RecordTable

_CHUNK = 1 << 16
"""Elements decoded at once."""
_GAP_NBYTES = 4 << 10
"""Rows of a part up to this length are read whole, as a disk reads them, where some columns are wanted."""
_SPAN_NBYTES = 1 << 20
"""Most bytes of such rows that are read at once."""
_MOST_PREPARED = 256
_MOST_ROWS = 64
"""Rows of scales that are kept, each for many rows of a matrix."""
_MOST_LINES, _LONGEST_LINE = 16, 1 << 15
"""Decoded lines that are kept, each for the two windows that share it, and the elements of the longest of them."""

_Values = npt.NDArray[Any]


@cache
def _fields_of(encoding: Encoding) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = msgspec.to_builtins(encoding)
    return fields


def describe_matrix(
    encoding: Encoding,
    dtype: str,
    shape: tuple[int, int, int],
    parts: Iterable[tuple[int, str]],
    num_packed: int,
    *,
    is_transposed: bool = False,
) -> QuantizedMatrix:
    """Return how a matrix of that shape is decoded.

    Args:
        encoding: what decodes it.
        dtype: the type to which values are rounded.
        shape: matrices, rows and columns of each.
        parts: the record of each of `Encoding.outputs`, and the element type that it has.
        num_packed: codes in an element of their record.
        is_transposed: as in `QuantizedMatrix`.
    """
    blocks = [(1, num_packed), (encoding.block[0] or shape[1], encoding.block[1]), (0, 0)]
    found = [
        QuantizedPart(record, kind, *block)
        for (record, kind), block in zip(parts, blocks, strict=False)
        if kind != "I64"  # the shape, which is known
    ]
    return QuantizedMatrix(_fields_of(encoding), dtype, shape, tuple(found), is_transposed)


class _Matrix(Struct, frozen=True, eq=False):
    """A quantized matrix, ready to be decoded."""

    spec: QuantizedMatrix
    encoding: Encoding
    row_nbytes: tuple[int, ...]
    """Bytes of a row of each part."""
    align: int
    """Columns of which a multiple begins an element of every part."""

    @classmethod
    def of(cls, spec: QuantizedMatrix) -> _Matrix:
        counts = [-(-spec.shape[2] // (part.block_columns or spec.shape[2])) for part in spec.parts]
        widths = [dtypes.dtype(part.dtype).nbytes for part in spec.parts]
        align = math.lcm(*(part.block_columns or 1 for part in spec.parts))
        encoding = msgspec.convert(spec.encoding, Encoding)
        return cls(spec, encoding, tuple(n * width for n, width in zip(counts, widths, strict=True)), align)

    @property
    def line(self) -> int:
        """Elements of a row of the decoded record: a column of the matrix if it is transposed."""
        return self.spec.shape[1 if self.spec.is_transposed else 2]

    @property
    def lines(self) -> int:
        """Rows of each matrix in the decoded record."""
        return self.spec.shape[2 if self.spec.is_transposed else 1]


class _DecodedLines(NamedTuple):
    """Parts of lines that a thread has decoded ahead: the same elements of one line after another."""

    record: int
    low: int
    high: int
    first: int
    values: _Values
    """Shape [lines, high - low]."""


class QuantizedSource(SourceLayer):
    """Reads records, and decodes those of quantized matrices. Errors as those of `FileSource`."""

    def __init__(self, records: RecordTable, inner: OpenSource) -> None:
        super().__init__(inner)
        self._specs = records.quantized
        self._prepare = lru_cache(_MOST_PREPARED)(lambda record: _Matrix.of(records.quantized[record]))
        self._read_kept_row = lru_cache(_MOST_ROWS)(self._read_row)
        self._decode_kept_line = lru_cache(_MOST_LINES)(self._decode_line)
        self._lines_lock = threading.Lock()
        self._own = threading.local()

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on; whole elements of a quantized matrix."""
        if record not in self._specs:
            self._inner.read_into(record, start, into)
            return
        matrix = self._prepare(record)
        kind = dtypes.numpy_dtype(matrix.spec.dtype)
        values = np.frombuffer(into, kind)
        position = start // kind.itemsize
        while len(values):
            line, low = divmod(position, matrix.line)
            left = matrix.lines - line % matrix.lines
            if matrix.spec.is_transposed and low + len(values) > matrix.line:
                # The lines at both ends, too, as all of them are decoded from the same rows.
                whole = np.empty((min(-(-(low + len(values)) // matrix.line), left), matrix.line), kind)
                self._decode(matrix, line, 0, whole)
                made = whole.reshape(-1)[low : low + len(values)]
                count = len(made)
                values[:count] = made
            elif low or len(values) < matrix.line:
                count = min(len(values), matrix.line - low)
                values[:count] = self._read_part_of_line(record, matrix, line, low, low + count)
            else:
                lines = min(len(values) // matrix.line, left)
                count = lines * matrix.line
                self._decode(matrix, line, 0, values[:count].reshape(lines, matrix.line))
            values, position = values[count:], position + count

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes, in the staging buffer or as the inner source returns them."""
        if record not in self._specs:
            return self._inner.fetch(record, start, nbytes, staging)
        return super().fetch(record, start, nbytes, staging)

    @property
    def announce(self) -> Callable[[Iterable[Read]], bool] | None:
        """Starts to fetch bytes that will be read soon, as `ObjectSource.announce`; None if all are on disks."""
        objects = self.objects
        if objects is None:
            return None
        return lambda reads: objects.announce(part for read in reads for part in self._find_reads(read))

    def close(self) -> None:
        """Close all files; no read may be under way."""
        super().close()
        for kept in (self._read_kept_row, self._decode_kept_line):
            kept.cache_clear()

    def _find_reads(self, read: Read) -> Iterator[Read]:
        """Yield what is read of the parts for a read of a matrix; other reads as they are."""
        if read.record not in self._specs:
            yield read
            return
        matrix = self._prepare(read.record)
        spec, width = matrix.spec, dtypes.dtype(matrix.spec.dtype).nbytes
        _, rows, columns = spec.shape
        first, last = read.start // width, (read.start + read.nbytes - 1) // width
        if spec.is_transposed:  # some columns of all rows
            low, high = (first // (rows * columns)) * rows, (last // (rows * columns) + 1) * rows
        else:
            low, high = first // columns, last // columns + 1
        for part, row_nbytes in zip(spec.parts, matrix.row_nbytes, strict=True):
            start, end = _part_row(spec, part, low), _part_row(spec, part, high - 1) + 1
            yield Read(part.record, start * row_nbytes, (end - start) * row_nbytes, None)

    def _read_part_of_line(self, record: int, matrix: _Matrix, line: int, low: int, high: int) -> _Values:
        """Return elements [low, high) of a line of the decoded record.

        A tensor that is cut across its lines is read so, one line after another. From the second line on, some are
        decoded ahead. Other reads end within a line that the next one begins with.
        """
        kept: _DecodedLines | None = getattr(self._own, "kept", None)
        count = 1
        if kept is not None and kept[:3] == (record, low, high):
            if 0 <= line - kept.first < len(kept.values):
                return kept.values[line - kept.first]  # type: ignore[no-any-return]
            if line == kept.first + len(kept.values):
                count = min(max(1, _CHUNK // (high - low)), matrix.lines - line % matrix.lines)
        if count == 1 and matrix.line <= _LONGEST_LINE and not matrix.spec.is_transposed:
            # Two windows that read their common line at once would have a store's block counted as used too early,
            # dropped, and fetched again.
            with self._lines_lock:
                values = self._decode_kept_line(record, line)[None, low:high]
        else:
            values = np.empty((count, high - low), dtypes.numpy_dtype(matrix.spec.dtype))
            self._decode(matrix, line, low, values)
        self._own.kept = _DecodedLines(record, low, high, line, values)
        return values[0]  # type: ignore[no-any-return]

    def _decode_line(self, record: int, line: int) -> _Values:
        matrix = self._prepare(record)
        values = np.empty((1, matrix.line), dtypes.numpy_dtype(matrix.spec.dtype))
        self._decode(matrix, line, 0, values)
        return values[0]  # type: ignore[no-any-return]

    def _decode(self, matrix: _Matrix, line: int, low: int, into: _Values) -> None:
        """Fill an array [lines, elements] with elements of the decoded record; all lines are of one matrix."""
        number, line = divmod(line, matrix.lines)
        if matrix.spec.is_transposed:
            row, column, into = low, line, into.T
        else:
            row, column = line, low
        first = number * matrix.spec.shape[1]
        for top, bottom, left, right in _cut_chunks(matrix, row, row + len(into), column, column + into.shape[1]):
            begin = left // matrix.align * matrix.align
            end = min(-(-right // matrix.align) * matrix.align, matrix.spec.shape[2])
            parts = self._read_parts(matrix, first + top, first + bottom, begin, end)
            place = into[top - row : bottom - row, left - column : right - column]
            # The last packed element may be padded.
            values = matrix.encoding.decode(parts, matrix.spec.dtype)[:, left - begin : right - begin]
            if place.strides[1] == place.itemsize:
                np.copyto(place, values, casting="unsafe")
            else:  # numpy's loops over such types are slow, and those over lines three times as slow
                bits = np.dtype(f"u{place.itemsize}")
                np.copyto(place.view(bits), values.astype(place.dtype, copy=False).view(bits))

    def _read_parts(self, matrix: _Matrix, top: int, bottom: int, left: int, right: int) -> list[_Values]:
        """Return the parts for rows of one matrix and one row of blocks, counted over all; columns are aligned."""
        parts = []
        for number, part in enumerate(matrix.spec.parts):
            width = dtypes.dtype(part.dtype).nbytes
            start, end = 0, matrix.row_nbytes[number]
            if part.block_columns:
                start, end = left // part.block_columns * width, -(-right // part.block_columns) * width
            if part.block_rows == 1:
                data = self._read_rows(part.record, matrix.row_nbytes[number], top, bottom, start, end)
            else:
                row = _part_row(matrix.spec, part, top)
                data = self._read_kept_row(part.record, row, matrix.row_nbytes[number])[:, start:end]
            parts.append(np.ascontiguousarray(data).view(dtypes.numpy_dtype(part.dtype)))
        return parts

    def _read_rows(self, record: int, row_nbytes: int, top: int, bottom: int, start: int, end: int) -> _Values:
        """Return bytes [start, end) of each of some rows of a part."""
        count = bottom - top
        if end - start == row_nbytes or row_nbytes <= _GAP_NBYTES:
            whole = np.empty((count, row_nbytes), np.uint8)
            self._inner.read_into(record, top * row_nbytes, whole.data.cast("B"))
            return whole[:, start:end]
        found = np.empty((count, end - start), np.uint8)
        for row in range(count):
            self._inner.read_into(record, (top + row) * row_nbytes + start, found[row].data)
        return found

    def _read_row(self, record: int, row: int, row_nbytes: int) -> _Values:
        return self._read_rows(record, row_nbytes, row, row + 1, 0, row_nbytes)


def _part_row(spec: QuantizedMatrix, part: QuantizedPart, row: int) -> int:
    """Return the row of a part for a row of a matrix, counted over all matrices."""
    if part.block_rows == 0:
        return 0
    number, row = divmod(row, spec.shape[1])
    return number * -(-spec.shape[1] // part.block_rows) + row // part.block_rows


def _cut_chunks(matrix: _Matrix, top: int, bottom: int, left: int, right: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (top, bottom, left, right) of chunks of a matrix, each within one row of blocks."""
    step = max(_CHUNK // matrix.align, 1) * matrix.align
    block = max(part.block_rows for part in matrix.spec.parts)
    while left < right:
        # Only the first chunk may begin within an aligned stretch of columns.
        stop = min(right, left // matrix.align * matrix.align + step)
        spans = (_SPAN_NBYTES // nbytes for nbytes in matrix.row_nbytes if nbytes <= _GAP_NBYTES)
        most = max(1, min(_CHUNK // (stop - left), *spans, _CHUNK))
        row = top
        while row < bottom:
            last = min(row + most, bottom, (row // block + 1) * block if block > 1 else bottom)
            yield row, last, left, stop
            row = last
        left = stop
