"""Lay out a torch archive before its tensors' bytes exist: compute all bytes around them, and their offsets.

The archive equals that of torch's writer (``caffe2/serialize/inline_container.cc`` over ``third_party/miniz``): members
are stored, an extra field in the local header aligns the payload, a data descriptor follows each non-empty member, and
zip64 is used if a size or an offset needs it. So torch reads it in every way, with computed offsets, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from isal import isal_zlib

ALIGNMENT = 4096
"""Alignment in bytes of each record in the file, for O_DIRECT, reflinks and page-wise readers."""

_PREFIX = "archive/"  # torch's name for the folder in archives that it writes to a stream
_WIDE = 0xFFFFFFFF

_LOCAL = struct.Struct("<4s5H3L2H")  # APPNOTE 4.3.7
_PADDING = struct.Struct("<2sH")
_ENTRY = struct.Struct("<4s6H3L5H2L")  # 4.3.12
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sLQL")  # 4.3.15
_END = struct.Struct("<4s4H2LH")  # 4.3.16
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")  # 4.3.9

_UTF8, _HAS_DESCRIPTOR = 0x800, 0x8

_Placed: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Member:
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


def _place(name: str, nbytes: int, start: int) -> _Member:
    """Return the member whose local header begins at `start`, its payload at the next multiple of the alignment."""
    raw = (_PREFIX + name).encode()
    wide = _Member(raw, start, 0, nbytes).wide
    payload = start + _LOCAL.size + len(raw) + len(wide) + _PADDING.size
    return _Member(raw, start, -(-payload // ALIGNMENT) * ALIGNMENT, nbytes)


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
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
        member = self._members[len(self._members) - 1 - len(self.offsets) + record][0]
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


def lay_out_archive(pickled: bytes, record_nbytes: Iterable[int]) -> ArchiveLayout:
    """Return the layout of an archive with this ``data.pkl`` and records ``data/0``, ``data/1``, ... of these sizes."""
    front = bytearray()
    members: list[tuple[_Member, int | None]] = []
    known = [("data.pkl", pickled), (".format_version", b"1"), (".storage_alignment", b"%d" % ALIGNMENT)]
    for name, content in (*known, ("byteorder", b"little")):
        member = _place(name, len(content), len(front))
        front += _whole(member, content)
        members.append((member, isal_zlib.crc32(content)))
    records: list[_Member] = []
    end = len(front)
    for key, nbytes in enumerate(record_nbytes):
        records.append(_place(f"data/{key}", nbytes, end))
        end = records[-1].end
    version = b"3\n"
    last = _place("version", len(version), end)
    members += [(record, None) for record in records]
    members.append((last, isal_zlib.crc32(version)))
    directory = sum(len(member.entry(0)) for member, _ in members)
    tail = last.end + directory + len(_end(0, 0, 0))
    headers = [(record.header, record.local_header()) for record in records]
    headers.append((end, _whole(last, version)))
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
