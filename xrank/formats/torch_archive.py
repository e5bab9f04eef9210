"""Read the output of ``torch.save`` without torch (its tree, and checked views on storages' bytes), and lay it out.

The zip's format facts are PKWARE's APPNOTE.TXT 6.3.10 and torch's writer (``caffe2/serialize/inline_container.cc`` over
``third_party/miniz``): every member is stored uncompressed, an extra field pads its local header to align the payload,
and a data descriptor follows. So the members cover the archive from its first byte to the central directory without
gaps. Other zips are refused, so there are no hidden or shared bytes; every number that is stored twice is compared.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from isal import isal_zlib
from msgspec import Struct
from numpy.lib.stride_tricks import sliding_window_view

from xrank.dtypes import by_torch_name, dtype
from xrank.errors import CorruptError, UsageError
from xrank.formats.pickles import (
    MAX_PICKLE_NBYTES,
    PLAIN_BUILDERS,
    Blank,
    Builder,
    InertRecord,
    PickleFamilies,
    read_pickle,
)
from xrank.storage.client import ObjectStatus
from xrank.storage.regular_file import Origin, RegularFile, open_regular, quote, refuse_pointer

IntArray: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

_TAIL_NBYTES = 1 << 16
_MAX_DIRECTORY_NBYTES = 1 << 29

_END = struct.Struct("<4s4H2LH")  # APPNOTE 4.3.16
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sLQL")  # 4.3.15
_ENTRY = struct.Struct("<4s6H3L5H2L")  # 4.3.12
_ENTRY_LENGTHS = struct.Struct("<4s24x3H12x")
"""An entry's signature, and the lengths in bytes of its name, extra field and comment."""
_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")  # 4.3.9; miniz always signs it

_ENCRYPTED = 0x1 | 0x40 | 0x2000  # 4.4.4: bits 0, 6 and 13
_HAS_DESCRIPTOR = 0x8  # 4.4.4: bit 3, a data descriptor follows the payload
_WIDE = 0xFFFFFFFF
_PROGRAM = "/code/__torch__"
_LOCAL_SIGNATURE, _DESCRIPTOR_SIGNATURE = (int.from_bytes(text, "little") for text in (b"PK\3\4", b"PK\7\x08"))

# The fields of many entries, local headers and descriptors at once.
_ENTRY_ROW = np.dtype(
    {
        "names": ["flags", "method", "crc32", "packed", "nbytes", "name", "extra", "disk", "header"],
        "formats": ["<u2", "<u2", "<u4", "<u4", "<u4", "<u2", "<u2", "<u2", "<u4"],
        "offsets": [8, 10, 16, 20, 24, 28, 30, 34, 42],
        "itemsize": _ENTRY.size,
    }
)
_LOCAL_ROW = np.dtype(
    {
        "names": ["signature", "flags", "method", "name", "extra"],
        "formats": ["<u4", "<u2", "<u2", "<u2", "<u2"],
        "offsets": [0, 6, 8, 26, 28],
        "itemsize": _LOCAL.size,
    }
)
_DESCRIPTOR_ROWS = [
    np.dtype([("signature", "<u4"), ("crc32", "<u4"), ("packed", width), ("nbytes", width)]) for width in ("<u4", "<u8")
]
_GAP_NBYTES = 8 << 10
"""Local headers that are closer than this are read together."""
_BLOCK_NBYTES = 1 << 20
"""Bytes that are read before the headers in them are taken out."""
_MOST_READS = 1000
"""Most reads of local headers in an archive with checksums; beyond it, the directory shows where payloads lie."""
_MOST_NBYTES = 1 << 61
"""A larger number in a zip is taken for this one, which is beyond every archive; sums of two do not overflow."""


class ZipMember(Struct, frozen=True):
    """A stored member; ``offset`` is the first byte of its payload from the archive's start."""

    name: str
    offset: int
    nbytes: int
    crc32: int


class ZipMembers(Struct, frozen=True, eq=False):
    """The members of an archive, in the order of their bytes; row i is member i, as in `ZipMember`."""

    rows: Mapping[str, int]
    """Name -> row."""
    offset: IntArray
    nbytes: IntArray
    crc32: IntArray

    def __iter__(self) -> Iterator[ZipMember]:
        columns = (self.offset.tolist(), self.nbytes.tolist(), self.crc32.tolist())
        return map(ZipMember, self.rows, *columns)


class ItemBytes(Struct, frozen=True):
    """The bytes of one archive inside a file, with its tail in memory; offsets count from the archive's start."""

    file: RegularFile
    start: int
    nbytes: int
    tail: bytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes, or raise CorruptError."""
        if offset + nbytes > self.nbytes:
            want = f"at least {quote(offset + nbytes)} bytes"
            raise self.file.origin.corrupt("the archive ends early", f"{self.nbytes} bytes", want)
        in_tail = offset - (self.nbytes - len(self.tail))
        if in_tail >= 0:
            return self.tail[in_tail : in_tail + nbytes]
        return self.file.read(self.start + offset, nbytes)


def open_item(file: RegularFile, start: int = 0, nbytes: int | None = None) -> ItemBytes:
    """Open the archive at these bytes of a file: the whole file, or an item of a ``.distcp``."""
    if nbytes is None:
        nbytes = file.nbytes - start
    if start < 0 or nbytes < 0 or start + nbytes > file.nbytes:
        want = f"bytes {start} to {start + nbytes}"
        raise file.origin.corrupt("the item is outside the file", f"{file.nbytes} bytes", want)
    tail_nbytes = min(nbytes, _TAIL_NBYTES)
    return ItemBytes(file, start, nbytes, file.read(start + nbytes - tail_nbytes, tail_nbytes))


def read_members(item: ItemBytes) -> ZipMembers:
    """Read all members, in the order of their bytes; refuse an archive that is arranged differently than torch's."""
    origin = item.file.origin
    offset, nbytes, count = _directory(item)
    # An entry takes at least its 46 fixed bytes, which bounds the claimed count.
    if nbytes > _MAX_DIRECTORY_NBYTES or count * _ENTRY.size > nbytes:
        raise origin.corrupt("the zip directory's size is wrong", got=f"{nbytes} bytes for {count} members")
    entries = _read_entries(origin, item.read(offset, nbytes), count)
    return ZipMembers(entries.rows, _find_payloads(item, entries, offset), entries.nbytes, entries.crc32)


class _Entries(Struct, frozen=True, eq=False):
    """The entries of the central directory, sorted by their local headers."""

    rows: Mapping[str, int]
    """Name -> row."""
    names: Bytes
    """All names, one after the other."""
    name_nbytes: IntArray
    flags: IntArray
    crc32: IntArray
    nbytes: IntArray
    header: IntArray
    """First byte of each local header."""
    is_wide: npt.NDArray[np.bool_]
    """Whether an entry has zip64 fields; its descriptor has them too (miniz.c: mz_zip_writer_add_mem_ex_v2)."""

    def name(self, row: int) -> str:
        """Return a member's name as errors show it."""
        return quote(next(islice(self.rows, row, None)))


def _directory(item: ItemBytes) -> tuple[int, int, int]:
    """Return offset, size and number of entries of the central directory."""
    origin = item.file.origin
    if item.nbytes == 0:
        raise origin.corrupt("is empty", got="0 bytes", want="a torch.save archive")
    tail_start = item.nbytes - len(item.tail)
    at = len(item.tail) - _END.size
    while at >= 0:
        at = item.tail.rfind(b"PK\5\6", 0, at + 4)
        # A comment may contain the signature, too; the comment of the real record ends with the archive.
        if at >= 0 and at + _END.size + int.from_bytes(item.tail[at + 20 : at + 22], "little") == len(item.tail):
            break
        at -= 1
    if at < 0:
        problem = "no zip directory at its end: cut short, or not a torch.save archive"
        raise origin.corrupt(problem, f"{item.nbytes} bytes")
    _, disk, directory_disk, here, count, nbytes, offset, _ = _END.unpack_from(item.tail, at)
    end = tail_start + at
    locator = end - _LOCATOR64.size
    if locator >= 0 and item.read(locator, 4) == b"PK\6\7":
        _, locator_disk, end64, disks = _LOCATOR64.unpack(item.read(locator, _LOCATOR64.size))
        signature, size, _, _, *long = _END64.unpack(item.read(end64, _END64.size))
        # 4.4.1.4: fields of the short record that are all ones are in the long record; the others must be equal.
        short = (disk, directory_disk, here, count, nbytes, offset)
        ones = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        agree = all(s in (full, o) for s, full, o in zip(short, long, ones, strict=True))
        if signature != b"PK\6\6" or end64 + 12 + size != locator or locator_disk or disks > 1 or not agree:
            raise origin.corrupt("the zip64 end record is damaged")
        disk, directory_disk, here, count, nbytes, offset = long
        end = end64
    if disk or directory_disk or here != count or offset + nbytes != end:
        got = f"{count} members in {nbytes} bytes from byte {offset}"
        raise origin.corrupt("the zip directory is not at the place in the end record", got, f"up to byte {end}")
    return offset, nbytes, count


def _read_entries(origin: Origin, directory: bytes, count: int) -> _Entries:
    starts, at = np.empty(count, np.int64), 0
    for row in range(count):
        try:
            signature, *lengths = _ENTRY_LENGTHS.unpack_from(directory, at)
        except struct.error:
            raise origin.corrupt(f"the zip directory ends inside an entry at its byte {at}") from None
        starts[row] = at
        at += _ENTRY.size + sum(lengths)
        if signature != b"PK\1\2" or at > len(directory):
            raise origin.corrupt(f"the zip directory is damaged at its byte {starts[row]}")
    if at != len(directory):
        raise origin.corrupt("the zip directory's size is wrong", got=f"{at} bytes", want=f"{len(directory)} bytes")
    data = np.frombuffer(directory, np.uint8)
    fixed = sliding_window_view(data, _ENTRY.size)[starts].view(_ENTRY_ROW)[:, 0] if count else np.empty(0, _ENTRY_ROW)
    name_starts, name_nbytes = starts + _ENTRY.size, fixed["name"].astype(np.int64)
    sizes = np.stack([fixed[field].astype(np.int64) for field in ("nbytes", "packed", "header")])
    is_wide = (sizes == _WIDE).any(axis=0)
    for row in np.flatnonzero(is_wide).tolist():
        name_end = int(name_starts[row] + name_nbytes[row])
        wide = _widen(sizes[:, row].tolist(), directory[name_end : name_end + int(fixed["extra"][row])])
        if wide is None:
            name = quote(_decode(origin, directory[name_starts[row] : name_end]))
            raise origin.corrupt(f"zip member {name} lacks its zip64 sizes")
        sizes[:, row] = wide
    order = np.argsort(sizes[2], kind="stable")
    fixed, name_nbytes, (nbytes, packed, header) = fixed[order], name_nbytes[order], sizes[:, order]
    names = data[span_indices(name_starts[order], name_nbytes)]
    rows = _number_names(origin, names.tobytes(), name_nbytes)
    flags, crc32 = fixed["flags"].astype(np.int64), fixed["crc32"].astype(np.int64)
    entries = _Entries(rows, names, name_nbytes, flags, crc32, nbytes, header, is_wide[order])
    is_elsewhere = (fixed["disk"] != 0) & (fixed["disk"] != 0xFFFF)
    is_program = np.fromiter((_PROGRAM in f"/{name}" for name in rows), np.bool_, count)
    is_changed = (fixed["method"] != 0) | (packed != nbytes) | (flags & _ENCRYPTED != 0)
    for row in np.flatnonzero(is_elsewhere | is_program | is_changed)[:1].tolist():
        name = entries.name(row)
        if is_elsewhere[row]:
            raise origin.corrupt(f"zip member {name} is on another disk", got=str(fixed["disk"][row]), want="0")
        if is_program[row]:
            problem = "is a TorchScript archive, a program with its weights (torch.jit.save)"
            step = "save torch.jit.load(file).state_dict() with torch.save, then gather that"
            raise origin.usage(problem, name, "a state dict, as torch.save writes it", step)
        problem = f"zip member {name} is compressed or encrypted"
        got = f"method {fixed['method'][row]}, {packed[row]} bytes for {nbytes[row]}, flags {flags[row]:#x}"
        raise origin.corrupt(problem, got, "a stored member, as torch.save writes")
    return entries


def _widen(sizes: list[int], extra: bytes) -> list[int] | None:
    """Return an entry's sizes with those of its extra field; None if it lacks one."""
    # 4.5.3: the extra field contains, in this order, the fields that are all ones in the entry.
    wide, field = b"", 0
    while field + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, field)
        field += 4 + length
        if kind == 1:
            wide = extra[field - length : field]
            break
    for k, size in enumerate(sizes):
        if size == _WIDE:
            if len(wide) < 8:
                return None
            sizes[k], wide = min(int.from_bytes(wide[:8], "little"), _MOST_NBYTES), wide[8:]
    return sizes


def _number_names(origin: Origin, names: bytes, name_nbytes: IntArray) -> dict[str, int]:
    rows: dict[str, int] = {}
    end = 0
    for row, nbytes in enumerate(name_nbytes.tolist()):
        start, end = end, end + nbytes
        name = _decode(origin, names[start:end])
        if rows.setdefault(name, row) != row:
            raise origin.corrupt("the zip directory lists a name twice", got=quote(name))
    return rows


def _decode(origin: Origin, name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise origin.corrupt("a zip member's name is not UTF-8", got=quote(name)) from None


def _find_payloads(item: ItemBytes, entries: _Entries, end: int) -> IntArray:
    """Return the first byte of each payload, and check all bytes between payloads up to the directory, at `end`.

    A payload's place follows from its local header, whose padding differs from the directory's extra field, and from
    that of the next header. A thousand headers of large payloads are not read, where each is a request of its own: the
    payloads' checksums are compared as they are read, and show that they lie there.
    """
    origin, header = item.file.origin, entries.header
    reads = _plan_reads(entries, end)
    if len(reads.low) > _MOST_READS and (entries.crc32 > 0).any():
        descriptors = np.where(entries.is_wide, _DESCRIPTOR64.size, _DESCRIPTOR.size)
        stops = np.append(header[1:], end) - np.where(entries.flags & _HAS_DESCRIPTOR, descriptors, 0)
        padding = stops - entries.nbytes - header - _LOCAL.size - entries.name_nbytes
        if header[0] == 0 and ((padding >= 0) & (padding < 1 << 16)).all():
            return np.asarray(stops - entries.nbytes, np.int64)
    heads, names = _read_headers(item, entries, end, reads)
    local = heads[:-1, _DESCRIPTOR64.size :].copy().view(_LOCAL_ROW)[:, 0]
    payload = header + _LOCAL.size + local["name"] + local["extra"]
    next_header = np.append(header[1:], end)
    # Compare a descriptor as a whole: a payload that damage moved by a few bytes must not pass as another kind of it.
    between, has_descriptor = next_header - payload - entries.nbytes, entries.flags & _HAS_DESCRIPTOR != 0
    is_followed = ~has_descriptor
    for kind in _DESCRIPTOR_ROWS:
        found = heads[1:, _DESCRIPTOR64.size - kind.itemsize : _DESCRIPTOR64.size].copy().view(kind)[:, 0]
        is_own = (found["signature"] == _DESCRIPTOR_SIGNATURE) & (found["crc32"] == entries.crc32)
        is_own &= (found["packed"] == entries.nbytes) & (found["nbytes"] == entries.nbytes)
        is_followed |= has_descriptor & is_own & (between == kind.itemsize)
    # torch leaves sizes and checksum to the data descriptor (flag bit 3), so they are not compared here.
    is_damaged = (local["signature"] != _LOCAL_SIGNATURE) | (local["name"] != entries.name_nbytes)
    is_damaged |= (local["method"] != 0) | (local["flags"] != entries.flags)
    ends = np.cumsum(entries.name_nbytes)
    is_damaged[np.searchsorted(ends, np.flatnonzero(names != entries.names), side="right")] = True
    is_outside = payload + entries.nbytes > item.nbytes
    free = np.append(0, np.where(has_descriptor, next_header, payload + entries.nbytes))
    is_moved = header != free[:-1]
    for row in np.flatnonzero(is_moved | is_damaged | is_outside | ~is_followed)[:1].tolist():
        name = entries.name(row)
        if is_moved[row]:
            problem = f"zip member {name} does not start where the one before it ends"
            raise origin.corrupt(problem, f"byte {header[row]}", f"byte {free[row]}")
        if is_damaged[row]:
            raise origin.corrupt(f"zip member {name}: its local header is damaged")
        if is_outside[row]:
            want = f"{payload[row] + entries.nbytes[row]} bytes"
            raise origin.corrupt(f"zip member {name} ends outside the archive", f"{item.nbytes} bytes", want)
        problem = f"zip member {name} is not followed by its size and checksum"
        raise origin.corrupt(problem, f"{entries.nbytes[row]} bytes at byte {payload[row]}")
    if free[-1] != end:
        raise origin.corrupt("bytes between the members and the zip directory", got=f"byte {free[-1]}", want=f"{end}")
    return np.asarray(payload, np.int64)


class _Reads(NamedTuple):
    """The reads of local headers; neighbors are read together."""

    rows: IntArray
    """The headers that are read."""
    group: IntArray
    """The read that each of them is in."""
    low: IntArray
    """First byte of each read."""
    nbytes: IntArray


def _plan_reads(entries: _Entries, end: int) -> _Reads:
    places, name_nbytes = np.append(entries.header, end), np.append(entries.name_nbytes, 0)
    lasts = places + _LOCAL.size + name_nbytes
    lasts[-1] = end
    rows = np.flatnonzero(lasts <= end)
    first, last = np.maximum(places[rows] - _DESCRIPTOR64.size, 0), lasts[rows]
    is_far = first[1:] - np.maximum.accumulate(last)[:-1] > _GAP_NBYTES
    is_far |= first[1:] // _BLOCK_NBYTES != first[:-1] // _BLOCK_NBYTES
    group = np.append(0, np.cumsum(is_far))
    starts = np.searchsorted(group, np.arange(group[-1] + 1))
    return _Reads(rows, group, first[starts], np.maximum.reduceat(last, starts) - first[starts])


def _read_headers(item: ItemBytes, entries: _Entries, end: int, reads: _Reads) -> tuple[Bytes, Bytes]:
    """Return each local header with the 24 bytes before it, [n + 1, 54], and the names behind the headers.

    The last row is for the directory, at `end`. Headers that reach beyond it are zeros.
    """
    before, width = _DESCRIPTOR64.size, _DESCRIPTOR64.size + _LOCAL.size
    rows, group, low, nbytes = reads
    places, name_nbytes = np.append(entries.header, end), np.append(entries.name_nbytes, 0)
    name_starts = np.cumsum(name_nbytes) - name_nbytes
    heads, names = np.zeros((len(places), width), np.uint8), np.zeros(len(entries.names), np.uint8)
    # A block's reads are taken apart at once.
    item.file.prefetch(zip((item.start + low).tolist(), nbytes.tolist(), strict=True))
    base = np.cumsum(nbytes) - nbytes
    edges = np.flatnonzero(np.append(True, base[1:] // _BLOCK_NBYTES != base[:-1] // _BLOCK_NBYTES)).tolist()
    for start, stop in pairwise([*edges, len(low)]):
        spans = zip(low[start:stop].tolist(), nbytes[start:stop].tolist(), strict=True)
        data = np.frombuffer(b"".join([bytes(before), *(item.read(*span) for span in spans), bytes(width)]), np.uint8)
        mine = slice(*np.searchsorted(group, (start, stop)))
        own, numbers = rows[mine], group[mine]
        at = before + base[numbers] - base[start] + places[own] - low[numbers]
        heads[own] = sliding_window_view(data, width)[at - before]
        behind = span_indices(at + _LOCAL.size, name_nbytes[own])
        names[span_indices(name_starts[own], name_nbytes[own])] = data[behind]
    return heads, names


def span_indices(starts: IntArray, lengths: IntArray) -> IntArray:
    """Return the indices of spans, one span after the other."""
    return np.repeat(starts - np.cumsum(lengths) + lengths, lengths) + np.arange(lengths.sum())


ALIGNMENT = 4096
"""Alignment in bytes of each record in the file, for O_DIRECT, reflinks and page-wise readers."""

_PREFIX = "archive/"  # torch's name for the folder in archives that it writes to a stream
_PADDING = struct.Struct("<2sH")
_VERSION = b"3\n"
_UTF8 = 0x800

_Placed: TypeAlias = tuple[int, bytes]


class _Member(Struct, frozen=True):
    name: bytes
    header: int
    """First byte of the local header."""
    payload: int
    nbytes: int

    @property
    def flags(self) -> int:
        return _UTF8 | (_HAS_DESCRIPTOR if self.nbytes else 0)

    @property
    def wide(self) -> bytes:
        """The zip64 extra field: the size (twice) and the offset, each if it needs more than 32 bits."""
        values = [self.nbytes, self.nbytes] if self.nbytes >= _WIDE else []
        values += [self.header] if self.header >= _WIDE else []
        return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""

    @property
    def end(self) -> int:
        """The byte after the descriptor."""
        descriptor = _DESCRIPTOR64 if self.wide else _DESCRIPTOR
        return self.payload + self.nbytes + (descriptor.size if self.nbytes else 0)

    def local_header(self) -> bytes:
        """Return the bytes before the payload, without the padding, whose content is free."""
        start = _LOCAL.size + len(self.name) + len(self.wide)
        padding = self.payload - self.header - start
        extra = len(self.wide) + padding
        fixed = _LOCAL.pack(b"PK\3\4", 0, self.flags, 0, 0, 0, 0, 0, 0, len(self.name), extra)
        return fixed + self.name + self.wide + _PADDING.pack(b"FB", padding - _PADDING.size)

    def descriptor(self, crc32: int) -> bytes:
        """Return the data descriptor, which follows the payload."""
        kind = _DESCRIPTOR64 if self.wide else _DESCRIPTOR
        return kind.pack(b"PK\7\10", crc32, self.nbytes, self.nbytes) if self.nbytes else b""

    def entry(self, crc32: int) -> bytes:
        """Return the member's entry in the central directory."""
        nbytes, header = min(self.nbytes, _WIDE), min(self.header, _WIDE)
        sizes = (crc32, nbytes, nbytes, len(self.name), len(self.wide))
        return _ENTRY.pack(b"PK\1\2", 0, 0, self.flags, 0, 0, 0, *sizes, 0, 0, 0, 0, header) + self.name + self.wide


def _place(name: str, nbytes: int, start: int, alignment: int) -> _Member:
    """Return the member whose local header begins at `start`, its payload at the next multiple of the alignment."""
    raw = (_PREFIX + name).encode()
    wide = _Member(raw, start, 0, nbytes).wide
    payload = start + _LOCAL.size + len(raw) + len(wide) + _PADDING.size
    return _Member(raw, start, -(-payload // alignment) * alignment, nbytes)


class ArchiveLayout(Struct, frozen=True):
    """All bytes of an archive except its records' payloads; the other bytes are padding with any value."""

    front: bytes
    """The bytes before the first record's local header."""
    offsets: tuple[int, ...]
    """First byte of each record, in order."""
    headers: tuple[_Placed, ...]
    """(offset, bytes) of the records' local headers."""
    nbytes: int
    """Bytes of the whole archive."""
    _members: tuple[tuple[_Member, int | None], ...]
    """All members with their CRC-32; None for records, whose CRC-32 is not known yet."""

    def trailer(self, record: int, crc32: int) -> _Placed | None:
        """Return (offset, bytes) of a record's data descriptor, which is part of the ending; None if it has none."""
        first = next(row for row, (_, crc) in enumerate(self._members) if crc is None)
        member = self._members[first + record][0]
        return (member.payload + member.nbytes, member.descriptor(crc32)) if member.nbytes else None

    def ending(self, crc32: Sequence[int]) -> list[_Placed]:
        """Return (offset, bytes) of all parts that depend on the records' CRC-32; the end of the archive comes last."""
        values = iter(crc32)
        crcs = [next(values) if crc is None else crc for _, crc in self._members]
        members = [member for member, _ in self._members]
        placed = [
            (member.payload + member.nbytes, member.descriptor(crc))
            for (member, known), crc in zip(self._members, crcs, strict=True)
            if known is None and member.nbytes
        ]
        start = members[-1].end
        entries = b"".join(member.entry(crc) for member, crc in zip(members, crcs, strict=True))
        return [*placed, (start, entries + _end(start, len(entries), len(members)))]


def lay_out_archive(
    pickled: bytes, record_nbytes: Iterable[int], *, alignment: int = ALIGNMENT, ends_with_records: bool = False
) -> ArchiveLayout:
    """Return the layout of an archive with this ``data.pkl`` and records ``data/0``, ``data/1``, ... of these sizes.

    All bytes after the payload of a single record are one part of the ending if the archive `ends_with_records`.
    """
    front = bytearray()
    members: list[tuple[_Member, int | None]] = []
    known = [("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", b"%d" % alignment)]
    known += [("byteorder", b"little"), *([("version", _VERSION)] if ends_with_records else [])]
    for name, content in known:
        member = _place(name, len(content), len(front), alignment)
        front += _whole(member, content)
        members.append((member, isal_zlib.crc32(content)))
    records: list[_Member] = []
    end = len(front)
    for key, nbytes in enumerate(record_nbytes):
        records.append(_place(f"data/{key}", nbytes, end, alignment))
        end = records[-1].end
    members += [(record, None) for record in records]
    headers = [(record.header, record.local_header()) for record in records]
    if not ends_with_records:
        last = _place("version", len(_VERSION), end, alignment)
        members.append((last, isal_zlib.crc32(_VERSION)))
        headers.append((end, _whole(last, _VERSION)))
        end = last.end
    directory = sum(len(member.entry(0)) for member, _ in members)
    tail = end + directory + len(_end(0, 0, 0))
    return ArchiveLayout(bytes(front), tuple(r.payload for r in records), tuple(headers), tail, tuple(members))


def _whole(member: _Member, content: bytes) -> bytes:
    header = member.local_header()
    padding = bytes(member.payload - member.header - len(header))
    return header + padding + content + member.descriptor(isal_zlib.crc32(content))


def _end(start: int, nbytes: int, count: int) -> bytes:
    """Return the end records after the directory: the 64-bit one, which torch always writes, and the 32-bit one."""
    after = start + nbytes
    return (
        _END64.pack(b"PK\6\6", _END64.size - 12, 0x31E, 0x2D, 0, 0, count, count, nbytes, start)
        + _LOCATOR64.pack(b"PK\6\7", 0, after, 1)
        + _END.pack(b"PK\5\6", 0, 0, min(count, 0xFFFF), min(count, 0xFFFF), min(nbytes, _WIDE), min(start, _WIDE), 0)
    )


NAMES = "save the names with the tensors: torch.save(model.state_dict(), file); then gather that"
"""The next step for a file without a state dict."""


def no_names_error(origin: Origin, got: str) -> UsageError:
    """Return the error for a file whose value is not a dict of tensors by name, but of this kind."""
    what = "a tensor without a name" if got == "ArchivedTensor" else got
    return origin.usage("is not a state dict", what, "a dict of tensors by name", NAMES)


_ZIP = b"PK\x03\x04"
# torch/serialization.py: MAGIC_NUMBER, pickled: the first bytes of files before torch 1.6, which introduced zips.
_BEFORE_ZIPS = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_MAX_DIMENSIONS = 64
_MAX_EXTENT = (1 << 63) - 1

STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt8Storage": "quint8",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
"""Typed storage -> its element type (torch/storage.py: _dtype_to_storage_type_map); other storages are untyped."""

# The names of element types in torch: those that xrank copies and those that it refuses by name.
_DTYPE_NAMES = frozenset(
    {*STORAGE_DTYPES.values(), "uint16", "uint32", "uint64", "complex32", "float4_e2m1fn_x2"}
    | {f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")}
    | {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)


class ArchiveRecord(Struct, frozen=True):
    """The place of one storage's bytes in the file."""

    key: str
    offset: int
    """First byte of the payload from the start of the *file*."""
    nbytes: int
    crc32: int
    """The checksum in the archive's directory; meaningless if the archive has no checksums."""


class ArchiveRecords(Mapping[str, ArchiveRecord]):
    """The records of an archive by key, in the order of their bytes, as arrays."""

    def __init__(self, members: ZipMembers, prefix: str, start: int) -> None:
        named = [(name[len(prefix) :], row) for name, row in members.rows.items() if name.startswith(prefix)]
        self._rows = {key: row for row, (key, _) in enumerate(named)}
        rows = np.fromiter((row for _, row in named), np.int64, len(named))
        self.offset, self.nbytes, self.crc32 = members.offset[rows] + start, members.nbytes[rows], members.crc32[rows]

    def __getitem__(self, key: str) -> ArchiveRecord:
        row = self._rows[key]
        return ArchiveRecord(key, int(self.offset[row]), int(self.nbytes[row]), int(self.crc32[row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        """Return whether other records have the same keys and sizes."""
        if not isinstance(other, ArchiveRecords):
            return NotImplemented
        return np.array_equal(self.nbytes, other.nbytes) and self._rows == other._rows

    def share_keys(self, other: ArchiveRecords) -> None:
        """Take the keys of equal records, so that memory holds them once."""
        self._rows = other._rows

    def row(self, key: str) -> int:
        """Return the row of a record in the arrays."""
        return self._rows[key]


class ArchivedTensor(Struct, frozen=True):
    """A view on one record; several tensors may share a record."""

    key: str
    """Key of the record in `TorchArchive.records`."""
    dtype: str
    """Name of the element type in safetensors."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements, positive where the shape is above 1. Dimensions nest: no two elements share bytes."""
    storage_offset: int
    """Offset in the record, in elements."""


def load_global(module: str, name: str) -> object:
    """Return the value of a global name in the pickle: the text of an element type, or an inert record."""
    if module == "torch" and name in _DTYPE_NAMES:
        return f"torch.{name}"
    return InertRecord(module, name)


def element_type(name: str, origin: Origin, tensor: str | None = None) -> str:
    """Return the safetensors name of an element type that torch names; errors name the tensor, or else the file."""
    try:
        return by_torch_name(name.removeprefix("torch.")).name
    except UsageError as error:
        subject = origin.name if tensor is None else quote(tensor)[1:-1]
        error.about(subject, tensor=tensor, file=origin.path, rank=origin.rank)
        raise


class _Storage(InertRecord, eq=False):
    """A storage that a tensor will view; otherwise it stays in the tree as an inert record."""

    key: str = ""
    dtype: str | None = None
    """None for an untyped storage; the tensor defines the type."""


class TensorRebuilder(Struct, frozen=True):
    """Build checked tensors from the persistent ids and rebuild calls of a pickle."""

    nbytes: Mapping[str, int]
    """Bytes of each record, by key."""
    origin: Origin

    def builders(self) -> dict[tuple[str, str], Builder]:
        """Return the builder of each call that concerns tensors."""
        return {
            ("torch", "Size"): build_size,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor_v2,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor_v3,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            # torch/_utils.py: _rebuild_parameter_with_state(data, requires_grad, hooks, state).
            ("torch._utils", "_rebuild_parameter_with_state"): lambda args: (
                _parameter(args[:3]) if len(args) == 4 and _is_plain_state(args[3]) else NotImplemented
            ),
            ("torch._tensor", "_rebuild_from_type_v2"): self._rebuild_with_state,
        }

    def load_storage(self, saved_id: object) -> object:
        """Return the storage of a persistent id."""
        # ("storage", type, key, location, count): torch/serialization.py: _save.persistent_id.
        match saved_id:
            case ("storage", InertRecord(args=None) as kind, str(key), str() | Blank(), int(count)) if (
                type(count) is int and count >= 0 and kind.module in ("torch", "torch.storage")
            ):
                pass
            case _:
                raise self.origin.corrupt("the pickle refers to a storage in no known way", got=type(saved_id).__name__)
        if kind.name == "UntypedStorage":
            name, itemsize = None, 1
        elif kind.name in STORAGE_DTYPES:
            name = element_type(STORAGE_DTYPES[kind.name], self.origin)
            itemsize = dtype(name).nbytes
        else:
            raise self.origin.corrupt("the pickle names an unknown kind of storage", got=quote(kind.name))
        nbytes = self.nbytes.get(key)
        if nbytes is None:
            raise self.origin.corrupt(f"the record data/{quote(key)[1:-1]} is missing")
        if count * itemsize != nbytes:
            problem = f"the record data/{quote(key)[1:-1]} does not have the size its storage claims"
            raise self.origin.corrupt(problem, f"{nbytes} bytes", f"{count} elements of {itemsize} bytes")
        return _Storage("torch.storage", kind.name, (), key=key, dtype=name)

    def _tensor_v2(self, args: tuple[object, ...]) -> object:
        # torch/_utils.py: _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks, metadata=None).
        if len(args) not in (6, 7):
            raise self.origin.corrupt("a tensor has the wrong number of parts", got=str(len(args)), want="6 or 7")
        storage, offset, shape, strides, _, hooks, metadata = (*args, None)[:7]
        if not isinstance(storage, _Storage) or storage.dtype is None:
            raise self.origin.corrupt("a tensor has no storage of its type")
        return self._tensor(storage.key, storage.dtype, offset, shape, strides, hooks, metadata)

    def _tensor_v3(self, args: tuple[object, ...]) -> object:
        # torch/_utils.py: _rebuild_tensor_v3(..., hooks, dtype, metadata=None).
        if len(args) not in (7, 8):
            raise self.origin.corrupt("a tensor has the wrong number of parts", got=str(len(args)), want="7 or 8")
        storage, offset, shape, strides, _, hooks, name, metadata = (*args, None)[:8]
        if not isinstance(storage, _Storage) or not isinstance(name, str):
            raise self.origin.corrupt("a tensor has no storage, or no element type")
        own = element_type(name, self.origin)
        if storage.dtype not in (None, own):
            raise self.origin.corrupt("a tensor and its storage differ in type", got=storage.dtype, want=own)
        return self._tensor(storage.key, own, offset, shape, strides, hooks, metadata)

    def _rebuild_with_state(self, args: tuple[object, ...]) -> object:
        # torch/_tensor.py: _rebuild_from_type_v2(func, new_type, args, state): a tensor with extra attributes.
        match args:
            case (InertRecord(args=None) as rebuild, InertRecord(args=None) as kind, tuple() as parts, state) if (
                (rebuild.module, rebuild.name) == ("torch._utils", "_rebuild_tensor_v2")
                and (kind.module, kind.name) == ("torch", "Tensor")
                and _is_plain_state(state)
            ):
                return self._tensor_v2(parts)
        return NotImplemented

    def _tensor(
        self, key: str, dtype_name: str, offset: object, shape: object, strides: object, hooks: object, metadata: object
    ) -> ArchivedTensor:
        if hooks:
            raise self.origin.unsafe("a tensor has backward hooks", got=type(hooks).__name__)
        if metadata:
            # torch/_utils.py: get_tensor_metadata: lazy conjugation and negation, or a backend's own bits.
            step = "call .resolve_conj() and .resolve_neg() before saving"
            problem = "a tensor is stored with a pending conjugation or negation"
            raise self.origin.usage(problem, next_step=step)
        match offset, shape, strides:
            case int(), tuple(), tuple() if len(shape) == len(strides) <= _MAX_DIMENSIONS and all(
                type(part) is int and 0 <= part <= _MAX_EXTENT for part in (offset, *shape, *strides)
            ):
                pass
            case _:
                raise self.origin.corrupt("a tensor's offset, shape or strides are not integers of 0 or more")
        capacity = self.nbytes[key] // dtype(dtype_name).nbytes
        extent = 1 if math.prod(shape) else 0
        for stride, count in sorted(zip(strides, shape, strict=True)) if extent else ():
            if count == 1:
                continue
            # Each dimension must step over all smaller ones, or elements share bytes (as after expand()).
            if stride < extent:
                got = f"shape {quote(shape)}, strides {quote(strides)}"
                step = "call .contiguous() or .clone() before saving"
                raise self.origin.usage("a tensor's elements share or interleave their storage", got, next_step=step)
            extent += (count - 1) * stride
        if offset + extent > capacity:
            problem = f"a tensor reaches past its storage data/{quote(key)[1:-1]}"
            raise self.origin.corrupt(problem, f"{capacity} elements", f"{offset + extent} elements")
        return ArchivedTensor(key, dtype_name, shape, strides, offset)


def build_size(args: tuple[object, ...]) -> object:
    """Return the shape of a ``torch.Size``."""
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else NotImplemented


def _parameter(args: tuple[object, ...]) -> object:
    # torch/_utils.py: _rebuild_parameter(data, requires_grad, hooks).
    return args[0] if len(args) == 3 and isinstance(args[0], ArchivedTensor) and not args[2] else NotImplemented


def _is_plain_state(state: object) -> bool:
    """Return whether a tensor's attributes are only remarks (DeepSpeed's ``ds_id``), which are dropped.

    Other attributes may change the values: ``data`` or ``real`` with a tensor replaces them.
    """
    return isinstance(state, dict) and all(
        isinstance(name, str) and (value is None or isinstance(value, (bool, int, float, str)))
        for name, value in state.items()
    )


class TorchArchive(Struct, frozen=True):
    """The content of a ``torch.save`` archive; its tensors' bytes are still in the file."""

    path: str
    status: os.stat_result | ObjectStatus
    """Status of the file when it was read."""
    records: ArchiveRecords
    """Key -> the member ``data/<key>``."""
    value: object
    """Plain values, tuples, lists, dicts (also OrderedDict), sets, `ArchivedTensor` and `InertRecord`.

    An element type is a text such as ``"torch.bfloat16"``, a ``torch.Size`` a tuple, a parameter its tensor; a storage
    outside a tensor is an inert record. No container contains itself.
    """
    name: str
    """Stem of the file's name when it was saved, which a rename or copy does not change; ``archive`` if torch wrote to
    a stream."""
    has_checksums: bool
    """False if all checksums are 0 (``torch.serialization.set_crc32_options(False)``), so bytes cannot be verified."""
    foreign: Mapping[tuple[str, str], int]
    """Classes and functions in the pickle that frameworks do not write (`xrank.formats.pickles`)."""
    own: tuple[object, ...] | None = None
    """This archive's own number or text for each `Blank` in the value; None if no other archive shares the value.

    Archives that share a value have records of the same keys and sizes.
    """


def read_archive(path: str, *, rank: int | None = None, families: PickleFamilies | None = None) -> TorchArchive:
    """Read the structure of a ``torch.save`` archive, which a rank wrote, if one is given.

    Archives that are read with the same `families` share a value if their pickles are of one family.

    Errors as in `Reader.read`, and a UsageError for an undamaged file whose tensors safetensors cannot hold.
    """
    with open_regular(path, rank) as file:
        refuse_pointer(file)
        return read_archive_in(file, families=families)


def walk_leaves(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Yield the keys to each leaf of an archive's value, and the leaf; reading has bounded the depth and the number."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from walk_leaves(inner, (*path, key if type(key) in (str, int) else quote(str(key))))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for index, inner in enumerate(value):
            yield from walk_leaves(inner, (*path, index))
    else:
        yield path, value


def is_archive(file: RegularFile) -> bool:
    """Return whether an open file begins as ``torch.save`` lets it begin, in its old format, too."""
    start = file.read(0, min(len(_BEFORE_ZIPS), file.nbytes))
    return start.startswith(_ZIP) or start == _BEFORE_ZIPS


def read_archive_in(
    file: RegularFile,
    *,
    start: int = 0,
    nbytes: int | None = None,
    families: PickleFamilies | None = None,
) -> TorchArchive:
    """Read the archive in an open file, or, as in torch DCP's ``.distcp``, in these bytes of it; see `read_archive`."""
    item, origin = open_item(file, start, nbytes), file.origin
    try:
        members = read_members(item)
        rows = members.rows
        prefix = next(iter(rows)).partition("/")[0] + "/" if rows else ""
        outside = next((name for name in rows if not name.startswith(prefix)), None)
        if outside is not None:
            raise origin.corrupt("the archive has members outside its folder", quote(outside), quote(prefix))
    except CorruptError:
        if file.read(start, min(len(_BEFORE_ZIPS), file.nbytes - start)) != _BEFORE_ZIPS:
            raise
        problem = "was written by torch before 1.6, or in its old format"
        step = "load it with torch and save it again"
        raise origin.usage(problem, "a bare pickle", "a zip", step) from None
    row = rows.get(f"{prefix}data.pkl")
    if row is None:
        raise origin.corrupt("the archive contains no data.pkl: torch.save did not write it")
    if members.nbytes[row] > MAX_PICKLE_NBYTES:
        want = f"at most {MAX_PICKLE_NBYTES} bytes"
        raise origin.corrupt("data.pkl is too large", f"{members.nbytes[row]} bytes", want)
    # torch writes zeros for all checksums or for none; the CRC of an empty member is always 0.
    has_checksums = bool(members.crc32.any())
    order = rows.get(f"{prefix}byteorder")
    if order is not None:  # torch writes it since 2.1; older files are little-endian
        kind = _read_member(item, members, order, has_checksums) if members.nbytes[order] <= 16 else b""
        if kind == b"big":
            step = "save it on a little-endian one"
            raise origin.usage("was written on a big-endian machine", "big", "little", step)
        if kind != b"little":
            raise origin.corrupt("its byte order is damaged", got=quote(kind), want="little")
    data = _read_member(item, members, row, has_checksums)
    records = ArchiveRecords(members, f"{prefix}data/", start)
    tensors = TensorRebuilder(dict(zip(records, records.nbytes.tolist(), strict=True)), origin)
    pickled = read_pickle(
        data,
        origin,
        builders={**PLAIN_BUILDERS, **tensors.builders()},
        load_global=load_global,
        load_persistent=tensors.load_storage,
        families=families,
        key=records,
    )
    if isinstance(pickled.key, ArchiveRecords):
        records.share_keys(pickled.key)
    foreign = MappingProxyType(dict(pickled.foreign))
    return TorchArchive(
        origin.path, file.status, records, pickled.value, prefix[:-1], has_checksums, foreign, pickled.own
    )


def _read_member(item: ItemBytes, members: ZipMembers, row: int, has_checksums: bool) -> bytes:
    data = item.read(int(members.offset[row]), int(members.nbytes[row]))
    crc32 = isal_zlib.crc32(data)
    if has_checksums and crc32 != members.crc32[row]:
        name = next(islice(members.rows, row, None))
        problem = f"{quote(name)} fails its checksum"
        raise item.file.origin.corrupt(problem, f"CRC {crc32:08x}", f"CRC {members.crc32[row]:08x}")
    return data
