"""Find the members of an uncompressed zip of torch; every number that is stored twice is compared.

Format facts are PKWARE's APPNOTE.TXT 6.3.10 and torch's writer (``caffe2/serialize/inline_container.cc`` over
``third_party/miniz``): every member is stored uncompressed, an extra field pads its local header to align the payload,
and a data descriptor follows. So the members cover the archive from its first byte to the central directory without
gaps. Other zips are refused, so there are no hidden or shared bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from isal import isal_zlib
from msgspec import Struct

from xrank.storage.regular_file import RegularFile, quote

_TAIL_NBYTES = 1 << 16
_MAX_DIRECTORY_NBYTES = 1 << 29

_END = struct.Struct("<4s4H2LH")  # APPNOTE 4.3.16
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_LOCATOR64 = struct.Struct("<4sLQL")  # 4.3.15
_ENTRY = struct.Struct("<4s6H3L5H2L")  # 4.3.12
_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7

_ENCRYPTED = 0x1 | 0x40 | 0x2000  # 4.4.4: bits 0, 6 and 13
_HAS_DESCRIPTOR = 0x8  # 4.4.4: bit 3, a data descriptor follows the payload
_DESCRIPTORS = {16: struct.Struct("<4sLLL"), 24: struct.Struct("<4sLQQ")}  # 4.3.9; miniz always signs it


class ZipMember(Struct, frozen=True):
    """A stored member; ``offset`` is the first byte of its payload from the archive's start."""

    name: str
    offset: int
    nbytes: int
    crc32: int


class ItemBytes(Struct, frozen=True):
    """The bytes of one archive inside a file, with its tail in memory; offsets count from the archive's start."""

    file: RegularFile
    start: int
    nbytes: int
    tail: bytes

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly these bytes, or raise CorruptError."""
        if offset + nbytes > self.nbytes:
            raise self.file.origin.corrupt(
                "the archive ends early",
                got=f"{self.nbytes} bytes",
                want=f"at least {quote(offset + nbytes)} bytes",
            )
        in_tail = offset - (self.nbytes - len(self.tail))
        if in_tail >= 0:
            return self.tail[in_tail : in_tail + nbytes]
        return self.file.read(self.start + offset, nbytes)


def open_item(file: RegularFile, start: int = 0, nbytes: int | None = None) -> ItemBytes:
    """Open the archive at these bytes of a file: the whole file, or an item of a ``.distcp``."""
    if nbytes is None:
        nbytes = file.nbytes - start
    if start < 0 or nbytes < 0 or start + nbytes > file.nbytes:
        raise file.origin.corrupt(
            "the item lies outside the file", got=f"{file.nbytes} bytes", want=f"bytes {start} to {start + nbytes}"
        )
    tail_nbytes = min(nbytes, _TAIL_NBYTES)
    return ItemBytes(file, start, nbytes, file.read(start + nbytes - tail_nbytes, tail_nbytes))


def read_members(item: ItemBytes) -> tuple[ZipMember, ...]:
    """Read all members, in the order of their bytes; refuse an archive that is arranged differently than torch's."""
    origin = item.file.origin
    offset, nbytes, count = _directory(item)
    # An entry takes at least its 46 fixed bytes, which bounds the claimed count.
    if nbytes > _MAX_DIRECTORY_NBYTES or count * _ENTRY.size > nbytes:
        raise origin.corrupt("the zip directory's size is wrong", got=f"{nbytes} bytes for {count} members")
    directory = item.read(offset, nbytes)
    entries: list[_Entry] = []
    names: set[str] = set()
    at = 0
    for _ in range(count):
        entry, at = _parse_entry(item, directory, at)
        if entry.name in names:
            raise origin.corrupt("the zip directory lists a name twice", got=quote(entry.name))
        names.add(entry.name)
        entries.append(entry)
    if at != nbytes:
        raise origin.corrupt("the zip directory's size is wrong", got=f"{at} bytes", want=f"{nbytes} bytes")
    entries.sort(key=lambda entry: entry.header)
    item.file.prefetch(_ranges(item, entries, offset))
    members: list[ZipMember] = []
    free = 0
    for k, entry in enumerate(entries):
        if entry.header != free:
            raise origin.corrupt(
                f"zip member {quote(entry.name)} does not start where the one before it ends",
                got=f"byte {entry.header}",
                want=f"byte {free}",
            )
        payload = _payload(item, entry)
        free = payload + entry.nbytes
        if entry.flags & _HAS_DESCRIPTOR:
            next_header = entries[k + 1].header if k + 1 < len(entries) else offset
            # Compare the whole: a payload that damage moved by a few bytes must not pass as another kind of descriptor.
            descriptor = _DESCRIPTORS.get(next_header - free)
            want = (b"PK\7\x08", entry.crc32, entry.nbytes, entry.nbytes)
            if descriptor is None or descriptor.unpack(item.read(free, descriptor.size)) != want:
                raise origin.corrupt(
                    f"zip member {quote(entry.name)} is not followed by its size and checksum",
                    got=f"{entry.nbytes} bytes at byte {payload}",
                )
            free = next_header
        members.append(ZipMember(entry.name, payload, entry.nbytes, entry.crc32))
    if free != offset:
        raise origin.corrupt("bytes between the members and the zip directory", got=f"byte {free}", want=f"{offset}")
    return tuple(members)


def _ranges(item: ItemBytes, entries: list[_Entry], end: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, bytes) of the local headers, each with the descriptor before it."""
    widest = max(_DESCRIPTORS)
    for entry in entries:
        first = max(0, entry.header - widest)
        yield item.start + first, entry.header - first + _LOCAL.size + len(entry.raw_name)
    yield item.start + max(0, end - widest), widest


class _Entry(Struct, frozen=True):
    name: str
    raw_name: bytes
    flags: int
    crc32: int
    nbytes: int
    header: int
    """First byte of the local header."""


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
        raise origin.corrupt(
            "no zip directory at its end: cut short, or not a torch.save archive", got=f"{item.nbytes} bytes"
        )
    _, disk, directory_disk, here, count, nbytes, offset, _ = _END.unpack_from(item.tail, at)
    end = tail_start + at
    locator = end - _LOCATOR64.size
    if locator >= 0 and item.read(locator, 4) == b"PK\6\7":
        _, locator_disk, end64, disks = _LOCATOR64.unpack(item.read(locator, _LOCATOR64.size))
        signature, size, _, _, disk64, directory_disk64, here64, count64, nbytes64, offset64 = _END64.unpack(
            item.read(end64, _END64.size)
        )
        # 4.4.1.4: fields of the short record that are all ones are in the long record; the others must be equal.
        short = (disk, directory_disk, here, count, nbytes, offset)
        ones = (0xFFFF, 0xFFFF, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
        long = (disk64, directory_disk64, here64, count64, nbytes64, offset64)
        agree = all(s in (full, o) for s, full, o in zip(short, long, ones, strict=True))
        if signature != b"PK\6\6" or end64 + 12 + size != locator or locator_disk or disks > 1 or not agree:
            raise origin.corrupt("the zip64 end record is damaged")
        disk, directory_disk, here, count, nbytes, offset = long
        end = end64
    if disk or directory_disk or here != count or offset + nbytes != end:
        raise origin.corrupt(
            "the zip directory is not at the place in the end record",
            got=f"{count} members in {nbytes} bytes from byte {offset}",
            want=f"up to byte {end}",
        )
    return offset, nbytes, count


def _parse_entry(item: ItemBytes, directory: bytes, at: int) -> tuple[_Entry, int]:
    origin = item.file.origin
    try:
        fields = _ENTRY.unpack_from(directory, at)
    except struct.error:
        raise origin.corrupt(f"the zip directory ends inside an entry at its byte {at}") from None
    signature, _, _, flags, method, _, _, crc32, packed, nbytes, name_nbytes, extra_nbytes, comment_nbytes = fields[:13]
    disk, _, _, header = fields[13:]
    extra_at = at + _ENTRY.size + name_nbytes
    end = extra_at + extra_nbytes + comment_nbytes
    if signature != b"PK\1\2" or end > len(directory):
        raise origin.corrupt(f"the zip directory is damaged at its byte {at}")
    raw_name = directory[at + _ENTRY.size : extra_at]
    try:
        name = raw_name.decode("utf-8")
    except UnicodeDecodeError:
        raise origin.corrupt("a zip member's name is not UTF-8", got=quote(raw_name)) from None
    # 4.5.3: the extra field contains, in this order, the fields that are all ones in the entry.
    wide = _zip64_extra(directory[extra_at : extra_at + extra_nbytes])
    values = [nbytes, packed, header]
    for k, value in enumerate(values):
        if value == 0xFFFFFFFF:
            if len(wide) < 8:
                raise origin.corrupt(f"zip member {quote(name)} lacks its zip64 sizes")
            values[k] = int.from_bytes(wide[:8], "little")
            wide = wide[8:]
    nbytes, packed, header = values
    if disk not in (0, 0xFFFF):
        raise origin.corrupt(f"zip member {quote(name)} is on another disk", got=str(disk), want="0")
    if "/code/__torch__" in f"/{name}":
        raise origin.usage(
            "is a TorchScript archive, a program with its weights (torch.jit.save)",
            got=quote(name),
            want="a state dict, as torch.save writes it",
            next_step="save torch.jit.load(file).state_dict() with torch.save, then gather that",
        )
    if method != 0 or packed != nbytes or flags & _ENCRYPTED:
        raise origin.corrupt(
            f"zip member {quote(name)} is compressed or encrypted",
            got=f"method {method}, {packed} bytes for {nbytes}, flags {flags:#x}",
            want="a stored member, as torch.save writes",
        )
    return _Entry(name, raw_name, flags, crc32, nbytes, header), end


def _zip64_extra(extra: bytes) -> bytes:
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            return extra[at + 4 : at + 4 + nbytes]
        at += 4 + nbytes
    return b""


def _payload(item: ItemBytes, entry: _Entry) -> int:
    """Return the payload's first byte from the local header, whose padding differs from the directory's extra field."""
    raw = item.read(entry.header, _LOCAL.size + len(entry.raw_name))
    name_nbytes: int
    extra_nbytes: int
    signature, _, flags, method, _, _, _, _, _, name_nbytes, extra_nbytes = _LOCAL.unpack_from(raw)
    # torch leaves sizes and checksum to the data descriptor (flag bit 3), so they are not compared here.
    same_name = name_nbytes == len(entry.raw_name) and raw[_LOCAL.size :] == entry.raw_name
    if signature != b"PK\3\4" or not same_name or method != 0 or flags != entry.flags:
        raise item.file.origin.corrupt(f"zip member {quote(entry.name)}: its local header is damaged")
    payload = entry.header + _LOCAL.size + name_nbytes + extra_nbytes
    if payload + entry.nbytes > item.nbytes:
        raise item.file.origin.corrupt(
            f"zip member {quote(entry.name)} ends outside the archive",
            got=f"{item.nbytes} bytes",
            want=f"{payload + entry.nbytes} bytes",
        )
    return payload


ALIGNMENT = 4096
"""Alignment in bytes of each record in the file, for O_DIRECT, reflinks and page-wise readers."""

_PREFIX = "archive/"  # torch's name for the folder in archives that it writes to a stream
_WIDE = 0xFFFFFFFF

_PADDING = struct.Struct("<2sH")
_DESCRIPTOR, _DESCRIPTOR64 = struct.Struct("<4s3L"), struct.Struct("<4sL2Q")  # 4.3.9

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


def _place(name: str, nbytes: int, start: int) -> _Member:
    """Return the member whose local header begins at `start`, its payload at the next multiple of the alignment."""
    raw = (_PREFIX + name).encode()
    wide = _Member(raw, start, 0, nbytes).wide
    payload = start + _LOCAL.size + len(raw) + len(wide) + _PADDING.size
    return _Member(raw, start, -(-payload // ALIGNMENT) * ALIGNMENT, nbytes)


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
