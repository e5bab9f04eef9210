"""Code that a source's pickles name in parts that a gather leaves out is noted, and refused on demand."""

from __future__ import annotations

import dataclasses
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.cli.bench import run
from tests.readers.made_megatron import Run, whole_model, write_dist, write_legacy
from tests.readers.made_zero import Zero, made_model, write_zero
from tests.readers.test_model_parts import MODEL
from xrank.commands.gather import gather_checkpoint
from xrank.errors import UnsafeError


@dataclasses.dataclass
class Mine:
    """A class of the user's own, as hyperparameters and client states hold them."""

    x: int = 1


def torch_save(folder: Path) -> Path:
    torch.save({"state_dict": MODEL, "hyper_parameters": Mine()}, folder / "last.ckpt")
    return folder / "last.ckpt"


def deepspeed(folder: Path) -> Path:
    write_zero(folder, made_model(), Zero(changed_state={"client": Mine()}))
    return folder


def metadata(folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(MODEL), checkpoint_id=str(folder), no_dist=True)
    path = folder / ".metadata"
    saved = pickle.loads(path.read_bytes())
    saved.mine = Mine()
    path.write_bytes(pickle.dumps(saved))
    return folder


def megatron_legacy(folder: Path) -> Path:
    return with_own_args(write_legacy(folder, Run()), "model_optim_rng.pt")


def megatron_dist(folder: Path) -> Path:
    return with_own_args(write_dist(folder, Run(), whole_model(Run())), "common.pt")


def with_own_args(folder: Path, name: str) -> Path:
    for path in folder.rglob(name):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "my_state": Mine()}, path)
    return folder


SOURCES: list[Callable[[Path], Path]] = [torch_save, deepspeed, metadata, megatron_legacy, megatron_dist]


@pytest.fixture(params=SOURCES, ids=lambda make: make.__name__)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return request.param(tmp_path / "source")


def test_class_of_the_user_is_noted(source: Path, tmp_path: Path) -> None:
    report = gather_checkpoint(source, tmp_path / "out", recipe="none")
    note = dict(report.notes)["foreign-names"]
    assert f"names {__name__}.Mine near byte" in note and "torch.load(weights_only=False) would run it" in note


def test_class_of_the_user_is_refused_if_asked_for(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsafeError, match=r"Mine near byte \d+ of its pickle"):
        gather_checkpoint(source, tmp_path / "out", strict_pickles=True, recipe="none")
    assert not (tmp_path / "out").exists()


def test_text_of_the_command(tmp_path: Path) -> None:
    path = torch_save(tmp_path)
    ended = run("gather", path, "--out", tmp_path / "out", "--strict-pickles")
    assert ended.exit_code == 4
    assert "omit --strict-pickles" in ended.stderr
    assert run("gather", path, "--out", tmp_path / "out").exit_code == 0


@pytest.mark.parametrize("make", [torch_save, deepspeed, megatron_legacy], ids=lambda make: make.__name__)
def test_files_of_frameworks_are_not_noted(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Mine", dict)
    (tmp_path / "source").mkdir()
    report = gather_checkpoint(make(tmp_path / "source"), tmp_path / "out", strict_pickles=True, recipe="none")
    assert "foreign-names" not in dict(report.notes)


class Attack:
    """Runs a command in a plain unpickler."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


def test_attack_beside_the_model_is_refused_where_its_result_is_discarded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    path = torch_save(tmp_path)
    inject(path, pickle.dumps(Attack(f"touch {marker}"), 2)[2:-1] + b"0")
    with pytest.raises(UnsafeError, match="discards the result"):
        gather_checkpoint(path, tmp_path / "out")
    assert not marker.exists() and not (tmp_path / "out").exists()


def inject(path: Path, code: bytes) -> None:
    """Put opcodes at the start of an archive's pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data[:2] + code + data[2:] if name.endswith("/data.pkl") else data)
