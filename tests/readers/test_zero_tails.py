"""A file that a crash left with blocks of zeros at its end is noted; tensors of zeros are not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.readers import placement

BLOCK = 4096


def save_model(folder: Path, **tensors: torch.Tensor) -> Path:
    torch.manual_seed(0)
    file = folder / "model.safetensors"
    save_file({"a": torch.rand(5000) + 1, **tensors}, file)
    return file


def crash(file: Path, nbytes: int) -> int:
    """Let the data from the border before the last `nbytes` on be lost; return its number of bytes."""
    content = file.read_bytes()
    border = (len(content) - nbytes) // BLOCK * BLOCK
    file.write_bytes(content[:border] + bytes(len(content) - border))
    return len(content) - border


def zero_notes(folder: Path) -> list[str]:
    return [text for code, text in inspect_source(folder).notes if code == "zero-blocks"]


@pytest.mark.parametrize("nbytes", [BLOCK, 3 * BLOCK + 100, 15_000])
@pytest.mark.parametrize("chunk_nbytes", [BLOCK, 1 << 20])
def test_lost_blocks_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int, chunk_nbytes: int) -> None:
    monkeypatch.setattr(placement, "_CHUNK_NBYTES", chunk_nbytes)
    file = save_model(tmp_path)
    assert zero_notes(tmp_path) == []
    lost = crash(file, nbytes)
    (note,) = zero_notes(tmp_path)
    assert note.startswith(f"{file} ends in {lost:,} bytes of zeros, which begin at a block boundary")
    report = gather_checkpoint(tmp_path, tmp_path / "out")  # a note, and no refusal
    assert report.ok and ("zero-blocks", note) in report.notes


def test_less_than_a_block_is_not_noted(tmp_path: Path) -> None:
    file = save_model(tmp_path)
    content = file.read_bytes()
    assert len(content) % BLOCK > 100
    crash(file, 100)
    assert zero_notes(tmp_path) == []


def test_tensors_of_zeros_and_zero_rows_are_not_noted(tmp_path: Path) -> None:
    rows = torch.rand(64, 1000) + 1
    rows[40:] = 0
    for number, tensors in enumerate([{"z": torch.zeros(30_000)}, {"z": rows}, {"y": rows, "z": torch.zeros(5000)}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_model(folder, **tensors)
        assert zero_notes(folder) == []


def test_shards_without_checksums_are_noted_and_archives_never(tmp_path: Path) -> None:
    model = {"a": torch.rand(5000) + 1, "z": torch.zeros(5000)}
    for name, options in {
        "archives": {"checkpoint_id": str(tmp_path / "archives")},
        "shards": {
            "storage_writer": HuggingFaceStorageWriter(
                str(tmp_path / "shards"), dict.fromkeys(model, 1), save_distributed=True
            )
        },
    }.items():
        with warnings.catch_warnings(action="ignore"):
            dcp.save(model, no_dist=True, **options)
        assert not zero_notes(tmp_path / name)
    (file,) = (tmp_path / "shards").glob("*.safetensors")
    crash(file, 30_000)
    base = tmp_path / "base"
    base.mkdir()
    save_file(model, base / "model.safetensors")
    report = gather_checkpoint(tmp_path / "shards", tmp_path / "out", base_model=base)
    assert [str(file) in text for code, text in report.notes if code == "zero-blocks"] == [True]
