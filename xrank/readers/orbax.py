"""The reader of Orbax (https://github.com/google/orbax), the format of JAX, Flax and MaxText.

A checkpoint is a tree of arrays in zarr, in one OCDBT store or in a folder for each array.
"""

from __future__ import annotations

import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from io import BytesIO
from math import prod
from typing import NoReturn

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.errors import AGAIN, CorruptError, IncompleteError, option
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
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.stored_model import NO_CHECKSUM, PLAIN, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.readers.base import Hints
from xrank.readers.names import (
    ChosenPart,
    SavedTree,
    describe_families,
    is_left_out,
    part_details,
    part_notes,
    select_model,
)
from xrank.readers.records import Records, Subject, find_step, read_small
from xrank.storage import places
from xrank.storage.entries import Entry
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote
from xrank.words import list_text, plural

_RANK = re.compile(r"ocdbt\.process_(\d{1,9})/")
_MAX_METADATA_NBYTES = 1 << 20
_MAX_ARRAY_NBYTES = 1 << 62
_MAX_DIMS = 64
"""numpy's limit."""


class ArrayStore:
    """Where the values of arrays lie: in one OCDBT store, or in a file for each chunk."""

    def __init__(self, folder: str, values: Mapping[str, StoredValue]) -> None:
        self.folder = folder
        self._values, self._keys = values, sorted(values)

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of the value at a key below an array's name; None if the array has no such key."""
        return self._values.get(f"{name}/{key}")

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""
        start = f"{name}/"
        for at in range(bisect_left(self._keys, start), len(self._keys)):
            if not self._keys[at].startswith(start):
                return
            yield self._keys[at][len(start) :]

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        for key in self._keys:
            name, _, last = key.rpartition("/")
            if name and last in ARRAY_FILES.values():
                yield name

    def rank_of(self, value: StoredValue) -> int:
        """Return the process that wrote a value; 0 if it is not recorded, as outside of OCDBT."""
        found = _RANK.match(value.file)
        return 0 if found is None else int(found[1])


def open_store(folder: str) -> ArrayStore:
    """Return the store in a tree's folder."""
    names = places.list_names(folder)
    if MANIFEST in names:
        return ArrayStore(folder, read_ocdbt(folder))
    parts = sorted(name for name in names if name.startswith("ocdbt.process_"))
    if parts:
        problem = "is missing: the processes' parts were not merged, or not all was copied"
        want = f"{MANIFEST}, which Orbax writes last"
        raise Origin(os.path.join(folder, MANIFEST)).incomplete(problem, ", ".join(parts[:5]), want, COPY_WHOLE)
    found = {}
    for place, _, files in places.walk(folder, followlinks=True):
        for path in (os.path.join(place, name) for name in files):
            if places.exists(path):  # links to nothing and pipes have no bytes
                key = os.path.relpath(path, folder)
                found[key] = StoredValue(key, 0, places.nbytes_of(path))
    return ArrayStore(folder, found)


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
        # Also where a dim is 0.
        most = max(prod(max(n, 1) for n in shape) for shape in (array.shape, array.grid_shape, array.chunk_shape))
        if len(array.shape) > _MAX_DIMS or most > _MAX_ARRAY_NBYTES // dtypes.dtype(array.dtype).nbytes:
            shape, grid_shape = (quote(str(list(sizes)))[1:-1] for sizes in (array.shape, array.grid_shape))
            raise origin.corrupt(
                f"the metadata of {quote(name)} claims an array that cannot be",
                f"shape {shape} in chunks of {grid_shape}",
                f"at most {_MAX_DIMS} dims and {_MAX_ARRAY_NBYTES:,} bytes",
            )
        return array
    return None


COPY_WHOLE = f"copy the checkpoint whole from where it was written, then {AGAIN}; or use a different step"

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
    step = "copy the checkpoint again from where it was written, or use a different step"
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
        raise corrupt_error(one, f"{path} contains a damaged chunk", path, got=str(error)) from error
    if len(content) != nbytes:
        raise corrupt_error(one, f"{path} contains a chunk of a different size", path)
    return content


TREE = "_METADATA"
_STEP = "_CHECKPOINT_METADATA"
# orbax/checkpoint/path/step.py: step_prefix, step_format_fixed_length.
_STEP_NAME = re.compile(r"(?:(?:.*[_-])?(?:step|checkpoint|ckpt|iter)[_-])?(\d{1,18})")
_TREE_NAMES = frozenset({TREE, MANIFEST, "_sharding", "array_metadatas"})
"""Names of which a tree has at least one, even if others were not copied."""
_PROCESS = re.compile(r"(?:ocdbt\.)?process_(\d{1,9})")
_UNFINISHED = ".orbax-checkpoint-tmp"
"""Part of the name that a folder has until the save is complete (orbax/checkpoint/_src/path/atomicity.py)."""
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
"""Types of leaves without a value (orbax/checkpoint/_src/metadata/empty_values.py)."""
_SEQUENCE = 1
"""``key_type`` of an index (orbax/checkpoint/_src/metadata/tree.py: KeyType)."""
_INDEX = re.compile(r"(?a:-?\d{1,18})")
_MAX_NBYTES = 1 << 28


class TreeLeaf(Struct, frozen=True):
    """A leaf of a saved tree."""

    keys: tuple[str | int, ...]
    is_array: bool

    @property
    def name(self) -> str:
        """The array's name in its store."""
        return ".".join(map(str, self.keys))


class ChosenTree(Struct, frozen=True):
    """The tree of a folder that is read."""

    folder: str
    part: str | None
    """Keys of the part in the tree that the caller chose, joined by dots."""
    step: int | None
    others: tuple[str, ...] = ()
    """Items of the same step that are left out."""


def choose_tree(path: str, part: str | None) -> ChosenTree:
    """Return the tree to read: the folder itself, or the only item of a step that may be the model.

    `part` are keys that the caller chose, joined by dots; with several items, the first is an item's name.
    """
    folder = places.absolute(path)
    if _is_tree(path):
        above = os.path.dirname(folder)
        step = find_step(above, _STEP_NAME, levels=1) if _is_step(above) else None
        return ChosenTree(path, part, find_step(folder, _STEP_NAME, levels=1) if step is None else step)
    items = _find_items(path)
    names = [name for name in items if len(items) == 1 or not is_left_out(name)]
    if part is not None and len(items) > 1:
        names = [name for name in items if f"{part}.".startswith(f"{name}.")]
        if names:
            part = part.removeprefix(max(names, key=len)).removeprefix(".") or None
            names = [max(names, key=len)]
    if len(names) != 1:
        next_step = f"choose one: {' or '.join(option('part', name) for name in [*items][:12])}"
        problem = f"{len(names) or 'none'} of its items may be the model"
        raise Origin(path).usage(problem, list_text(items, 12), "one", next_step)
    others = tuple(name for name in items if name != names[0])
    return ChosenTree(items[names[0]], part, find_step(folder, _STEP_NAME, levels=1), others)


def _find_items(path: str) -> Mapping[str, str]:
    """Return the folder of each item of a step that is a tree of arrays."""
    if not _is_step(path):
        return {}
    folders = {name: os.path.join(path, name) for name in sorted(places.list_names(path))}
    return {name: folder for name, folder in folders.items() if _is_tree(folder)}


def _is_step(path: str) -> bool:
    return places.is_file(os.path.join(path, _STEP))


def _is_tree(path: str) -> bool:
    if not places.is_folder(path):
        return False
    names = places.list_names(path)
    return not _TREE_NAMES.isdisjoint(names) or any(name.startswith("ocdbt.process_") for name in names)


def read_leaves(folder: str) -> Sequence[TreeLeaf]:
    """Return the leaves of a tree, without empty ones."""
    path = os.path.join(folder, TREE)
    if not places.is_present(path):
        problem = "is missing: the checkpoint was not copied whole, or Orbax has not finished it"
        got = f"{len(places.list_names(folder))} other files and folders"
        raise Origin(path).incomplete(problem, got, TREE, COPY_WHOLE)
    origin = Origin(path)
    problem = "is not the metadata of a tree of Orbax"
    tree = Entry.parse(read_small(path, _MAX_NBYTES), lambda fault: origin.corrupt(problem, fault))
    found = []
    for entry in dict(tree["tree_metadata"].items()).values():
        keys = tuple(_read_key(part["key"], part["key_type"].value) for part in entry["key_metadata"].entries())
        kind = entry["value_metadata"]["value_type"].text()
        if kind not in _EMPTY:
            found.append(TreeLeaf(keys, is_array=kind != "string"))
    names = [leaf.name for leaf in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise origin.corrupt(f"names the array {quote(twice)} twice", quote(twice), "each name once")
    return found


def _read_key(key: Entry, kind: object) -> str | int:
    """Return a key of a tree; Orbax writes an index as a text or a number."""
    if kind != _SEQUENCE:
        return key.text()
    text = str(key.value) if type(key.value) is int and abs(key.value) < 1 << 63 else key.text()
    if not _INDEX.fullmatch(text):
        key.refuse("an index")
    return int(text)


_MAX_INLINE_NBYTES = 256 << 20
"""Most bytes of decoded chunks in memory, from values inside of metadata; tensorstore keeps only small ones there."""
_STEP_NBYTES = 1 << 20


def _locate(
    store: ArrayStore, chosen: Sequence[ChosenArray]
) -> tuple[tuple[SourceFile, ...], RecordTable, tuple[StoredShard, ...]]:
    """Return where the chunks of arrays lie; read only indices of shards, and chunks over an array's edge."""
    if any(one.array.is_compressed for one in chosen):
        import_zstandard()
    records = _Records(store.folder)
    shards = []
    with ExitStack() as stack:
        lister = ChunkLister(store, stack)
        for one in chosen:
            chunks = list(lister.list(one))
            numbers = int_array(records.add_chunk(one, chunk) for chunk in chunks)
            check_edges(store, one, chunks)
            ranks = int_array(chunk.rank for chunk in chunks)
            nests = _nests(one.array, chunks)
            shards.append(StoredShard(one.name, one.array.dtype, one.array.shape, ranks, numbers, nests))
    return tuple(records.files), records.table(), tuple(shards)


class _Records(Records):
    """Files and records; a record may be compressed in its file, or lie in the metadata."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._encoded = array("q")
        self._inline: dict[int, bytes] = {}
        self._inline_nbytes = 0

    def add_chunk(self, one: ChosenArray, chunk: Chunk) -> int:
        """Return the index of a chunk's record."""
        value, nbytes = chunk.value, one.array.chunk_nbytes
        path = os.path.join(self._folder, value.file)
        number = self._numbers.get(value.file)
        if number is None:
            if not places.exists(path):
                check_size(one, value, path, None)
            with open_regular(path) as file:
                number = self._numbers[value.file] = len(self.files)
                self.files.append(SourceFile.from_status(path, file.status))
        record, encoded = len(self._encoded), PLAIN
        if value.data is not None:
            self._inline_nbytes += nbytes
            if self._inline_nbytes > _MAX_INLINE_NBYTES:
                raise corrupt_error(
                    one,
                    f"{path} and other metadata claim chunks of {self._inline_nbytes:,} bytes inside of themselves",
                    path,
                    got=f"one of {nbytes:,} bytes in {len(value.data):,}",
                    want=f"at most {_MAX_INLINE_NBYTES:,} bytes of small values",
                )
            self._inline[record] = _decode(one, value.data, path)
        else:
            check_size(one, value, path, self.files[number].nbytes)
            if one.array.is_compressed:
                encoded = value.nbytes
            elif value.nbytes != nbytes:
                _raise_size(one, value.nbytes, path)
        self._encoded.append(encoded)
        return self._add(number, value.offset, nbytes, NO_CHECKSUM)

    def table(self, lost: Collection[str] = ()) -> RecordTable:
        """Return all records."""
        encoded = np.array(self._encoded, dtype=np.int64)
        encoded_nbytes = encoded if (encoded != PLAIN).any() else None
        return replace(super().table(lost), encoded_nbytes=encoded_nbytes, inline=self._inline)


def _decode(one: ChosenArray, data: bytes, path: str) -> bytes:
    """Return the bytes of a chunk that metadata contains."""
    nbytes = one.array.chunk_nbytes
    if one.array.is_compressed:
        try:
            stream, parts, left = open_frame(BytesIO(data)), [b""], nbytes + 1  # by the last byte a longer one shows
            # In steps: the decoder allocates all that is asked for, which may be more than the frame contains.
            while left and (part := stream.read(min(left, _STEP_NBYTES))):
                parts.append(part)
                left -= len(part)
            data = b"".join(parts)
        except import_zstandard().ZstdError as error:
            raise corrupt_error(one, f"{path} contains a damaged chunk", path, got=str(error)) from error
    if len(data) != nbytes:
        _raise_size(one, len(data), path)
    return data


def _raise_size(one: ChosenArray, nbytes: int, path: str) -> None:
    got, want = f"{nbytes:,} bytes", f"{one.array.chunk_nbytes:,} bytes"
    raise corrupt_error(one, f"{path} contains a chunk of a different size", path, got=got, want=want)


def _nests(array: ZarrArray, chunks: Sequence[Chunk]) -> NestTable:
    """Return a nest for each chunk, from its elements to the tensor's; what reaches over the edge is left out."""
    strides, inner = row_major(array.shape), row_major(array.chunk_shape)
    known: dict[tuple[int, ...], tuple[tuple[int, int, int], ...]] = {}
    rows = []
    for chunk in chunks:
        ends = zip(array.chunk_shape, array.shape, chunk.start, strict=True)
        sizes = tuple(min(size, n - low) for size, n, low in ends)
        # Once per kind of chunk: those inside of the grid are alike.
        if sizes not in known:
            known[sizes] = canonical(Nest(0, 0, tuple(zip(sizes, inner, strides, strict=True)))).loops
        y = sum(i * stride for i, stride in zip(chunk.start, strides, strict=True))
        rows.append(Nest(0, y, known[sizes]))
    return NestTable.from_nests(rows)


_VARIABLES = "params."
"""Flax keeps a module's variables by collection: MaxText's parameters lie under ``params.params``."""


class OrbaxReader:
    """The reader of Orbax's checkpoints (`xrank.readers.base.Reader`)."""

    name = "orbax"

    def recognize(self, path: str) -> str | None:
        """Return None for a tree of Orbax, or for a step with one."""
        if not places.is_folder(path):
            return "not a folder"
        folder = places.absolute(path)
        # An item of an unfinished step may be finished itself.
        if any(_UNFINISHED in os.path.basename(each) for each in (folder, os.path.dirname(folder))):
            return "a save that Orbax has not finished"
        if _is_tree(path) or _find_items(path):
            return None
        return "no _METADATA of Orbax, and no step with an item that has one"

    def read(self, path: str, hints: Hints) -> StoredModel:
        """Return where every tensor of the model lies; errors as in `Reader.read`."""
        chosen = choose_tree(path, hints.part)
        store = open_store(chosen.folder)
        tree, saved = _read_tree(chosen.folder, store)
        part = select_model(tree, chosen.part)
        keys = dict(part.tensors)
        while keys and all(name.startswith(_VARIABLES) for name in keys):
            keys = {name.removeprefix(_VARIABLES): key for name, key in keys.items()}
        arrays = [ChosenArray(name, key, saved[key]) for name, key in keys.items()]
        files, records, shards = _locate(store, arrays)
        kept_nbytes = sum(one.array.nbytes for one in arrays)
        # The number of processes that wrote the tree, if names show it.
        own = os.path.join(chosen.folder, "array_metadatas")
        names = [*places.list_names(chosen.folder), *(places.list_names(own) if places.is_folder(own) else ())]
        world_size = max((int(found[1]) + 1 for found in map(_PROCESS.fullmatch, names) if found), default=None)
        grids = ((one.name, one.array.grid) for one in arrays)
        chunks = ((name, " x ".join(map(str, grid)) if prod(grid) > 1 else "whole") for name, grid in grids)
        return StoredModel(
            format=self.name,
            path=path,
            files=files,
            records=records,
            shards=shards,
            world_size=world_size,
            part=hints.part,
            step=chosen.step,
            nbytes=int(records.stored_nbytes.sum()) + sum(map(len, records.inline.values())),
            skipped_nbytes=sum(array.nbytes for array in saved.values()) - kept_nbytes,
            notes=tuple(_notes(part, chosen)),
            details={**part_details(part), "chunks": describe_families(chunks)},
        )


def _read_tree(folder: str, store: ArrayStore) -> tuple[SavedTree, Mapping[str, ZarrArray]]:
    """Return the leaves of a tree, and its arrays, by their names in the store."""
    leaves = read_leaves(folder)
    found = {leaf.name: read_array(store, leaf.name) if leaf.is_array else None for leaf in leaves}
    for leaf in leaves:
        if leaf.is_array and found[leaf.name] is None and not is_left_out(str(leaf.keys[0] if leaf.keys else "")):
            raise Subject(leaf.name, None, folder).incomplete(
                f"{TREE} names this array, and {folder} does not contain it",
                "no .zarray and no zarr.json of it",
                f"all arrays that {TREE} names",
                f"copy the checkpoint whole from where it was written, then {AGAIN}",
            )
    unnamed = next((name for name in store.arrays() if name not in found), None)
    if unnamed is not None:
        raise Subject(unnamed, None, os.path.join(folder, TREE)).contradiction(
            f"{folder} contains this array, and {TREE} does not name it",
            f"{plural(len(found), 'name')} in {TREE}",
            "the names of all arrays",
            f"copy the checkpoint again from where it was written, then {AGAIN}; or use a different step",
        )
    arrays = {name: array for name, array in found.items() if array is not None}
    tree = SavedTree(
        os.path.join(folder, TREE),
        {name: array.shape for name, array in arrays.items()},
        [name for name in found if name not in arrays],
        {leaf.name: leaf.keys for leaf in leaves},
        lambda name: arrays[name].nbytes,
    )
    return tree, arrays


def _notes(part: ChosenPart, chosen: ChosenTree) -> list[tuple[str, str]]:
    notes = part_notes(part)
    if chosen.others:
        notes.append(("left-out", f"other items of the step were left out: {list_text(chosen.others)}"))
    if part.values:
        notes.append(("left-out", f"values that are not arrays were left out: {list_text(sorted(part.values), 3)}"))
    notes.append(("no-checksums", "Orbax records no checksums of chunks; not all damage inside one can be seen"))
    return notes
