"""Items of .distcp files: the first of a kind is parsed, the others compared with it, and no difference passes."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from isal import isal_zlib

from xrank.errors import CorruptError, UnsafeError, XrankError
from xrank.formats import dcp_items
from xrank.formats.dcp_items import ItemReader
from xrank.storage.regular_file import open_regular
from xrank.testing.reader_contract import whole


def write(path: Path, tensors: Sequence[object]) -> tuple[list[int], list[int]]:
    """Write items as `FileSystemWriter` does, one after the other; return where each begins and its length."""
    starts, lengths = [], []
    with path.open("wb") as file:
        for tensor in tensors:
            item = io.BytesIO()
            torch.save(tensor, item)
            starts.append(file.tell())
            lengths.append(file.write(item.getvalue()))
    return starts, lengths


def read(
    path: Path, starts: Sequence[int], lengths: Sequence[int], reader: ItemReader | None = None
) -> list[list[int]]:
    with open_regular(str(path), 3) as file:
        return (reader or ItemReader()).read(file, starts, lengths, [f"t{k}" for k in range(len(starts))]).tolist()


def count_parsed(path: Path, starts: Sequence[int], lengths: Sequence[int], reader: ItemReader) -> int:
    with mock.patch.object(dcp_items, "read_archive_in", wraps=dcp_items.read_archive_in) as parse:
        read(path, starts, lengths, reader)
    return parse.call_count


@pytest.mark.parametrize("shape", [(3, 4), (200, 300)], ids=["small", "read at its ends"])
def test_one_of_each_kind_is_parsed(tmp_path: Path, shape: tuple[int, int]) -> None:
    path = tmp_path / "__3_0.distcp"
    kinds = [lambda: torch.rand(shape), lambda: torch.rand(shape).t(), lambda: torch.rand(shape).to(torch.bfloat16)]
    tensors = [make() for _ in range(20) for make in kinds]
    starts, lengths = write(path, tensors)
    reader = ItemReader()
    content = path.read_bytes()
    for tensor, (kind, offset, nbytes, crc32) in zip(tensors, read(path, starts, lengths, reader), strict=True):
        raw = content[offset : offset + nbytes]
        assert raw == whole(tensor.t() if not tensor.is_contiguous() else tensor).data
        assert crc32 == isal_zlib.crc32(raw)
        found = reader.kinds[kind]
        assert (found.shape, found.strides, found.storage_offset) == (tuple(tensor.shape), tensor.stride(), 0)
    assert len(reader.kinds) == 3
    assert count_parsed(path, starts, lengths, ItemReader()) == 3
    assert count_parsed(path, starts, lengths, reader) == 0  # of another file, say


def test_a_flipped_bit_is_judged_as_if_each_item_were_parsed(tmp_path: Path) -> None:
    # In all but the tensor itself, which the gather checks by its checksum.
    path = tmp_path / "__3_0.distcp"
    starts, lengths = write(path, [torch.rand(3, 4) for _ in range(2)])
    content = path.read_bytes()
    reader = ItemReader()
    right = read(path, starts, lengths, reader)
    payload = range(right[1][1], right[1][1] + right[1][2])
    places = [at for at in range(starts[1], len(content)) if at not in payload]
    draw = random.Random(2)
    num_refused = 0
    for at in draw.sample(places, 500):
        flipped = bytearray(content)
        flipped[at] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            read(path, starts[1:], lengths[1:])
        except XrankError:
            with pytest.raises((CorruptError, UnsafeError)) as caught:
                read(path, starts, lengths, reader)
            assert caught.value.tensor == "t1" and caught.value.rank == 3
            num_refused += 1
        else:
            assert read(path, starts, lengths, reader) == right
    assert num_refused > 200  # the others are in torch's padding and its id


def test_checksums_exchanged_by_hand_are_those_of_the_directory(tmp_path: Path) -> None:
    # Only one of the places where the checksum stands says otherwise: no pattern takes that.
    path = tmp_path / "__3_0.distcp"
    starts, lengths = write(path, [torch.rand(3, 4) for _ in range(2)])
    content = bytearray(path.read_bytes())
    crc = read(path, starts, lengths)[1][3].to_bytes(4, "little")
    for place in (content.index(crc), content.rindex(crc)):
        changed = bytearray(content)
        changed[place : place + 4] = b"\1\2\3\4"
        path.write_bytes(changed)
        with pytest.raises(CorruptError, match="t1"):
            read(path, starts, lengths)


@pytest.mark.parametrize("lie", [-1, 1, 100])
def test_items_elsewhere_than_told(tmp_path: Path, lie: int) -> None:
    path = tmp_path / "__3_0.distcp"
    starts, lengths = write(path, [torch.rand(3, 4) for _ in range(3)])
    for told in (
        ([starts[0], starts[1] + lie, starts[2]], lengths),
        (starts, [lengths[0], lengths[1] + lie, lengths[2]]),
        (starts, [*lengths[:2], 1 << 60]),
    ):
        with pytest.raises(CorruptError) as caught:
            read(path, *told)
        assert caught.value.tensor in ("t1", "t2") and caught.value.file == str(path)


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "__3_0.distcp"
    told = write(path, [{"a": torch.rand(3)}])
    with pytest.raises(CorruptError, match="should be a tensor"):
        read(path, *told)
