"""Writes zips as torch lays them out, by struct alone, so that any number in them can lie."""

import struct
import zlib
from dataclasses import dataclass


@dataclass
class Member:
    name: str
    data: bytes = b""
    crc32: int | None = None
    nbytes: int | None = None
    packed_nbytes: int | None = None
    method: int = 0
    flags: int = 0x808
    padding: int = 5
    local_name: str | None = None
    header: int | None = None
    descriptor: bytes | None = None
    zip64: bool = False


def crafted_zip(members, *, zip64=True, comment=b"", gap=b"", **lies):
    out = bytearray()
    directory = bytearray()
    for m in members:
        crc32 = zlib.crc32(m.data) if m.crc32 is None else m.crc32
        nbytes = len(m.data) if m.nbytes is None else m.nbytes
        packed = nbytes if m.packed_nbytes is None else m.packed_nbytes
        header = len(out) if m.header is None else m.header
        local_name = (m.name if m.local_name is None else m.local_name).encode()
        extra = struct.pack("<2sH", b"FB", m.padding) + bytes(m.padding)
        out += struct.pack("<4s5H3L2H", b"PK\3\4", 0, m.flags, m.method, 0, 0, 0, 0, 0, len(local_name), len(extra))
        out += local_name + extra + m.data
        if m.descriptor is not None:
            out += m.descriptor
        elif m.flags & 8:
            out += struct.pack("<4sLLL", b"PK\7\x08", crc32, packed & 0xFFFFFFFF, nbytes & 0xFFFFFFFF)
        name = m.name.encode()
        wide = b""
        fields = (packed, nbytes, header)
        if m.zip64:
            wide = struct.pack("<HHHQHQQQ", 0x4246, 2, 0, 0, 1, 24, 0, 0)[:6]
            wide += struct.pack("<HHQQQ", 1, 24, nbytes, packed, header)
            fields = (0xFFFFFFFF,) * 3
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 0, 0, m.flags, m.method, 0, 0, crc32, *fields[:2],
            len(name), len(wide), 0, 0, 0, 0, fields[2],
        )  # fmt: skip
        directory += name + wide
    out += gap
    offset = lies.get("offset", len(out))
    count = lies.get("count", len(members))
    nbytes = lies.get("nbytes", len(directory))
    out += directory
    if zip64:
        end64 = lies.get("end64", len(out))
        out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", lies.get("size64", 44), 0, 0, 0, 0, count, count, nbytes, offset)
        out += struct.pack("<4sLQL", b"PK\6\7", 0, end64, lies.get("disks", 1))
    if lies.get("ones"):
        count, nbytes, offset = 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF
    count = lies.get("short_count", count)
    out += struct.pack("<4s4H2LH", b"PK\5\6", lies.get("disk", 0), 0, count, count, nbytes, offset, len(comment))
    return bytes(out) + comment


def archive_of(pickled, records=(), byteorder=b"little", **options):
    """Return an archive of a pickle and records; a record is bytes, or a Member that lies."""
    members = [Member("archive/data.pkl", pickled)]
    if byteorder is not None:
        members.append(Member("archive/byteorder", byteorder))
    for k, record in enumerate(records):
        members.append(record if isinstance(record, Member) else Member(f"archive/data/{k}", record))
    members.append(Member("archive/version", b"3\n"))
    return crafted_zip(members, **options)
