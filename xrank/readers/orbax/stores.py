"""The arrays of an Orbax item: their zarr metadata and chunks, in one OCDBT store or in a folder for each array."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from io import BytesIO
from math import prod
from typing import NoReturn, Protocol

import numpy as np
from msgspec import Struct

from xrank import dtypes
from xrank.errors import AGAIN, CorruptError, IncompleteError
from xrank.formats.zarr_array import (
    ARRAY_FILES,
    MANIFEST,
    Readable,
    StoredValue,
    ZarrArray,
    import_zstandard,
    open_frame,
    parse_array,
    read_ocdbt,
    read_shard_index,
)
from xrank.layout.coverage import range_text
from xrank.layout.nests import row_major
from xrank.readers.records import Subject
from xrank.storage import places
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote

_RANK = re.compile(r"ocdbt\.process_(\d{1,9})/")
_MAX_METADATA_NBYTES = 1 << 20
_MAX_ARRAY_NBYTES = 1 << 62
_MAX_DIMS = 64
"""numpy's limit."""


class ArrayStore(Protocol):
    """Where the values of arrays lie, by the array's name and the key below it."""

    folder: str

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""

    def rank_of(self, value: StoredValue) -> int:
        """Return the process that wrote a value; 0 if it is not recorded."""


class OcdbtStore:
    """All arrays in one OCDBT store; the processes' own stores were merged into it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._values = read_ocdbt(folder)

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""
        return self._values.get(f"{name}/{key}")

    @cached_property
    def _keys(self) -> Sequence[str]:
        return sorted(self._values)

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""
        return _below(self._keys, name)

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        return _arrays(self._keys)

    def rank_of(self, value: StoredValue) -> int:
        """Return the process that wrote a value; 0 if it is not recorded."""
        found = _RANK.match(value.file)
        return 0 if found is None else int(found[1])


class FolderStore:
    """A folder for each array, and in it a file for each chunk."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """Path in the folder -> bytes, of all files; links to nothing and pipes have none."""
        found = {}
        for place, _, names in places.walk(self.folder, followlinks=True):
            for name in names:
                path = os.path.join(place, name)
                if places.exists(path):
                    found[os.path.relpath(path, self.folder)] = places.nbytes_of(path)
        return found

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""
        file = f"{name}/{key}"
        nbytes = self._sizes.get(file)
        return None if nbytes is None else StoredValue(file, 0, nbytes)

    @cached_property
    def _keys(self) -> Sequence[str]:
        return sorted(self._sizes)

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""
        return _below(self._keys, name)

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        return _arrays(self._keys)

    def rank_of(self, value: StoredValue) -> int:
        """Return 0: files of chunks do not record their process."""
        return 0


def _below(keys: Sequence[str], name: str) -> Iterator[str]:
    """Yield the rest of each key that begins with a name; keys are sorted."""
    start = f"{name}/"
    for at in range(bisect_left(keys, start), len(keys)):
        if not keys[at].startswith(start):
            return
        yield keys[at][len(start) :]


def _arrays(keys: Sequence[str]) -> Iterator[str]:
    """Yield the names of the arrays whose metadata lies among the keys."""
    for key in keys:
        name, _, last = key.rpartition("/")
        if name and last in ARRAY_FILES.values():
            yield name


def open_store(folder: str) -> ArrayStore:
    """Return the store in a tree's folder."""
    names = places.list_names(folder)
    if MANIFEST in names:
        return OcdbtStore(folder)
    parts = sorted(name for name in names if name.startswith("ocdbt.process_"))
    if parts:
        raise Origin(os.path.join(folder, MANIFEST)).incomplete(
            "is missing: the processes' parts were not merged, or not all was copied",
            ", ".join(parts[:5]),
            f"{MANIFEST}, which Orbax writes last",
            COPY_WHOLE,
        )
    return FolderStore(folder)


def read_array(store: ArrayStore, name: str) -> ZarrArray | None:
    """Return an array as its metadata describes it; None if the store does not contain it."""
    for is_zarr3, key in ARRAY_FILES.items():
        value = store.find(name, key)
        if value is None:
            continue
        path = os.path.join(store.folder, value.file)
        origin = Origin(path)
        text = value.data
        if text is None:
            if value.nbytes > _MAX_METADATA_NBYTES:
                raise origin.corrupt("is too large", f"{value.nbytes:,} bytes")
            with open_regular(path) as file:
                text = file.read(value.offset, value.nbytes)
        array = parse_array(name, text, origin, is_zarr3=is_zarr3)
        _check_extent(name, array, origin)
        return array
    return None


def _check_extent(name: str, array: ZarrArray, origin: Origin) -> None:
    """Check that the numbers of an array's elements and of a chunk's are possible, also where a dim is 0."""
    most = max(prod(max(n, 1) for n in shape) for shape in (array.shape, array.grid_shape, array.chunk_shape))
    if len(array.shape) > _MAX_DIMS or most > _MAX_ARRAY_NBYTES // dtypes.dtype(array.dtype).nbytes:
        raise origin.corrupt(
            f"the metadata of {quote(name)} claims an array that cannot be",
            f"shape {quote(str(list(array.shape)))[1:-1]} in chunks of {quote(str(list(array.grid_shape)))[1:-1]}",
            f"at most {_MAX_DIMS} dims and {_MAX_ARRAY_NBYTES:,} bytes",
        )


COPY_WHOLE = f"copy the checkpoint whole from where it was written, then {AGAIN}; or take another step"

_INDEX_ENTRY_NBYTES = 16
_CHECKSUM_NBYTES = 4
_MAX_INDEX_NBYTES = 1 << 24
"""Largest index of a shard that is read, in bytes: of a million parts."""


class ChosenArray(Struct, frozen=True):
    """An array of a store, under the name that its tensor shall have."""

    name: str
    key: str
    """Its name in the store."""
    array: ZarrArray


class Chunk(Struct, frozen=True):
    """A chunk, or a part of a chunk that is a shard."""

    value: StoredValue
    """Where its bytes lie."""
    start: tuple[int, ...]
    """Its first element."""
    rank: int
    """The process that wrote it."""


class ChunkLister:
    """Lists the chunks of a store's arrays; close it with `stack`, which holds the file that was read last."""

    def __init__(self, store: ArrayStore, stack: ExitStack) -> None:
        self._store, self._stack = store, stack
        self._last: RegularFile | None = None

    def list(self, one: ChosenArray) -> Iterator[Chunk]:
        """Yield all chunks with elements of an array."""
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
                f"{value.nbytes:,} bytes",
                f"an index of {nbytes:,} bytes, and of {_MAX_INDEX_NBYTES:,} at most",
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
    """Check that a file is there and long enough for a value."""
    if nbytes is None:
        raise IncompleteError(
            f"{path}, with chunks of {one.name}, is missing",
            tensor=one.name,
            file=path,
            got="no such file",
            want="the file that the store's index names",
            next_step=COPY_WHOLE,
        )
    end = value.offset + value.nbytes
    if nbytes < end:
        raise corrupt_error(one, f"{path} ends early", path, got=f"{nbytes:,} bytes", want=f"at least {end:,}")


def corrupt_error(
    one: ChosenArray, problem: str, path: str, got: str | None = None, want: str | None = None
) -> CorruptError:
    """Return the error for a damaged file with chunks of an array."""
    step = "copy the checkpoint again from where it was written, or take another step"
    return Subject(one.name, None, path).make(CorruptError, problem, got, want, step)


def raise_beyond(one: ChosenArray, got: str, path: str) -> NoReturn:
    """Raise the error for elements beyond an array's edge."""
    problem = f"its shape {list(one.array.shape)} leaves out elements that the store contains"
    want = "no chunk beyond the edge of the shape, and zeros where a chunk reaches over it"
    raise corrupt_error(one, problem, path, got, want)


_WINDOW_NBYTES = 1 << 20


def check_edges(store: ArrayStore, one: ChosenArray, chunks: Sequence[Chunk]) -> None:
    """Check that nothing lies beyond an array's edge but zeros."""
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


class _StoredBytes(Struct):
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
