"""Files of archives one after another: what torch reads at each place, and where large tensors begin."""

from __future__ import annotations

import io
import struct

import torch
from isal import isal_zlib

from xrank.engine.torch_files import Item, bare_file, lay_out_items, view
from xrank.layout.output_files import OutputFile, OutputTensor

ITEMS = [
    Item({"lr": 0.1}),
    Item(view("F32", ()), content=struct.pack("<f", 7.0)),
    Item(view("BF16", (3, 2)), OutputTensor("a", "BF16", (3, 2))),
    Item({"param": view("F32", (1 << 18,))}, OutputTensor("b", "F32", (1 << 18,))),
    Item(view("F32", (0, 4)), OutputTensor("c", "F32", (0, 4))),
    Item([]),
]


def written(file: OutputFile, contents: list[bytes]) -> bytes:
    """Return the file as the engine writes it, and as a store gets it: late bytes once each."""
    data, late = bytearray(file.nbytes), bytearray(file.nbytes)
    placed = [(0, file.header), *file.fragments]
    placed += [(tensor.offset, content) for tensor, content in zip(file.tensors, contents, strict=True)]
    crcs = [isal_zlib.crc32(content) for content in contents]
    assert file.ending is not None and file.trailer is not None
    ending = list(file.ending(crcs))
    trailers = [file.trailer(row, crc) for row, crc in enumerate(crcs)]
    assert trailers == [*ending[:-1], None]
    assert [(at, len(part)) for at, part in ending] == list(file.late_places)
    for at, part in (*placed, *ending):
        assert not any(late[at : at + len(part)]), "two parts of the file overlap"
        data[at : at + len(part)], late[at : at + len(part)] = part, b"\1" * len(part)
    return bytes(data)


def test_torch_reads_each_item() -> None:
    file, places = lay_out_items("x", ITEMS)
    small, large = torch.arange(6).bfloat16().view(3, 2), torch.arange(float(1 << 18))
    data = written(file, [small.view(torch.uint8).numpy().tobytes(), large.numpy().tobytes()])
    assert [start % 64 for start, _ in places] == [0] * len(ITEMS)
    assert file.tensors[1].offset % 4096 == 0
    found = [torch.load(io.BytesIO(data[start : start + nbytes]), weights_only=True) for start, nbytes in places]
    assert found[0] == {"lr": 0.1} and found[5] == []
    assert found[1] == 7 and found[1].shape == ()
    assert torch.equal(found[2], small) and torch.equal(found[3]["param"], large)
    assert found[4].shape == (0, 4)


def test_a_file_without_tensors() -> None:
    file, ((_, nbytes),) = lay_out_items("x", [Item({"a": 1})])
    assert file.ending is None and file.nbytes == nbytes
    data = bytearray(file.nbytes)
    for at, part in ((0, file.header), *file.fragments):
        data[at : at + len(part)] = part
    assert torch.load(io.BytesIO(bytes(data)), weights_only=True) == {"a": 1}
    assert bare_file("latest", b"step") == OutputFile("latest", b"step", (), 4)
