"""Shared extents: what a file system is asked, what happens where it refuses, and a real XFS where one can be had."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.cli.bench import run
from xrank import NFSWorkspace, gather_checkpoint
from xrank.engine import buffers
from xrank.errors import XrankError
from xrank.layout import DeviceMesh, LayoutMap

ROWS = {"big": (1024, 512), "odd": (33, 7), "more": (512, 512), "part": (600, 512)}


def leave(folder: Path) -> dict[str, torch.Tensor]:
    """Leave two ranks' rows; of all tensors but one they begin and end at blocks of 4,096 bytes."""
    torch.manual_seed(0)
    model = {name: torch.randn(shape) for name, shape in ROWS.items()}
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts.update(dict.fromkeys(ROWS, "[n/~tp, m]"))
    for rank in range(2):
        held = {name: tensor.chunk(2)[rank].contiguous() for name, tensor in model.items()}
        NFSWorkspace(folder, rank=rank, world_size=2, run_id="run").write_configs_and_weights({}, held, layouts=layouts)
    return model


def assert_holds(folder: Path, model: dict[str, torch.Tensor]) -> None:
    import safetensors.torch

    found = safetensors.torch.load_file(folder / "model.safetensors")
    assert found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


class FileSystem:
    """Does what an ioctl of a file system with reflinks does, by copying, and keeps what it was asked."""

    def __init__(self, refuse: int | None = None) -> None:
        self.refuse, self.asked = refuse, list[tuple[int, int, int]]()

    def ioctl(self, target: int, request: int, argument: bytes) -> int:
        assert request == 0x4020940D
        source, start, nbytes, into = struct.unpack("<qQQQ", argument)
        self.asked.append((start, nbytes, into))
        if self.refuse is not None:
            raise OSError(self.refuse, os.strerror(self.refuse))
        assert start % 4096 == nbytes % 4096 == into % 4096 == 0
        os.pwrite(target, os.pread(source, nbytes, start), into)
        return 0


@pytest.fixture
def file_system(monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    made = FileSystem()
    monkeypatch.setattr(buffers.fcntl, "ioctl", made.ioctl)
    return made


def test_whole_blocks_are_shared_and_the_rest_is_written(tmp_path: Path, file_system: FileSystem) -> None:
    model = leave(tmp_path / "ws")
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out", workers=2)
    assert_holds(tmp_path / "out", model)
    assert report.output is not None and report.output["shared_nbytes"] == sum(one[1] for one in file_system.asked)
    assert "shared with the source" in run("gather", tmp_path / "ws", "-o", tmp_path / "again").stdout
    del file_system.asked[len(file_system.asked) // 2 :]  # the second gather's
    aligned = sum(tensor.nbytes for name, tensor in model.items() if name != "odd")
    # At a window's edge a piece may be too short to be worth it.
    assert aligned - (64 << 10) < sum(nbytes for _, nbytes, _ in file_system.asked) <= aligned
    ranges = sorted((into, into + nbytes) for _, nbytes, into in file_system.asked)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_refusal_is_a_copy_and_is_not_asked_for_again(tmp_path: Path, file_system: FileSystem, number: int) -> None:
    file_system.refuse = number
    model = leave(tmp_path / "ws")
    report = gather_checkpoint(tmp_path / "ws", tmp_path / "out", workers=1)
    assert_holds(tmp_path / "out", model)
    assert report.output is not None and report.output["shared_nbytes"] == 0
    assert len(file_system.asked) == (2 if number == errno.EINVAL else 1)  # a file pair, or all of them


def test_a_disk_that_fails_is_no_refusal(tmp_path: Path, file_system: FileSystem) -> None:
    file_system.refuse = errno.EIO
    leave(tmp_path / "ws")
    with pytest.raises(XrankError, match="Input/output error"):
        gather_checkpoint(tmp_path / "ws", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_casts_share_nothing(tmp_path: Path, file_system: FileSystem) -> None:
    model = leave(tmp_path / "ws")
    gather_checkpoint(tmp_path / "ws", tmp_path / "out", dtype="bf16")
    assert_holds(tmp_path / "out", {name: tensor.bfloat16() for name, tensor in model.items()})
    assert file_system.asked == []


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A file system with reflinks, in an image of its own."""
    image, place = tmp_path / "image", tmp_path / "xfs"
    place.mkdir()
    if os.geteuid() != 0 or shutil.which("mkfs.xfs") is None:
        pytest.skip("needs root and mkfs.xfs")
    with image.open("wb") as file:
        file.truncate(400 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True).returncode:
        pytest.skip("no loop device may be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_real_file_system_needs_hardly_any_new_block(xfs: Path) -> None:
    model = leave(xfs / "ws")
    os.sync()
    before = shutil.disk_usage(xfs).used
    gather_checkpoint(xfs / "ws", xfs / "out", verify=True)
    os.sync()
    assert shutil.disk_usage(xfs).used - before < sum(tensor.nbytes for tensor in model.values()) / 8
    assert_holds(xfs / "out", model)
