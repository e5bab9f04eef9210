"""Locates the pieces of the chosen arrays: turns their chunks into records and nests."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import BytesIO

import numpy as np

from xrank.formats.regular_file import open_regular
from xrank.formats.zarr_array import ZarrArray
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, row_major
from xrank.plan.decoding import import_zstandard, open_frame
from xrank.plan.source import NO_CHECKSUM, PLAIN, RecordTable, SourceFile, StoredShard
from xrank.readers.orbax.chunks import ChosenArray, Chunk, ChunkLister, check_size, corrupt_error
from xrank.readers.orbax.edges import check_edges
from xrank.readers.orbax.stores import ArrayStore
from xrank.stores import places

_MAX_INLINE_NBYTES = 256 << 20
"""Most bytes of decoded chunks in memory, from values inside of metadata; tensorstore keeps only small ones there."""
_STEP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class OrbaxPieces:
    """The chosen arrays in the form of a `StoredModel`."""

    files: tuple[SourceFile, ...]
    records: RecordTable
    shards: tuple[StoredShard, ...]


def locate(store: ArrayStore, chosen: Sequence[ChosenArray]) -> OrbaxPieces:
    """Return where the chunks of arrays lie.

    It reads no data but the indices of shards and the chunks that reach over an array's edge.

    Raises:
        IncompleteError: a chunk or a file is missing.
        CorruptError: a file is too short, the index of a shard is damaged, or an array goes on beyond its shape.
        UsageError: zstandard is not installed.
    """
    if any(one.array.is_compressed for one in chosen):
        import_zstandard()
    records = _Records(store.folder)
    shards = []
    with ExitStack() as stack:
        lister = ChunkLister(store, stack)
        for one in chosen:
            chunks = list(lister.list(one))
            numbers = int_array(records.add(one, chunk) for chunk in chunks)
            check_edges(store, one, chunks)
            ranks = int_array(chunk.rank for chunk in chunks)
            nests = _nests(one.array, chunks)
            shards.append(StoredShard(one.name, one.array.dtype, one.array.shape, ranks, numbers, nests))
    return OrbaxPieces(tuple(records.files), records.table(), tuple(shards))


class _Records:
    """Files and records in the order in which they are added."""

    def __init__(self, folder: str) -> None:
        self.files: list[SourceFile] = []
        self._folder = folder
        self._numbers: dict[str, int] = {}
        self._columns = [array("q") for _ in range(5)]
        self._inline: dict[int, bytes] = {}
        self._inline_nbytes = 0

    def add(self, one: ChosenArray, chunk: Chunk) -> int:
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
        record, encoded = len(self._columns[0]), PLAIN
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
        for column, item in zip(self._columns, (number, value.offset, nbytes, NO_CHECKSUM, encoded), strict=True):
            column.append(item)
        return record

    def table(self) -> RecordTable:
        """Return all records."""
        file, offset, nbytes, crc32, encoded = (np.array(column, dtype=np.int64) for column in self._columns)
        encoded_nbytes = encoded if (encoded != PLAIN).any() else None
        return RecordTable(file, offset, nbytes, crc32, encoded_nbytes=encoded_nbytes, inline=self._inline)


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
            raise corrupt_error(one, f"{path} holds no sound chunk", path, got=str(error)) from error
    if len(data) != nbytes:
        _raise_size(one, len(data), path)
    return data


def _raise_size(one: ChosenArray, nbytes: int, path: str) -> None:
    got, want = f"{nbytes:,} bytes", f"{one.array.chunk_nbytes:,} bytes"
    raise corrupt_error(one, f"{path} holds a chunk of another size", path, got=got, want=want)


def _nests(array: ZarrArray, chunks: Sequence[Chunk]) -> NestTable:
    """Return a nest for each chunk, from its elements to the tensor's; what reaches over the edge is left out."""
    strides, inner = row_major(array.shape), row_major(array.chunk_shape)
    known: dict[tuple[int, ...], tuple[tuple[int, int, int], ...]] = {}
    rows = []
    for chunk in chunks:
        sizes = tuple(
            min(size, n - low) for size, n, low in zip(array.chunk_shape, array.shape, chunk.start, strict=True)
        )
        # Once per kind of chunk: those inside of the grid are alike.
        if sizes not in known:
            known[sizes] = canonical(Nest(0, 0, tuple(zip(sizes, inner, strides, strict=True)))).loops
        y = sum(i * stride for i, stride in zip(chunk.start, strides, strict=True))
        rows.append(Nest(0, y, known[sizes]))
    return NestTable.from_nests(rows)
