"""The stored model of a reader: files, byte records with their checksums, and the pieces of each tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.layout_map import Companion
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.tensor_name import TensorName
from xrank.storage.client import ObjectStatus

NO_CHECKSUM = -1
"""In `RecordTable.crc32`: the format records no checksum of these bytes."""

LOST = -2
"""In `RecordTable.crc32`: the bytes are lost, because their file is missing, damaged or of another save. As a file's
`SourceFile.nbytes`: none of its bytes is read."""

_READ = 1 << 19
"""Elements of a decoded matrix that are read at once: of 16 bits, those of a window of an output file."""

PLAIN = -1
"""In `RecordTable.encoded_nbytes`: the file contains the record's bytes as they are."""


class SourceFile(Struct, frozen=True):
    """Size, inode and time of a file when its metadata was read, to detect later changes.

    An object of a store has no inode and a version in the place of the time.
    """

    path: str
    nbytes: int
    inode: int
    mtime_ns: int
    in_store: ObjectStatus | None = None

    @classmethod
    def from_status(cls, path: str, status: os.stat_result | ObjectStatus) -> SourceFile:
        """Return the file or object at a path with that status."""
        if isinstance(status, ObjectStatus):
            return cls(path, status.nbytes, 0, 0, status)
        return cls(path, status.st_size, status.st_ino, status.st_mtime_ns)

    @classmethod
    def lost(cls, path: str) -> SourceFile:
        """Return a file of which nothing is read."""
        return cls(path, LOST, 0, 0)

    @property
    def identity(self) -> tuple[object, ...]:
        """Values that differ for a file with another name or content, for digests of a plan."""
        changing = (self.inode, self.mtime_ns) if self.in_store is None else (self.in_store.version,)
        return (os.path.basename(self.path), self.nbytes, *changing)


class RecordedHash(Struct, frozen=True):
    """The hash of a whole file, as a list beside it records it."""

    path: str
    hash_name: str
    """Name of the algorithm, as `hashlib` has it, or ``xxh3_128``."""
    digest: bytes
    listed_in: str
    """Path of the list."""
    tensors: tuple[tuple[str, str, tuple[int, ...], str, int, int], ...] = ()
    """Name, element type, shape, file, first byte and number of bytes of each tensor of a folder: the digest is then
    that of all of these (`xrank.formats.deltas.state_digest`), and not of a file."""


class QuantizedPart(Struct, frozen=True):
    """The codes, scales or constants of a quantized matrix: one record, which no checksum covers."""

    record: int
    dtype: str
    """Safetensors name of the element type."""
    block_rows: int
    """Rows of a matrix that one row of the part is for; 0: all of it is for every row of all matrices."""
    block_columns: int
    """Columns of a matrix that one element of the part is for; 0: all."""


class QuantizedMatrix(Struct, frozen=True):
    """A matrix, or a stack of matrices with their rows one after another, in the form in which it is quantized."""

    encoding: Mapping[str, Any]
    """Fields of the `xrank.engine.encodings.Encoding` that decodes it."""
    dtype: str
    """Safetensors name of the type to which the decoded values are rounded."""
    shape: tuple[int, int, int]
    """Matrices, rows and columns of each."""
    parts: tuple[QuantizedPart, ...]
    """In the order in which the encoding has them."""
    is_transposed: bool = False
    """Whether the decoded record contains the transpose of each matrix."""

    @property
    def num_reads(self) -> int:
        """About how many times its parts are read: the transpose is made of some columns at a time, of all rows."""
        _, rows, columns = self.shape
        return -(-rows * columns // _READ) if self.is_transposed else 1

    def shift(self, num_records: int) -> QuantizedMatrix:
        """Return the matrix where so many records come before its own."""
        return replace(self, parts=tuple(replace(p, record=p.record + num_records) for p in self.parts))


class RecordChange(Struct, frozen=True):
    """The change of a record from one version of a model to the next, as `xrank.formats.deltas` has it."""

    body: int
    """The record with the compressed body."""
    encoding: str
    checksum_kind: str
    checksum: str
    """Checksum of all bytes of the changed record."""


class RecordTable(Struct, frozen=True, eq=False):
    """Contiguous byte ranges of source files, each under one checksum; row i is record i."""

    file: IntArray
    """Index into `StoredModel.files`."""
    offset: IntArray
    """First byte in the file."""
    nbytes: IntArray
    crc32: IntArray
    """CRC-32 of the bytes as the format recorded it, or `NO_CHECKSUM`."""
    encoded_nbytes: IntArray | None = None
    """Bytes of each record in its file where they are a valid zstd frame, or `PLAIN`; None: all records are plain."""
    inline: Mapping[int, bytes] = field(default_factory=dict)
    """Record -> its bytes, for records inside of compressed metadata; `offset` is that of the metadata."""
    quantized: Mapping[int, QuantizedMatrix] = field(default_factory=dict)
    """Record -> the matrix whose decoded values it has, in no file; `file` and `offset` are those of the codes."""
    changed: Mapping[int, tuple[RecordChange, ...]] = field(default_factory=dict)
    """Record -> the changes of the bytes that its file has, in the order in which they are applied."""

    def __len__(self) -> int:
        return len(self.file)

    @property
    def stored_nbytes(self) -> IntArray:
        """Bytes of each record in its file; 0 for a record inside of metadata, or decoded from other records."""
        found = self.nbytes.copy()
        if self.encoded_nbytes is not None:
            is_encoded = self.encoded_nbytes != PLAIN
            found[is_encoded] = self.encoded_nbytes[is_encoded]
        found[[*self.inline, *self.quantized]] = 0
        return found

    def is_lost(self, records: IntArray) -> npt.NDArray[np.bool_]:
        """Return a mask of the records whose bytes are lost, or some of those that they are decoded from."""
        found: npt.NDArray[np.bool_] = self.crc32[records] == LOST
        if self.quantized:  # each tensor asks: only its own records are looked at
            found |= [
                record in self.quantized and bool((self.crc32[self.find_stored([record])] == LOST).any())
                for record in records.tolist()
            ]
        return found

    def find_stored(self, records: Sequence[int] | IntArray) -> list[int]:
        """Return the records in files that these are made of: themselves or parts of matrices, and their changes."""
        found: list[int] = []
        for record in records:
            matrix = self.quantized.get(int(record))
            for stored in [int(record)] if matrix is None else [part.record for part in matrix.parts]:
                found += [stored, *(change.body for change in self.changed.get(stored, ()))]
        return found

    def join(self, other: RecordTable, num_files: int) -> RecordTable:
        """Return these records and those of another table, whose files follow these `num_files` files."""
        encoded = [(each.encoded_nbytes, len(each)) for each in (self, other)]
        is_plain = all(nbytes is None for nbytes, _ in encoded)
        own, others = (np.full(count, PLAIN) if nbytes is None else nbytes for nbytes, count in encoded)
        return RecordTable(
            np.concatenate((self.file, other.file + num_files)),
            np.concatenate((self.offset, other.offset)),
            np.concatenate((self.nbytes, other.nbytes)),
            np.concatenate((self.crc32, other.crc32)),
            encoded_nbytes=None if is_plain else np.concatenate((own, others)),
            inline={**self.inline, **{record + len(self): data for record, data in other.inline.items()}},
            quantized={**self.quantized, **{r + len(self): m.shift(len(self)) for r, m in other.quantized.items()}},
            changed={
                **self.changed,
                **{
                    record + len(self): tuple(replace(one, body=one.body + len(self)) for one in changes)
                    for record, changes in other.changed.items()
                },
            },
        )


class StoredShard(Struct, frozen=True, eq=False):
    """One tensor with all its pieces, as a table of arrays; row i is piece i.

    A piece maps the elements of its record at the nest's x addresses to the tensor's elements at its y addresses.
    x counts elements from the record's first byte, y elements of the row-major global tensor.
    """

    name: str
    dtype: str
    """Safetensors name of the element type."""
    shape: tuple[int, ...]
    """Global shape."""
    rank: IntArray
    """The rank that left the piece."""
    record: IntArray
    """Index into `StoredModel.records`."""
    nests: NestTable
    factor: float = 1.0
    """Number by which each element is multiplied after it is read, in float32, or float64 for F64."""
    added: int = 0
    """Number that is then added to it."""

    @classmethod
    def from_record(cls, name: str, dtype: str, shape: tuple[int, ...], record: int, rank: int = 0) -> StoredShard:
        """Return a tensor that is all of one record, in order; one without an element has no piece."""
        nests = NestTable.in_order(prod(shape))
        ranks, records = (int_array([one] * len(nests)) for one in (rank, record))
        return cls(name, dtype, shape, ranks, records, nests)


class StatedLayout(Struct, frozen=True):
    """Layout of a tensor as ranks or a layout file declare it."""

    layout: TensorLayout
    mesh: DeviceMesh
    pattern: TensorName | None = None
    """Name with dims in it, if the tensor has one: each rank then has names of its own for its parts."""
    companion: Companion | None = None
    """Rule by which the tensor follows from another one, whose layout `layout` then is."""


class StoredModel(Struct, frozen=True, eq=False):
    """A sharded model as its reader describes it, from metadata alone."""

    format: str
    path: str
    files: tuple[SourceFile, ...]
    records: RecordTable
    shards: tuple[StoredShard, ...]
    """One for each tensor, in the order of the output."""
    absent: tuple[str, ...] = ()
    """Names of tensors that the source lists without any of their elements."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name of the shard with the same values, as the source records it; both have a shard."""
    world_size: int | None = None
    part: str | None = None
    """Keys of the part of the source that the caller chose; None if the reader knows no parts or nothing was chosen."""
    recipe: str | None = None
    """Recipe that gave the tensors their names and fusions; None if they are the source's own."""
    step: int | None = None
    run_id: str | None = None
    config: Mapping[str, Any] | None = None
    """The model's config.json, if the source contains one."""
    args: Mapping[str, Any] | None = None
    """The trainer's arguments as plain values, if the source contains them (Megatron's ``args``)."""
    nbytes: int = 0
    """Bytes of the source's files that belong to the model."""
    skipped_nbytes: int = 0
    """Bytes left out on purpose: optimizer states and the like."""
    padding_dropped: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of padding rows that a recipe removed from its end."""
    notes: tuple[tuple[str, str], ...] = ()
    """(code, message) pairs for the report."""
    hashes: tuple[RecordedHash, ...] = ()
    """Hashes of whole files, which every command that reads all tensors compares while bytes move."""
    roundings: tuple[StoredShard, ...] = ()
    """Tensors that the source also holds in a type to which they are rounded, in files that record no step."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for `inspect`, by name."""
    is_attribute: bool = False
    """Whether the model is an attribute of the module that has the names, as of a LightningModule."""
    layouts: Mapping[str, Sequence[StatedLayout]] = field(default_factory=dict)
    """Name of the source -> its distinct declared layouts; filled if the hints ask for it."""


def merge_models(a: StoredModel, b: StoredModel, prefix: str) -> StoredModel:
    """Return one model with the tensors of both, b's under names that begin with `prefix`, to compare them."""
    shards = [replace(shard, name=prefix + shard.name, record=shard.record + len(a.records)) for shard in b.shards]
    records = a.records.join(b.records, len(a.files))
    hashes = (*a.hashes, *b.hashes)
    return replace(a, files=(*a.files, *b.files), records=records, shards=(*a.shards, *shards), hashes=hashes)
