"""Digests of tensors' values that add up: those of a tensor's parts to that of the tensor, however it is cut.

A tensor's row-major elements form rows, and the bytes of a row form little-endian words of 8 bytes, the last one padded
with zeros. The digest is the sum of ``f(word) * key(column) * factor(row)`` modulo 2^64, where keys and factors are
odd: a change of one element changes the digest. A rank that holds columns or rows of a tensor, or any other elements,
adds theirs only. All sums are kept for each of 64 blocks of rows, so that a difference names rows.

Rows are those of the tensor's last dim, so that columns of a matrix are digested as fast as its rows.
``f(word) = word + (word >> 32)`` lets a word's upper bits reach lower ones of the sum. Without it, two elements at the
end of their words that both change their sign would leave the sum as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank.layout.coverage import range_text
from xrank.layout.nest_table import NestTable, int_array, restrict_rows
from xrank.layout.nests import Loop, Nest
from xrank.ranks.memory import LocalBytes

WordArray: TypeAlias = npt.NDArray[np.uint64]
_Read: TypeAlias = Callable[[int, tuple[int, ...], tuple[int, ...], int], npt.NDArray[np.unsignedinteger]]
"""Returns unsigned integers from their first byte, shape, byte strides and width."""

NUM_BLOCKS = 64
"""Blocks of rows in each tensor; of the last ones some may be empty."""
_LONGEST_NBYTES, _SHORTER_NBYTES = 1 << 19, 1 << 13
"""Bytes of a row: in place of longer ones there are rows of the second size."""
_CHUNK_NBYTES = 1 << 18
"""Bytes that are folded at once, which stay in a core's cache."""
_STAGING_NBYTES = 4 << 20


class DigestRows(Struct, frozen=True):
    """The rows of a tensor's digest; they follow from its shape and element type alone."""

    shape: tuple[int, ...]
    width: int
    """Bytes of an element."""
    length: int
    """Elements of a row."""
    block: int
    """Rows of a block."""

    @classmethod
    def of(cls, shape: Sequence[int], width: int) -> DigestRows:
        """Return the rows of a tensor with that shape and that many bytes an element."""
        length = max(1, shape[-1] if shape else 1)
        if length * width > _LONGEST_NBYTES:
            length = _SHORTER_NBYTES // width
        return cls(tuple(shape), width, length, max(1, -(-prod(shape) // (length * NUM_BLOCKS))))

    def describe_blocks(self, blocks: Sequence[int]) -> str:
        """Return the elements from the first to the last of these blocks as text."""
        size = self.length * self.block
        return range_text(self.shape, blocks[0] * size, min(prod(self.shape), (blocks[-1] + 1) * size) - 1)


class DigestedPart(Struct, frozen=True, eq=False):
    """Elements of a tensor in this process's memory."""

    rows: DigestRows
    nests: NestTable
    """From row-major addresses in `source` (x), canonical, to those in the tensor (y); in elements."""
    source: LocalBytes


def digest_parts(parts: Sequence[DigestedPart], workers: int) -> WordArray:
    """Return the digests of parts by block; shape [parts, `NUM_BLOCKS`]. Their sum along a row is the part's digest.

    Example:
        >>> import torch
        >>> from xrank.layout.nest_table import NestTable
        >>> from xrank.layout.nests import Nest
        >>> from xrank.ranks.memory import local_bytes
        >>> whole, rows = torch.arange(12.0), DigestRows.of((12,), 4)
        >>> def part(low, high):
        ...     nests = NestTable.from_nests([Nest(0, low, ((high - low, 1, 1),))])
        ...     return DigestedPart(rows, nests, local_bytes(whole[low:high]))
        >>> blocks = digest_parts([part(0, 5), part(5, 12), part(0, 12)], workers=1)
        >>> bool(blocks[:2].sum() == blocks[2].sum())
        True
    """
    found = np.zeros((len(parts), NUM_BLOCKS), np.uint64)
    with ThreadPoolExecutor(max(1, min(workers, len(parts)))) as pool:
        for _ in pool.map(_digest_part, parts, found):
            pass
    return found


def digest_places(part: DigestedPart) -> int:
    """Return a number for the set of a part's elements: the digest of as many elements of one value.

    Numbers of disjoint sets add up as digests do; the sum over a tensor's parts proves that they are the tensor.
    """
    return _digest_places(part.rows, tuple(nest._replace(x=0) for nest in part.nests.to_nests()))


@lru_cache(maxsize=1024)
def _digest_places(rows: DigestRows, nests: tuple[Nest, ...]) -> int:
    blocks = np.zeros(NUM_BLOCKS, np.uint64)
    one = sum(1 << (8 * i) for i in range(0, 8, rows.width))

    def read(_: int, shape: tuple[int, ...], __: tuple[int, ...], width: int) -> npt.NDArray[np.unsignedinteger]:
        return np.broadcast_to(np.array(one if width == 8 else 1, f"<u{width}"), shape)

    for nest in nests:
        _Sums(blocks, rows, read).add(nest)
    return int(blocks.sum())


def _digest_part(part: DigestedPart, blocks: WordArray) -> None:
    source, width = part.source, part.rows.width

    def add(content: memoryview, nests: NestTable) -> None:
        def read(
            start: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int
        ) -> npt.NDArray[np.unsignedinteger]:
            return np.ndarray(shape, f"<u{width}", content, start, strides)

        for nest in nests.to_nests():
            _Sums(blocks, part.rows, read).add(nest)

    content = source.find_row(0, source.nbytes)
    if content is not None:
        add(content, part.nests)
        return
    # Strided, or on a device: it is brought in pieces.
    staging = memoryview(bytearray(min(source.nbytes, _STAGING_NBYTES)))
    for start in range(0, source.nbytes, _STAGING_NBYTES):
        piece = staging[: source.nbytes - start]
        source.read_into(start, piece)
        low, count = start // width, len(part.nests)
        ends = int_array([low + len(piece) // width]).repeat(count)
        _, nests = restrict_rows(part.nests, int_array([low]).repeat(count), ends)
        add(piece, NestTable(nests.x - low, nests.y, nests.loops))


class _Sums(Struct, frozen=True):
    """Adds elements to the sums of a tensor's blocks."""

    blocks: WordArray
    rows: DigestRows
    read: _Read

    def add(self, nest: Nest) -> None:
        """Add a nest's elements."""
        run = next((loop for loop in reversed(nest.loops) if loop[2] == 1), (1, 1, 1))
        outer = [loop for loop in nest.loops if loop is not run]
        loose = [loop for loop in outer if loop[2] % self.rows.length]
        over_rows = tuple(loop for loop in outer if not loop[2] % self.rows.length)
        for steps in product(*(range(n) for n, _, _ in loose)):
            x, y = (
                first + sum(step * loop[side] for step, loop in zip(steps, loose, strict=True))
                for first, side in ((nest.x, 1), (nest.y, 2))
            )
            self._add_runs(x, y, over_rows, run)

    def _add_runs(self, x: int, y: int, loops: tuple[Loop, ...], run: Loop) -> None:
        """Add elements that follow each other in the tensor; the loops go from row to row."""
        length, width = self.rows.length, self.rows.width
        column, (count, stride, _) = y % length, run
        if column + count > length:
            head = (length - column) % length
            middle, tail = divmod(count - head, length)
            if head:
                self._add_runs(x, y, loops, (head, stride, 1))
            if middle:
                rows = (*loops, (middle, length * stride, length))
                self._add_runs(x + head * stride, y + head, rows, (length, stride, 1))
            if tail:
                done = head + middle * length
                self._add_runs(x + done * stride, y + done, loops, (tail, stride, 1))
            return
        first, end = -(-column * width // 8), (column + count) * width // 8  # whole words
        head, tail = first * 8 // width - column, end * 8 // width - column
        if first < end:
            self._add_words(x + head * stride, y, loops, slice(first, end), stride)
        for i in (*range(head), *range(tail, count)) if first < end else range(count):
            word, shift = divmod((column + i) * width, 8)
            counts, strides = _list_steps(loops, width)
            values = self.read((x + i * stride) * width, counts, strides, width).astype(np.uint64) << np.uint64(
                8 * shift
            )
            self._put(_fold(values) * _keys(length * width)[word], self._find_rows(y, loops))

    def _add_words(self, x: int, y: int, loops: tuple[Loop, ...], words: slice, stride: int) -> None:
        """Add whole words of rows, elements of which are `stride` elements apart in memory."""
        width = self.rows.width
        keys = _keys(self.rows.length * width)[words]
        counts, strides = _list_steps(loops, width)
        sums = np.empty(counts, np.uint64)
        # One step for each index of the outer loops, and chunks of the innermost one.
        chunk = max(1, _CHUNK_NBYTES // (8 * len(keys)))
        folded = np.empty((min(chunk, counts[-1]), len(keys)), np.uint64)
        for outer in np.ndindex(counts[:-1]):
            start = x * width + sum(i * step for i, step in zip(outer, strides, strict=False))
            for low in range(0, counts[-1], chunk):
                n = min(chunk, counts[-1] - low)
                at = start + low * strides[-1]
                if stride == 1:
                    found = self.read(at, (n, len(keys)), (strides[-1], 8), 8)
                else:
                    found = self.read(at, (n, 8 * len(keys) // width), (strides[-1], stride * width), width)
                    found = np.ascontiguousarray(found).view("<u8")
                np.matmul(_fold(found, folded[:n]), keys, out=sums[(*outer, slice(low, low + n))])
        self._put(sums, self._find_rows(y, loops))

    def _find_rows(self, y: int, loops: Sequence[Loop]) -> npt.NDArray[np.int64]:
        found = np.full((1,) * max(1, len(loops)), y // self.rows.length, np.int64)
        for axis, (n, _, stride) in enumerate(loops):
            steps = np.arange(n) * (stride // self.rows.length)
            found = found + steps.reshape([-1 if i == axis else 1 for i in range(len(loops))])
        return found

    def _put(self, sums: WordArray, rows: npt.NDArray[np.int64]) -> None:
        np.add.at(self.blocks, rows // self.rows.block, sums * (_mix(rows.astype(np.uint64)) | np.uint64(1)))


def _list_steps(loops: Sequence[Loop], width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the counts and the byte strides of loops in memory; without a loop, those of one element."""
    return tuple(n for n, _, _ in loops) or (1,), tuple(xs * width for _, xs, _ in loops) or (0,)


def _fold(words: npt.NDArray[np.unsignedinteger], out: WordArray | None = None) -> WordArray:
    folded: WordArray = np.right_shift(words, np.uint64(32), out=out)
    folded += words
    return folded


@lru_cache(maxsize=64)
def _keys(row_nbytes: int) -> WordArray:
    keys: WordArray = _mix(np.arange(-(-row_nbytes // 8), dtype=np.uint64) + np.uint64(1 << 48)) | np.uint64(1)
    return keys


def _mix(numbers: WordArray) -> WordArray:
    """Return numbers that look random: splitmix64 (Steele, Lea and Flood, 2014)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
