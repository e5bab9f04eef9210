"""Enums' members that Python 3.11.0 to 3.11.3 (Debian 12's is 3.11.2) pickle by name: `getattr(Enum, "MEMBER")`."""

from __future__ import annotations

import enum
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from tests.formats.crafted_zip import archive_of
from tests.readers.made_megatron import Run, whole_model, write_config, write_dist
from tests.readers.made_zero import Zero, made_model, write_zero
from xrank.commands.gather import gather_checkpoint
from xrank.errors import CorruptError, UnsafeError
from xrank.formats.dcp_metadata import read_metadata
from xrank.formats.torch_archive import read_archive


def save_dcp(folder: Path) -> None:
    dcp.save({"a": torch.arange(6.0), "b": torch.ones(2, 3)}, checkpoint_id=str(folder), no_dist=True)


def save_dist(folder: Path) -> None:
    run = Run(tp=2)
    write_dist(folder, run, whole_model(run))
    write_config(folder, run)


SAVES = {
    "dcp": save_dcp,
    "megatron": save_dist,
    "zero1": lambda folder: write_zero(folder, made_model(), Zero(stage=1)),
    "zero2": lambda folder: write_zero(folder, made_model(), Zero(stage=2)),
    "zero3": lambda folder: write_zero(folder, made_model(), Zero(stage=3)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SAVES)
def test_a_checkpoint_with_named_members_is_read(tmp_path, monkeypatch, kind):
    SAVES[kind](tmp_path / "others")
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self._name_)))
    SAVES[kind](tmp_path / "named")
    monkeypatch.undo()
    pickled = [path for path in (tmp_path / "named").rglob("*") if path.is_file() and b"getattr" in path.read_bytes()]
    assert pickled
    for name in ("others", "named"):
        gather_checkpoint(tmp_path / name, tmp_path / f"{name}-out", recipe="none")
    one, other = (load_file(tmp_path / f"{name}-out" / "model.safetensors") for name in ("others", "named"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


STAGE = b"cdeepspeed.runtime.zero.config\nZeroStageEnum\n"


@pytest.mark.parametrize("member", [b"system", b"__init__"])
def test_members_of_other_classes_are_refused(tmp_path, member):
    owner = STAGE if member == b"__init__" else b"cos\npath\n"
    pickled = b"\x80\x02c__builtin__\ngetattr\n" + owner + b"X" + len(member).to_bytes(4, "little") + member + b"\x86R"
    (tmp_path / "metadata").write_bytes(pickled + b".")
    with pytest.raises(UnsafeError, match=r"runs '__builtin__\.getattr'"):
        read_metadata(str(tmp_path / "metadata"))
    (tmp_path / "state.pt").write_bytes(archive_of(pickled + b"0N."))
    with pytest.raises(UnsafeError, match="discards the result"):
        read_archive(str(tmp_path / "state.pt"))


def test_a_stage_of_another_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), "other")))
    write_zero(tmp_path / "run", made_model(), Zero(stage=2))
    with pytest.raises(CorruptError, match="zero_stage is not a stage"):
        gather_checkpoint(tmp_path / "run", tmp_path / "out")
