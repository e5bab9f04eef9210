"""Lists the chunks of an array that a store must contain, and finds the first that is missing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import NoReturn

from xrank.errors import AGAIN, CorruptError, IncompleteError
from xrank.formats.regular_file import RegularFile, open_regular
from xrank.formats.zarr_array import StoredValue, ZarrArray, read_shard_index
from xrank.layout.nests import row_major
from xrank.plan.coverage import range_text
from xrank.readers.orbax.stores import ArrayStore
from xrank.stores import places

_INDEX_ENTRY_NBYTES = 16
_CHECKSUM_NBYTES = 4
_MAX_INDEX_NBYTES = 1 << 24
"""Largest index of a shard that is read, in bytes: of a million parts."""


@dataclass(frozen=True, slots=True)
class ChosenArray:
    """An array of a store, under the name that its tensor shall have."""

    name: str
    key: str
    """Its name in the store."""
    array: ZarrArray


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk, or a part of a chunk that is a shard."""

    value: StoredValue
    """Where its bytes lie."""
    start: tuple[int, ...]
    """Its first element."""
    rank: int
    """The process that wrote it."""


class ChunkLister:
    """Lists the chunks of a store's arrays; close it with `stack`, which holds the file that was read last.

    Args:
        store: the store.
        stack: entered by the caller.
    """

    def __init__(self, store: ArrayStore, stack: ExitStack) -> None:
        self._store, self._stack = store, stack
        self._last: RegularFile | None = None

    def list(self, one: ChosenArray) -> Iterator[Chunk]:
        """Yield all chunks with elements of an array.

        Raises:
            IncompleteError: one is missing. zarr would take zeros for it.
            CorruptError: the index of a shard is damaged, or a part lies beyond the array's edge.
        """
        for place in _list_places(one.array.grid):
            start = tuple(i * size for i, size in zip(place, one.array.grid_shape, strict=True))
            value = self._store.find(one.key, one.array.key(place))
            if value is None:
                self._raise_missing(one, start, one.array.grid_shape)
            rank = self._store.rank_of(value)
            parts = self._list_parts(one, value, start) if one.array.is_sharded else ((value, start),)
            yield from (Chunk(part, begin, rank) for part, begin in parts)

    def _list_parts(
        self, one: ChosenArray, value: StoredValue, start: tuple[int, ...]
    ) -> Iterable[tuple[StoredValue, tuple[int, ...]]]:
        """Yield place and first element of each part of a shard that has elements of the array."""
        path = os.path.join(self._store.folder, value.file)
        num_parts = prod(one.array.shard_grid)
        nbytes = _INDEX_ENTRY_NBYTES * num_parts + _CHECKSUM_NBYTES
        # Before anything of that size is allocated: shapes are text, which may claim any number of parts.
        if nbytes > min(value.nbytes, _MAX_INDEX_NBYTES):
            raise corrupt_error(
                one,
                f"{path} cannot contain the index of a shard of {num_parts:,} parts",
                path,
                got=f"{value.nbytes:,} bytes",
                want=f"an index of {nbytes:,} bytes, and of {_MAX_INDEX_NBYTES:,} at most",
            )
        index = self._read_end(one, value, path, nbytes)
        found = read_shard_index(index, num_parts, value.nbytes)
        if found is None:
            raise corrupt_error(one, f"the index of a shard at byte {value.offset:,} of {path} is damaged", path)
        for place, part in zip(_list_places(one.array.shard_grid), found, strict=True):
            begin = tuple(s + i * size for s, i, size in zip(start, place, one.array.chunk_shape, strict=True))
            if any(low >= n for low, n in zip(begin, one.array.shape, strict=True)):
                if part is not None:  # tensorstore writes no part beyond the array's edge
                    raise_beyond(one, f"a part of a shard that begins at {list(begin)}", path)
                continue
            if part is None:
                self._raise_missing(one, begin, one.array.chunk_shape)
            offset, size = part
            if value.data is not None:
                yield StoredValue(value.file, value.offset, size, value.data[offset : offset + size]), begin
            else:
                yield StoredValue(value.file, value.offset + offset, size), begin

    def _read_end(self, one: ChosenArray, value: StoredValue, path: str, nbytes: int) -> bytes:
        """Return the last bytes of a value."""
        if value.data is not None:
            return value.data[-nbytes:]
        if self._last is None or self._last.origin.path != path:
            # Chunks of one array follow each other in a file, so that one open file is enough.
            self._stack.close()
            check_size(one, value, path, None if not places.exists(path) else value.offset + value.nbytes)
            self._last = self._stack.enter_context(open_regular(path))
        check_size(one, value, path, self._last.nbytes)
        nbytes = min(nbytes, value.nbytes)
        return self._last.read(value.offset + value.nbytes - nbytes, nbytes)

    def _raise_missing(self, one: ChosenArray, start: tuple[int, ...], shape: tuple[int, ...]) -> NoReturn:
        sizes = [min(size, n - low) for size, n, low in zip(shape, one.array.shape, start, strict=True)]
        strides = row_major(one.array.shape)
        low = sum(i * stride for i, stride in zip(start, strides, strict=True))
        high = low + sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        where = range_text(one.array.shape, low, high)
        raise IncompleteError(
            f"{one.name}, {where}: {self._store.folder} contains no chunk with these elements",
            tensor=one.name,
            file=self._store.folder,
            index_range=where,
            got=f"no chunk of {one.key} that begins at {list(start)}",
            want="every chunk; zarr itself would give zeros for a missing one, and older versions of Orbax left out "
            "chunks of zeros",
            next_step=f"copy the checkpoint whole from where it was written, then {AGAIN}; or let the training run "
            "save it with a current version of Orbax",
        )


def _list_places(grid: Sequence[int], first: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield the places of a grid in row-major order, one by one: its text may claim more than memory holds."""
    if len(first) == len(grid):
        yield first
    elif 0 not in grid:
        for i in range(grid[len(first)]):
            yield from _list_places(grid, (*first, i))


def check_size(one: ChosenArray, value: StoredValue, path: str, nbytes: int | None) -> None:
    """Check that a file is there and long enough for a value.

    Args:
        one: the array with the value, for errors.
        value: the value.
        path: the file.
        nbytes: bytes of the file; None if it is missing.

    Raises:
        IncompleteError: it is missing; CorruptError: it is too short.
    """
    if nbytes is None:
        raise IncompleteError(
            f"{path}, with chunks of {one.name}, is missing",
            tensor=one.name,
            file=path,
            got="no such file",
            want="the file that the store's index names",
            next_step=f"copy the checkpoint whole from where it was written, then {AGAIN}; or take another step",
        )
    end = value.offset + value.nbytes
    if nbytes < end:
        raise corrupt_error(one, f"{path} ends early", path, got=f"{nbytes:,} bytes", want=f"at least {end:,}")


def corrupt_error(
    one: ChosenArray, problem: str, path: str, *, got: str | None = None, want: str | None = None
) -> CorruptError:
    """Return the error for a damaged file with chunks of an array."""
    return CorruptError(
        f"{one.name}: {problem}",
        tensor=one.name,
        file=path,
        got=got,
        want=want,
        next_step="copy the checkpoint again from where it was written, or take another step",
    )


def raise_beyond(one: ChosenArray, got: str, path: str) -> NoReturn:
    """Raise the error for elements beyond an array's edge."""
    raise corrupt_error(
        one,
        f"its shape {list(one.array.shape)} leaves out elements that the store contains",
        path,
        got=got,
        want="no chunk beyond the edge of the shape, and zeros where a chunk reaches over it",
    )
