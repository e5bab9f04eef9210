"""The items of torch DCP's ``.distcp`` files: where in each the tensor's bytes lie, and their checksum.

An item is a whole ``torch.save`` archive of one tensor. Those of pieces alike in shape and type are the same bytes but
for the tensor, its checksum and an id, so only the first of a kind is parsed; each other one is compared with it byte
for byte, by one read of its ends, and read in full where it differs. Files of
``SerializationFormat.SAFETENSORS`` hold one safetensors file behind their other items instead.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from xrank.errors import XrankError
from xrank.formats.regular_file import RegularFile, shown
from xrank.formats.safetensors_header import read_header
from xrank.formats.torch_archive import ArchivedTensor, read_archive_in
from xrank.formats.zip_index import open_item, read_members
from xrank.layout.nest_table import IntArray

__all__ = ["ItemKind", "ItemReader", "SafetensorsPart", "is_safetensors", "read_safetensors_part"]

_WHOLE_NBYTES = 1 << 16
"""Items up to this size are read at once, larger ones at both ends."""
_MAX_END_NBYTES = 1 << 13
_NO_CHECKSUM = -1


@dataclass(frozen=True, slots=True)
class ItemKind:
    """What a piece is by its own account."""

    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    storage_offset: int
    """In elements from the record's first byte."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """An item that was parsed: all that the others of its kind must have in common with it."""

    kind: int
    head: bytes
    """Up to the tensor's first byte."""
    nbytes: int
    """Of the tensor's record."""
    tail_nbytes: int
    fixed: bytes
    """The tail less what differs."""
    spans: tuple[slice, ...]
    """Where in the tail `fixed` comes from."""
    crc_at: tuple[int, int]
    """Where in the tail the record's checksum stands: behind the record, and in the directory."""
    id_crc_at: tuple[int, int]
    """Where in the tail the checksum of the archive's id stands; the id is a hash of all checksums."""


class ItemReader:
    """Reads items; one for all files of a checkpoint, since what it learns of one file holds for the others."""

    def __init__(self) -> None:
        self.kinds: list[ItemKind] = []
        self._numbers: dict[ItemKind, int] = {}
        self._patterns: dict[int, list[_Pattern]] = {}

    def read(self, file: RegularFile, starts: Sequence[int], lengths: Sequence[int], names: Sequence[str]) -> IntArray:
        """Return for each item [n, 4]: index into `kinds`; first byte of its record in the file; bytes; checksum or -1.

        Args:
            file: the open file.
            starts: first byte of each item, best in rising order.
            lengths: bytes of each item.
            names: of the tensors they belong to, for the errors.

        Raises:
            CorruptError, UnsafeError: an item is damaged, or is no tensor.
        """
        rows = np.empty((len(starts), 4), dtype=np.int64)
        for k, (start, length, name) in enumerate(zip(starts, lengths, names, strict=True)):
            try:
                if start + length > file.nbytes:
                    raise file.origin.corrupt(
                        "is cut short, or the metadata is of another file",
                        got=f"{file.nbytes} bytes",
                        want=f"at least {start + length} bytes",
                    )
                rows[k] = self._matched(file, start, length) or self._parsed(file, start, length)
            except XrankError as error:
                error.about(f"the item of {shown(name)[1:-1]} at byte {start:,}", tensor=name)
                raise
        return rows

    def number_of(self, kind: ItemKind) -> int:
        """Return the kind's index into `kinds`."""
        number = self._numbers.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def _matched(self, file: RegularFile, start: int, length: int) -> tuple[int, int, int, int] | None:
        patterns = self._patterns.get(length)
        if patterns is None:
            return None
        whole = file.read(start, length) if length <= _WHOLE_NBYTES else None
        for pattern in patterns:
            head_nbytes, tail_at = len(pattern.head), length - pattern.tail_nbytes
            if whole is None:
                head, tail = file.read(start, head_nbytes), file.read(start + tail_at, pattern.tail_nbytes)
            else:
                head, tail = whole[:head_nbytes], whole[tail_at:]
            if head != pattern.head or b"".join([tail[span] for span in pattern.spans]) != pattern.fixed:
                continue
            crc = tail[pattern.crc_at[0] : pattern.crc_at[0] + 4]
            id_crc = tail[pattern.id_crc_at[0] : pattern.id_crc_at[0] + 4]
            # The id itself may be any: nothing is read by it.
            if (
                crc == tail[pattern.crc_at[1] : pattern.crc_at[1] + 4]
                and id_crc == tail[pattern.id_crc_at[1] : pattern.id_crc_at[1] + 4]
            ):
                return pattern.kind, start + head_nbytes, pattern.nbytes, int.from_bytes(crc, "little")
        return None

    def _parsed(self, file: RegularFile, start: int, length: int) -> tuple[int, int, int, int]:
        archive = read_archive_in(file, start=start, nbytes=length)
        tensor = archive.value
        if not isinstance(tensor, ArchivedTensor):
            raise file.origin.unsafe("an item that should be a tensor is something else", got=repr(tensor)[:100])
        kind = ItemKind(tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)
        number = self.number_of(kind)
        record = archive.records[tensor.key]
        if archive.has_checksums:
            pattern = _pattern_of(file, start, length, number, record.offset - start, record.nbytes)
            if pattern is not None:
                self._patterns.setdefault(length, []).append(pattern)
        return number, record.offset, record.nbytes, record.crc32 if archive.has_checksums else _NO_CHECKSUM


def _pattern_of(file: RegularFile, start: int, length: int, kind: int, payload: int, nbytes: int) -> _Pattern | None:
    """Return what an archive that was found sound has in common with others; None if it is laid out in another way."""
    tail_at = payload + nbytes
    if max(payload, length - tail_at) > _MAX_END_NBYTES or not nbytes:
        return None
    members = read_members(open_item(file, start, length))
    (own,) = (member for member in members if member.offset == payload)
    marks = [member for member in members if member.name.endswith("/.data/serialization_id")]
    if len(marks) != 1 or sum(member.name.rpartition("/")[0].endswith("data") for member in members) != 2:
        return None
    head, tail = file.read(start, payload), file.read(start + tail_at, length - tail_at)
    id_at = marks[0].offset - tail_at
    crc_at, id_crc_at = (_places(tail, member.crc32) for member in (own, marks[0]))
    if crc_at is None or id_crc_at is None or id_at < 0:
        return None
    cuts = sorted([*((at, at + 4) for at in (*crc_at, *id_crc_at)), (id_at, id_at + marks[0].nbytes)])
    edges = [0, *(edge for cut in cuts for edge in cut), len(tail)]
    if edges != sorted(edges):
        return None
    spans = tuple(slice(edges[k], edges[k + 1]) for k in range(0, len(edges), 2))
    fixed = b"".join(tail[span] for span in spans)
    return _Pattern(kind, head, nbytes, len(tail), fixed, spans, crc_at, id_crc_at)


def _places(tail: bytes, crc32: int) -> tuple[int, int] | None:
    """Return where a checksum stands in the tail, which has to be twice."""
    text = struct.pack("<I", crc32)
    first = tail.find(text)
    second = tail.find(text, first + 1)
    return (first, second) if 0 <= first < second and tail.find(text, second + 1) < 0 else None


# ---- safetensors


@dataclass(frozen=True, slots=True)
class SafetensorsPart:
    """The tensors at the end of a file of ``SerializationFormat.SAFETENSORS``."""

    places: Mapping[str, tuple[ItemKind, int, int]]
    """Name -> what it is, its first byte in the file, its bytes."""
    offsets: Mapping[str, tuple[int, ...]]
    """Name -> the piece's first index in each dimension, as the file itself says."""


def is_safetensors(file: RegularFile, start: int) -> bool:
    """Say whether a safetensors file begins at that byte."""
    return start + 9 <= file.nbytes and file.read(start + 8, 1) == b"{"


def read_safetensors_part(file: RegularFile, start: int) -> SafetensorsPart:
    """Read the header of the tensors that begin at that byte and go up to the file's end.

    The facts are ``torch/distributed/checkpoint/filesystem.py: _write_files_from_queue``.

    Raises:
        CorruptError: the header is damaged.
    """
    try:
        header = read_header(file.origin.path, start=start)
    except XrankError as error:
        error.about(rank=file.origin.rank)
        raise
    places = {}
    for tensor in header.tensors:
        strides = tuple(prod(tensor.shape[k + 1 :]) for k in range(len(tensor.shape)))
        kind = ItemKind(tensor.dtype, tensor.shape, strides, 0)
        places[tensor.name] = (kind, header.data_start + tensor.start, tensor.end - tensor.start)
    try:
        told: Any = json.loads(header.metadata.get("DCP_SHARDING_INFO", ""))
        offsets = {name: tuple(told[name]["saved_offsets"]) for name in places}
        if not all(type(part) is int for low in offsets.values() for part in low):
            raise ValueError("an offset that is no number")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise file.origin.corrupt(
            "its header does not say which piece of each tensor it holds",
            got=shown(str(error)),
            want="DCP_SHARDING_INFO",
        ) from None
    return SafetensorsPart(places, offsets)
