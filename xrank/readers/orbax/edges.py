"""Holds the shape of an array against the ends of its chunks.

A shape is text in a store, without a checksum. A smaller one would cut the tensor without any other trace. tensorstore
writes no chunk beyond an array's edge, and fills those that reach over it with zeros (tensorstore/internal/chunk_grid
and driver/zarr; tried with 0.1.84: 900 arrays of random shapes). Arrays whose chunks end at the edge, as Orbax cuts
them, cost only a look at their keys.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from math import prod

import numpy as np

from xrank.formats.regular_file import RegularFile, open_regular
from xrank.plan.decoding import Readable, import_zstandard, open_frame
from xrank.readers.orbax.chunks import ChosenArray, Chunk, check_size, corrupt_error, raise_beyond
from xrank.readers.orbax.stores import ArrayStore

_WINDOW_NBYTES = 1 << 20


def check_edges(store: ArrayStore, one: ChosenArray, chunks: Sequence[Chunk]) -> None:
    """Check that nothing lies beyond an array's edge but zeros.

    Args:
        store: the store.
        one: the array.
        chunks: all its chunks.

    Raises:
        CorruptError: the store contains elements that the array's shape leaves out.
    """
    for key in store.keys(one.key):
        place = one.array.place(key)
        if place is not None and any(i >= n for i, n in zip(place, one.array.grid, strict=True)):
            found = store.find(one.key, key)
            path = store.folder if found is None else os.path.join(store.folder, found.file)
            start = [i * size for i, size in zip(place, one.array.grid_shape, strict=True)]
            raise_beyond(one, f"a chunk that begins at {start}", path)
    for chunk in chunks:
        inside = tuple(n - low for n, low in zip(one.array.shape, chunk.start, strict=True))
        if any(size > n for size, n in zip(one.array.chunk_shape, inside, strict=True)):
            path = os.path.join(store.folder, chunk.value.file)
            if _has_elements_beyond(one, chunk, inside, path):
                raise_beyond(one, f"elements other than 0 in the chunk that begins at {list(chunk.start)}", path)


def _has_elements_beyond(one: ChosenArray, chunk: Chunk, inside: Sequence[int], path: str) -> bool:
    """Return whether a chunk has elements other than zeros beyond the first `inside` of each dim.

    It reads at most a window at once, whatever the chunk's shape: many rows of the last dim, or a part of one.
    """
    *others, columns = one.array.chunk_shape
    item_nbytes = one.array.chunk_nbytes // prod(one.array.chunk_shape)
    width = min(columns, _WINDOW_NBYTES // item_nbytes)
    step = _WINDOW_NBYTES // item_nbytes // columns or 1
    rows = prod(others)
    with _open_chunk(one, chunk, path) as stream:
        for start in range(0, rows, step):
            numbers = np.arange(start, min(start + step, rows))
            is_outside = np.zeros(len(numbers), np.bool_)
            for index, n in zip(np.unravel_index(numbers, others) if others else (), inside, strict=False):
                is_outside |= index >= n
            for left in range(0, columns, width):
                count = min(width, columns - left)
                content = _read(one, stream, len(numbers) * count * item_nbytes, path)
                elements = np.frombuffer(content, np.uint8).reshape(len(numbers), count * item_nbytes)
                end = min(max(inside[-1] - left, 0), count) * item_nbytes
                if elements[is_outside].any() or elements[:, end:].any():
                    return True
    return False


@contextmanager
def _open_chunk(one: ChosenArray, chunk: Chunk, path: str) -> Iterator[Readable]:
    """Yield a chunk's decoded bytes to read in order."""
    value = chunk.value
    opened = nullcontext() if value.data is not None else open_regular(path)
    with opened as file:
        if file is None:
            stored: Readable = BytesIO(value.data or b"")
        else:
            check_size(one, value, path, file.nbytes)
            stored = _StoredBytes(file, value.offset, value.offset + value.nbytes)
        yield open_frame(stored) if one.array.is_compressed else stored


@dataclass(slots=True)
class _StoredBytes:
    """A range of a file as a stream."""

    file: RegularFile
    at: int
    end: int

    def read(self, nbytes: int) -> bytes:
        start, self.at = self.at, min(self.at + nbytes, self.end)
        return self.file.read(start, self.at - start)


def _read(one: ChosenArray, stream: Readable, nbytes: int, path: str) -> bytes:
    damage = (import_zstandard().ZstdError,) if one.array.is_compressed else ()
    try:
        content = stream.read(nbytes)
    except damage as error:
        raise corrupt_error(one, f"{path} holds no sound chunk", path, got=str(error)) from error
    if len(content) != nbytes:
        raise corrupt_error(one, f"{path} holds a chunk of another size", path)
    return content
