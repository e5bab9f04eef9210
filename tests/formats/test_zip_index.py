"""The zip's members: where torch put them, and nowhere else."""

import io
import random
import struct
import zipfile
import zlib

import pytest
import torch

from tests.formats.crafted_zip import Member, crafted_zip
from xrank.errors import CorruptError, XrankError
from xrank.formats import torch_archive
from xrank.formats.torch_archive import ItemBytes, open_item, read_members
from xrank.storage.regular_file import RegularFile, open_regular
from xrank.workspace.nfs import NFSWorkspace

pytestmark = pytest.mark.quick

THREE = [Member("a/x", b"12345"), Member("a/empty", b"", flags=0x800), Member("a/y", b"6" * 300, padding=40)]


@pytest.fixture
def members(tmp_path):
    def read(raw, start=0, nbytes=None):
        (tmp_path / "zip").write_bytes(raw)
        with open_regular(str(tmp_path / "zip"), 2) as file:
            item = open_item(file, start, nbytes)
            return {m.name: (item.read(m.offset, m.nbytes), m.crc32) for m in read_members(item)}

    return read


def known(raw):
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {info.filename: (archive.read(info), info.CRC) for info in archive.infolist()}


@pytest.mark.parametrize("zip64", [True, False])
@pytest.mark.parametrize("ones", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("comment", [b"", b"said PK\5\6" + bytes(60)])
def test_members_are_those_the_standard_library_finds(members, zip64, ones, wide, comment):
    listed = [Member(m.name, m.data, flags=m.flags, padding=m.padding, zip64=wide) for m in THREE]
    raw = crafted_zip(listed, zip64=zip64, ones=ones and zip64, comment=comment)
    want = known(crafted_zip(THREE))
    assert members(raw) == want
    assert members(b"before" + raw + b"after", 6, len(raw)) == want


def test_many_members_need_more_than_the_tail(members):
    raw = crafted_zip([Member(f"a/{k}", b"%d" % k) for k in range(3000)])
    assert members(raw) == known(raw)


def test_payloads_that_are_far_apart_follow_from_the_directory(tmp_path, monkeypatch):
    """Without a read of each local header; what each of the two ways finds is the same."""
    torch.save({f"{k}": torch.full((k % 5 * 5000 + 1,), k) for k in range(40)}, tmp_path / "torch")
    workspace = NFSWorkspace(tmp_path, rank=0, world_size=1)
    workspace.write_configs_and_weights({}, {f"{k}": torch.full((k % 5 * 5000,), k) for k in range(40)})
    for name in ("torch", "rank_0_state.pth"):
        found = []
        for most in (1000, 3):
            monkeypatch.setattr(torch_archive, "_MOST_READS", most)
            with open_regular(str(tmp_path / name)) as file:
                item, ranges = open_item(file), []
                counted = ItemBytes(
                    CountedFile(file.descriptor, file.status, file.origin, ranges), 0, item.nbytes, item.tail
                )
                found.append((list(read_members(counted)), len(ranges)))
        assert found[0][0] == found[1][0] and found[0][1] > 10 > found[1][1]
        assert {m.name: m.offset for m in found[0][0]} == {
            info.filename: info.header_offset + 30 + len(info.filename) + _extra(tmp_path / name, info.header_offset)
            for info in zipfile.ZipFile(tmp_path / name).infolist()
        }


class CountedFile(RegularFile, frozen=True):
    ranges: list

    def read(self, offset, nbytes):
        self.ranges.append((offset, nbytes))
        return super().read(offset, nbytes)


def _extra(path, header):
    return int.from_bytes(path.read_bytes()[header + 28 : header + 30], "little")


def test_what_only_local_headers_show_is_left_to_checksums(members, monkeypatch):
    """Where they are many and far apart, damage of a local header, a descriptor or a gap."""
    accepted = set()
    for kind, raw in REFUSED.items():
        monkeypatch.setattr(torch_archive, "_MOST_READS", 1000)
        with pytest.raises(CorruptError) as caught:
            members(raw)
        monkeypatch.setattr(torch_archive, "_MOST_READS", 0)
        try:
            found = members(raw)
        except XrankError as error:
            assert str(error) == str(caught.value), kind
        else:
            accepted.add((kind, all(zlib.crc32(data) == crc for data, crc in found.values())))
    assert {kind for kind, is_right in accepted if is_right} == {
        "local name longer",
        "descriptor of nothing",
        "local name differs",
    }
    # The checksum of the payload differs, which is compared when it is read.
    assert {kind for kind, is_right in accepted if not is_right} == {
        "bytes between",
        "descriptor unasked",
        "descriptor unsigned",
        "size too large",
        "size too small",
    }


def test_no_members(members):
    assert members(crafted_zip([])) == {}


def test_a_descriptor_with_long_sizes(members):
    descriptor = struct.pack("<4sLQQ", b"PK\7\x08", zlib.crc32(b"1"), 1, 1)
    assert members(crafted_zip([Member("a/x", b"1", descriptor=descriptor), Member("a/y")]))["a/x"][0] == b"1"


X = Member("a/x", b"12345")
REFUSED = {
    "empty": b"",
    "garbage": b"garbage" * 100,
    "tar": b"\0" * 10240,
    "bytes before": b"x" + crafted_zip([X]),
    "bytes after": crafted_zip([X]) + b"x",
    "bytes between": crafted_zip([X], gap=b"x"),
    "name twice": crafted_zip([X, X]),
    "compressed": crafted_zip([Member("a/x", b"12345", method=8)]),
    "sizes differ": crafted_zip([Member("a/x", b"12345", packed_nbytes=4)]),
    "encrypted": crafted_zip([Member("a/x", b"12345", flags=0x809)]),
    "directory encrypted": crafted_zip([Member("a/x", b"12345", flags=0x2808)]),
    "size too small": crafted_zip([Member("a/x", b"12345", nbytes=4)]),
    "size too large": crafted_zip([Member("a/x", b"12345", nbytes=6)]),
    "size past the end": crafted_zip([Member("a/x", b"12345", nbytes=1 << 20)]),
    "size past all ends": crafted_zip([Member("a/x", b"1", nbytes=(1 << 64) - 1, zip64=True)]),
    "size over the next member": crafted_zip([Member("a/x", b"1", nbytes=70), Member("a/y", b"2" * 40)]),
    "two on one header": crafted_zip([X, Member("a/y", b"12345", header=0, local_name="a/x")]),
    "header inside a payload": crafted_zip([X, Member("a/y", b"1", header=20)]),
    "header past the end": crafted_zip([Member("a/x", b"1", header=1 << 30)]),
    "header far past the end": crafted_zip([Member("a/x", b"1", header=1 << 62, zip64=True)]),
    "local name differs": crafted_zip([Member("a/x", b"1", local_name="a/z")]),
    "local name longer": crafted_zip([Member("a/x", b"1", local_name="a/xx")]),
    "descriptor missing": crafted_zip([Member("a/x", b"1", descriptor=b"")]),
    "descriptor of nothing": crafted_zip([Member("a/x", b"1", descriptor=bytes(16))]),
    "descriptor unsigned": crafted_zip([Member("a/x", b"1", descriptor=bytes(12))]),
    "descriptor unasked": crafted_zip([Member("a/x", b"1", flags=0x800, descriptor=bytes(16))]),
    "count too small": crafted_zip([X, Member("a/y")], count=1),
    "count too large": crafted_zip([X], count=2),
    "count enormous": crafted_zip([X], count=1 << 60, short_count=0xFFFF),
    "directory enormous": crafted_zip([X], nbytes=1 << 31),
    "directory elsewhere": crafted_zip([X], offset=3),
    "zip64 elsewhere": crafted_zip([X], end64=3),
    "zip64 past the end": crafted_zip([X], end64=1 << 62),
    "zip64 of another size": crafted_zip([X], size64=45),
    "zip64 on more disks": crafted_zip([X], disks=2),
    "short and long differ": crafted_zip([X], short_count=2),
    "more disks": crafted_zip([X], zip64=False, disk=1),
    "ones without zip64": crafted_zip([X], zip64=False, ones=True),
    "name no UTF-8": crafted_zip([X]).replace(b"a/x", b"a/\xff"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_lie_is_refused(members, kind, tmp_path):
    with pytest.raises(CorruptError) as caught:
        members(REFUSED[kind])
    assert caught.value.rank == 2
    assert str(tmp_path) in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("start", "nbytes"), [(-1, 5), (0, 10_000), (5, -1), (10_000, None), (1 << 70, 1)])
def test_an_item_outside_the_file(members, start, nbytes):
    with pytest.raises(CorruptError, match="outside the file"):
        members(crafted_zip(THREE), start, nbytes)


def test_a_member_beyond_four_gibibytes(tmp_path):
    # A sparse file: 5 GiB of hole as one record, then a second whose offset needs zip64.
    huge = 5 << 30
    first = crafted_zip([Member("a/huge", b"")])
    local = first[: first.index(b"PK\7\x08")]
    second_header = len(local) + huge + 24
    name = b"a/next"
    second = struct.pack("<4s5H3L2H", b"PK\3\4", 0, 0x808, 0, 0, 0, 0, 0, 0, len(name), 0) + name + b"tail"
    second += struct.pack("<4sLLL", b"PK\7\x08", 0, 4, 4)
    directory = b""
    for member, nbytes, header in ((b"a/huge", huge, 0), (name, 4, second_header)):
        fields = [nbytes, nbytes, header]
        wide = b"".join(struct.pack("<Q", value) for value in fields if value >= 0xFFFFFFFF)
        packed, full, at = (min(value, 0xFFFFFFFF) for value in fields)
        extra = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 0, 0, 0x808, 0, 0, 0, 0, packed, full, len(member), len(extra), 0, 0, 0, 0, at
        )
        directory += member + extra
    offset = second_header + len(second)
    end64 = offset + len(directory)
    tail = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, 2, 2, len(directory), offset)
    tail += struct.pack("<4sLQL", b"PK\6\7", 0, end64, 1)
    tail += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 2, 2, len(directory), 0xFFFFFFFF, 0)
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        out.write(local)
        out.seek(second_header - 24)
        out.write(struct.pack("<4sLQQ", b"PK\7\x08", 0, huge, huge))
        out.write(second + directory + tail)
    with open_regular(str(path)) as file:
        item = open_item(file)
        found = {m.name: (m.offset, m.nbytes) for m in read_members(item)}
        assert found == {"a/huge": (len(local), huge), "a/next": (second_header + 36, 4)}
        assert item.read(found["a/next"][0], 4) == b"tail"


def test_every_truncation_is_refused(members):
    raw = crafted_zip(THREE)
    for length in range(len(raw)):
        with pytest.raises(CorruptError):
            members(raw[:length])


def test_every_flipped_bit_is_refused_or_changes_no_byte_that_is_read(members):
    raw = crafted_zip(THREE)
    want = known(raw)
    at = random.Random(1)
    spans = [(0, 40), (raw.index(b"PK\1\2"), len(raw))]
    for start, end in spans:
        for k in range(start, end):
            mangled = bytearray(raw)
            mangled[k] ^= 1 << at.randrange(8)
            try:
                got = members(bytes(mangled))
            except XrankError:
                continue
            # What is left: times, versions, attributes, checksums.
            assert {name: data for name, (data, _) in got.items()} == {name: data for name, (data, _) in want.items()}
