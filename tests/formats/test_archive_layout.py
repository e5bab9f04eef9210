"""Archives laid out beforehand are those that torch would have written, and torch reads them in every way it has."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import serialization

from xrank.dtypes import DTYPES
from xrank.formats.rank_state import state_pickle
from xrank.formats.torch_archive import ALIGNMENT, ArchivedTensor, lay_out_archive, read_archive

config: Any = serialization.config

CONFIG = {"a": [1, 2.5, None, True, {"é": "ü"}], "big": 2**70, "deep": {"er": {"est": -1}}, "": ""}


def view(key: int, dtype: str, *shape: int) -> ArchivedTensor:
    return ArchivedTensor(str(key), dtype, shape, torch.empty(shape).stride(), 0)


def write(path: Path, pickled: bytes, records: list[bytes]) -> None:
    layout = lay_out_archive(pickled, map(len, records))
    with open(path, "wb") as file:
        file.truncate(layout.nbytes)
        pieces = [(0, layout.front), *layout.headers, *zip(layout.offsets, records, strict=True)]
        for offset, data in (*pieces, *layout.ending([zlib.crc32(data) for data in records])):
            file.seek(offset)
            file.write(data)
        assert file.tell() == layout.nbytes


def loads(path: Path) -> list[Any]:
    """Return what torch finds, read and mapped, with the offsets it looks up and those it computes."""
    found = []
    for mmap in (False, True):
        for computed in (False, True):
            with config.patch({"load.calculate_storage_offsets": computed}):
                found.append(torch.load(path, weights_only=True, mmap=mmap))
    return found


def test_every_element_type_and_shape(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3), (1, 4, 1), (2, 1, 2, 1, 2)]
    tensors = {}
    for dtype in DTYPES.values():
        for shape in shapes:
            values = torch.arange(torch.Size(shape).numel() * dtype.nbytes, dtype=torch.uint8) % 2
            tensors[f"{dtype.name} {shape}"] = (
                values.view(getattr(torch, dtype.torch_name)).view(shape)
                if values.numel()
                else torch.empty(shape, dtype=getattr(torch, dtype.torch_name))
            )
    names = {t.torch_name: t.name for t in DTYPES.values()}
    weights = {
        name: view(key, names[str(tensor.dtype).removeprefix("torch.")], *tensor.shape)
        for key, (name, tensor) in enumerate(tensors.items())
    }
    weights["tied"] = weights["F32 (2, 3)"]
    records = [bytes(t.reshape(-1).view(torch.uint8).numpy()) if t.numel() else b"" for t in tensors.values()]
    write(tmp_path / "s.pth", state_pickle(CONFIG, weights, "record"), records)
    for state in loads(tmp_path / "s.pth"):
        assert state["config"] == CONFIG
        assert state["xrank"] == "record"
        assert list(state["weight"]) == list(weights)
        assert state["weight"]["tied"] is state["weight"]["F32 (2, 3)"]
        for name, tensor in tensors.items():
            found = state["weight"][name]
            assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
            assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
            assert not found.requires_grad
    assert read_archive(str(tmp_path / "s.pth")).value == {"config": CONFIG, "weight": weights, "xrank": "record"}


def members(file: Any) -> list[tuple[Any, ...]]:
    """Return what the directory says of each member but the pickle and torch's own fingerprint."""
    return [
        (m.filename, m.header_offset, m.file_size, m.CRC, m.flag_bits, m.extra, m.compress_type)
        for m in zipfile.ZipFile(file).infolist()
        if m.filename not in ("archive/data.pkl", "archive/.data/serialization_id")
    ]


def test_the_members_are_where_torch_puts_them(tmp_path: Path) -> None:
    # As many bytes of pickle, so that everything after it lies at the same place.
    state = {"weight": {"a": torch.arange(5000.0), "b": torch.empty(0), "c": torch.tensor(3)}}
    stream = io.BytesIO()
    with config.patch({"save.storage_alignment": ALIGNMENT, "save.compute_crc32": True}):
        torch.save(state, stream)
    pickled = zipfile.ZipFile(stream).read("archive/data.pkl")
    records = [bytes(t.reshape(-1).view(torch.uint8).numpy()) if t.numel() else b"" for t in state["weight"].values()]
    write(tmp_path / "s.pth", pickled, records)
    assert members(tmp_path / "s.pth") == members(stream)
    assert zipfile.ZipFile(tmp_path / "s.pth").testzip() is None


@pytest.mark.parametrize("sizes", [[2**32 + 8, 8, 0, 16], [2**32 - 1, 3], [2**31, 2**31, 2**31, 4]])
def test_past_four_gibibytes(tmp_path: Path, sizes: list[int]) -> None:
    """A file of holes: sizes and offsets that need 64 bits, found by torch, which also computes the latter."""
    weights = {f"w{key}": view(key, "U8", nbytes) for key, nbytes in enumerate(sizes)}
    layout = lay_out_archive(state_pickle({}, weights, ""), sizes)
    path = tmp_path / "s.pth"
    with open(path, "wb") as file:
        file.truncate(layout.nbytes)
        # The records' checksums are made up: nobody reads the holes.
        for offset, data in ((0, layout.front), *layout.headers, *layout.ending(list(range(7, 7 + len(sizes))))):
            file.seek(offset)
            file.write(data)
        for key, offset in enumerate(layout.offsets):
            if sizes[key]:
                file.seek(offset)
                file.write(bytes([key + 1]))
    archive = read_archive(str(path))
    assert [(r.offset, r.nbytes) for r in archive.records.values()] == list(zip(layout.offsets, sizes, strict=True))
    assert [m.file_size for m in zipfile.ZipFile(path).infolist() if "/data/" in m.filename] == sizes
    for computed in (False, True):
        with config.patch({"load.calculate_storage_offsets": computed}):
            state = torch.load(path, weights_only=True, mmap=True)
        for key, nbytes in enumerate(sizes):
            tensor = state["weight"][f"w{key}"]
            assert tensor.shape == (nbytes,)
            assert tensor[:1].tolist() == [key + 1][: min(nbytes, 1)]
