"""What a reader finds: files, byte records with their checksums, and for each tensor where its pieces lie."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.companion import Companion
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.tensor_name import TensorName

__all__ = ["NO_CHECKSUM", "RecordTable", "SourceFile", "StatedLayout", "StoredModel", "StoredShard", "merged"]

NO_CHECKSUM = -1
"""In `RecordTable.crc32`: the format holds no evidence for these bytes."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was when its metadata was read; a change after that is noticed."""

    path: str
    nbytes: int
    inode: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> SourceFile:
        """Return the file of that path with that status."""
        return cls(path, status.st_size, status.st_ino, status.st_mtime_ns)


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """Contiguous byte ranges of source files, each under one checksum; row i is record i."""

    file: IntArray
    """Index into `StoredModel.files`."""
    offset: IntArray
    """First byte in the file."""
    nbytes: IntArray
    crc32: IntArray
    """CRC-32 of the bytes as the format recorded it, or `NO_CHECKSUM`."""

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True, eq=False)
class StoredShard:
    """One tensor with all its pieces, as a table of arrays; row i is piece i.

    A piece says: the elements of this record at the nest's x addresses are the tensor's elements at its y addresses.
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


@dataclass(frozen=True, slots=True)
class StatedLayout:
    """How ranks, or a layout file, say that a tensor is cut."""

    layout: TensorLayout
    mesh: DeviceMesh
    pattern: TensorName | None = None
    """The tensor's name, where it has dims in it: ranks have names of their own for what it stands for."""
    companion: Companion | None = None
    """How it follows from another tensor, whose layout it is then."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredModel:
    """A sharded model as its reader describes it, from metadata alone."""

    format: str
    path: str
    files: tuple[SourceFile, ...]
    records: RecordTable
    shards: tuple[StoredShard, ...]
    """One for each tensor, in the order of the output."""
    absent: tuple[str, ...] = ()
    """Names of tensors that the source says it has, and of which it holds nothing."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name of the shard it is the same tensor as, where the source says so; both have a shard."""
    world_size: int | None = None
    recipe: str | None = None
    """The recipe that gave the tensors their names and fusions; None where they are the source's own."""
    step: int | None = None
    run_id: str | None = None
    config: Mapping[str, Any] | None = None
    """The model's config.json, where the source holds one."""
    args: Mapping[str, Any] | None = None
    """The trainer's own arguments, as plain values, where the source holds them (Megatron's ``args``)."""
    nbytes: int = 0
    """Bytes of the source's files that belong to the model."""
    skipped_nbytes: int = 0
    """Bytes left out on purpose: optimizer states and the like."""
    padding_dropped: Mapping[str, int] = field(default_factory=dict)
    """Name -> rows of padding that a recipe cut off its end."""
    notes: tuple[tuple[str, str], ...] = ()
    """(code, message) pairs for the report."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What `inspect` shows besides, by name."""
    layouts: Mapping[str, Sequence[StatedLayout]] = field(default_factory=dict)
    """Name -> what is said of how it is cut, each once; where a reader was asked for it, and under its own names."""


def merged(a: StoredModel, b: StoredModel, prefix: str) -> StoredModel:
    """Return one model of both, b's tensors under names that begin with `prefix`: for comparing the two."""
    shards = [
        StoredShard(prefix + s.name, s.dtype, s.shape, s.rank, s.record + len(a.records), s.nests) for s in b.shards
    ]
    records = RecordTable(
        np.concatenate((a.records.file, b.records.file + len(a.files))),
        np.concatenate((a.records.offset, b.records.offset)),
        np.concatenate((a.records.nbytes, b.records.nbytes)),
        np.concatenate((a.records.crc32, b.records.crc32)),
    )
    return replace(a, files=(*a.files, *b.files), records=records, shards=(*a.shards, *shards))
