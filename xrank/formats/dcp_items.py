"""Read the items of torch DCP's files: the place of each tensor's bytes, and their checksum."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod

import numpy as np
from msgspec import Struct

from xrank.errors import XrankError
from xrank.formats.pickles import inert_error
from xrank.formats.safetensors_header import SafetensorsHeader, read_header
from xrank.formats.torch_archive import ArchivedTensor, IntArray, open_item, read_archive_in, read_members
from xrank.storage.entries import Entry
from xrank.storage.regular_file import Origin, RegularFile, quote, refuse_pointer

_KEY = "DCP_SHARDING_INFO"


def read_saved_offsets(header: SafetensorsHeader, origin: Origin) -> dict[str, tuple[int, ...]]:
    """Return name -> the first index in the whole tensor of the file's piece."""
    text = header.metadata.get(_KEY)
    if text is None:
        raise origin.corrupt(f"its header has no {_KEY}: torch did not write it as a shard")
    recorded = Entry.parse(text, lambda fault: origin.corrupt(f"its {_KEY} is damaged", got=fault))
    found = {name: entry["saved_offsets"] for name, entry in recorded.items()}
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if found.keys() != shapes.keys():
        name = sorted(found.keys() ^ shapes.keys())[0]
        raise origin.corrupt(
            f"its {_KEY} and its tensors disagree about {quote(name)}",
            got=f"{len(found)} names there",
            want=f"the {len(shapes)} names of the tensors",
        )
    for name, offsets in found.items():
        if len(offsets.counts(below=1 << 62)) != len(shapes[name]):
            offsets.refuse(f"{len(shapes[name])} offsets")
    return {name: offsets.counts() for name, offsets in found.items()}


_WHOLE_NBYTES = 1 << 16
"""Items up to this many bytes are read whole, larger ones at both ends."""
_MAX_END_NBYTES = 1 << 13
_USUAL_HEAD_NBYTES, _USUAL_TAIL_NBYTES = 2 << 10, 4 << 10
_ANNOUNCED = 256
"""Items whose ends are read at the same time, where each read takes long."""
_NO_CHECKSUM = -1


class ItemKind(Struct, frozen=True):
    """The type and view of a piece, as its archive records them."""

    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    storage_offset: int
    """Offset from the record's first byte, in elements."""


class _Pattern(Struct, frozen=True):
    """A parsed item: the bytes that all other items of its kind must share."""

    kind: int
    head: bytes
    """The bytes before the tensor's first byte."""
    nbytes: int
    """Bytes of the tensor's record."""
    tail_nbytes: int
    fixed: bytes
    """The bytes of the tail that must be equal."""
    spans: tuple[slice, ...]
    """The ranges of `fixed` in the tail."""
    crc_at: tuple[int, int]
    """The two offsets of the record's checksum in the tail: after the record, and in the directory."""
    id_crc_at: tuple[int, int] | None
    """The two offsets of the checksum of the archive's id in the tail; the id is a hash of all checksums. xrank writes
    archives without it."""


class ItemReader:
    """Reads items. One reader serves all files of a checkpoint, because patterns from one file match in others."""

    def __init__(self) -> None:
        self.kinds: list[ItemKind] = []
        self._numbers: dict[ItemKind, int] = {}
        self._patterns: dict[int, list[_Pattern]] = {}

    def read(self, file: RegularFile, starts: Sequence[int], lengths: Sequence[int], names: Sequence[str]) -> IntArray:
        """Return for each item [n, 4]: index into `kinds`; first byte of its record in the file; bytes; checksum or -1.

        Items begin at `starts`, preferably in rising order; `names` are their tensors', for errors.
        """
        rows = np.empty((len(starts), 4), dtype=np.int64)
        for k, (start, length, name) in enumerate(zip(starts, lengths, names, strict=True)):
            if k % _ANNOUNCED == 0:
                file.prefetch(_ends(starts[k : k + _ANNOUNCED], lengths[k : k + _ANNOUNCED]))
            try:
                if start + length > file.nbytes:
                    refuse_pointer(file)
                    raise file.origin.corrupt(
                        "is cut short, or the metadata belongs to a different file",
                        got=f"{file.nbytes} bytes",
                        want=f"at least {start + length} bytes",
                    )
                rows[k] = self._match(file, start, length) or self._parse(file, start, length)
            except XrankError as error:
                error.about(f"the item of {quote(name)[1:-1]} at byte {start:,}", tensor=name)
                raise
        return rows

    def number_of(self, kind: ItemKind) -> int:
        """Return the kind's index into `kinds`."""
        number = self._numbers.setdefault(kind, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(kind)
        return number

    def _match(self, file: RegularFile, start: int, length: int) -> tuple[int, int, int, int] | None:
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
            # The id itself may differ: no reader uses it.
            if all(
                tail[one : one + 4] == tail[other : other + 4]
                for one, other in filter(None, (pattern.crc_at, pattern.id_crc_at))
            ):
                return pattern.kind, start + head_nbytes, pattern.nbytes, int.from_bytes(crc, "little")
        return None

    def _parse(self, file: RegularFile, start: int, length: int) -> tuple[int, int, int, int]:
        archive = read_archive_in(file, start=start, nbytes=length)
        tensor = archive.value
        if not isinstance(tensor, ArchivedTensor):
            raise inert_error(tensor, file.origin, "an item that should be a tensor")
        kind = ItemKind(tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)
        number = self.number_of(kind)
        record = archive.records[tensor.key]
        if archive.has_checksums:
            pattern = _pattern_of(file, start, length, number, record.offset - start, record.nbytes)
            if pattern is not None:
                self._patterns.setdefault(length, []).append(pattern)
        return number, record.offset, record.nbytes, record.crc32 if archive.has_checksums else _NO_CHECKSUM


def _ends(starts: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the usual ends of items, or of whole small ones."""
    for start, length in zip(starts, lengths, strict=True):
        if length <= _WHOLE_NBYTES:
            yield start, length
        else:
            yield start, _USUAL_HEAD_NBYTES
            yield start + length - _USUAL_TAIL_NBYTES, _USUAL_TAIL_NBYTES


def _pattern_of(file: RegularFile, start: int, length: int, kind: int, payload: int, nbytes: int) -> _Pattern | None:
    """Return the bytes that a valid archive shares with others of its kind; None for an unknown arrangement."""
    tail_at = payload + nbytes
    if max(payload, length - tail_at) > _MAX_END_NBYTES or not nbytes:
        return None
    members = [*read_members(open_item(file, start, length))]
    (own,) = (member for member in members if member.offset == payload)
    marks = [member for member in members if member.name.endswith("/.data/serialization_id")]
    num_data = sum(member.name.rpartition("/")[0].endswith("data") for member in members)
    if len(marks) > 1 or num_data != 1 + len(marks):
        return None
    head, tail = file.read(start, payload), file.read(start + tail_at, length - tail_at)
    crc_at, id_crc_at = (_places(tail, member.crc32) if member else None for member in (own, *marks, None)[:2])
    if crc_at is None or (marks and (id_crc_at is None or marks[0].offset < tail_at)):
        return None
    ids = [(mark.offset - tail_at, mark.offset - tail_at + mark.nbytes) for mark in marks]
    cuts = sorted([*((at, at + 4) for at in (*crc_at, *(id_crc_at or ()))), *ids])
    edges = [0, *(edge for cut in cuts for edge in cut), len(tail)]
    if edges != sorted(edges):
        return None
    spans = tuple(slice(edges[k], edges[k + 1]) for k in range(0, len(edges), 2))
    fixed = b"".join(tail[span] for span in spans)
    return _Pattern(kind, head, nbytes, len(tail), fixed, spans, crc_at, id_crc_at)


def _places(tail: bytes, crc32: int) -> tuple[int, int] | None:
    """Return the two offsets of a checksum in the tail; None unless there are exactly two."""
    text = struct.pack("<I", crc32)
    first = tail.find(text)
    second = tail.find(text, first + 1)
    return (first, second) if 0 <= first < second and tail.find(text, second + 1) < 0 else None


# ---- safetensors


def is_safetensors(file: RegularFile, start: int) -> bool:
    """Return whether a safetensors file begins at that byte."""
    return start + 9 <= file.nbytes and file.read(start + 8, 1) == b"{"


def read_safetensors_part(file: RegularFile, start: int) -> dict[str, tuple[ItemKind, int, int, tuple[int, ...]]]:
    """Return the pieces in the safetensors file from that byte to the end of the file, by name.

    Each has its kind, first byte in the file, number of bytes, and first index in each dimension, as the file records
    it (``torch/distributed/checkpoint/filesystem.py: _write_files_from_queue``).
    """
    try:
        header = read_header(file.origin.path, start=start)
    except XrankError as error:
        error.about(rank=file.origin.rank)
        raise
    found = {}
    offsets = read_saved_offsets(header, file.origin)
    for tensor in header.tensors:
        strides = tuple(prod(tensor.shape[k + 1 :]) for k in range(len(tensor.shape)))
        kind, at = ItemKind(tensor.dtype, tensor.shape, strides, 0), header.data_start + tensor.start
        found[tensor.name] = (kind, at, tensor.end - tensor.start, offsets[tensor.name])
    return found
