"""Failures of the system while files are read: repeated if they may pass, and never taken for damage."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.readers.made_zero import made_model, write_zero
from xrank import system
from xrank.commands.gather import gather_checkpoint
from xrank.errors import CorruptError, XrankError
from xrank.storage import regular_file
from xrank.storage.regular_file import open_regular

MODEL = {"model.norm.weight": torch.arange(8.0)}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_file, "_RETRY_SECONDS", (0.0, 0.0, 0.0))


def failing(function: Callable[..., Any], code: int, *, times: int, name: str = "") -> Callable[..., Any]:
    """Return the function, which fails so often on paths that end so."""
    left = [times]

    def call(*args: Any, **options: Any) -> Any:
        if left[0] and (not name or os.fspath(args[0]).endswith(name)):
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        return function(*args, **options)

    return call


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_failure_that_passes_is_not_seen(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    monkeypatch.setattr(system, "read_bytes_at", failing(system.read_bytes_at, code, times=3))
    with open_regular(str(path)) as file:
        assert file.read(0, 3) == b"abc"


@pytest.mark.parametrize(
    ("code", "match", "step"),
    [
        (errno.EIO, "cannot be read at byte 0: Input/output error", "failing disk or server"),
        (errno.ENOMEM, "Cannot allocate memory", "failing disk or server"),
        (errno.EBADMSG, "Bad message", "copy it again"),
    ],
)
def test_failure_that_stays(code: int, match: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    monkeypatch.setattr(system, "read_bytes_at", failing(system.read_bytes_at, code, times=9))
    with pytest.raises(XrankError, match=match) as caught, open_regular(str(path)) as file:
        file.read(0, 3)
    assert caught.value.exit_code == (4 if code == errno.EBADMSG else 1)
    assert isinstance(caught.value, CorruptError) == (code == errno.EBADMSG)
    assert step in (caught.value.next_step or "")


def save_dcp(folder: Path) -> str:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(dict(MODEL), checkpoint_id=str(folder), no_dist=True)
    return ".metadata"


def save_zero(folder: Path) -> str:
    write_zero(folder, made_model())
    return "mp_rank_00_model_states.pt"


def save_torch(folder: Path) -> str:
    folder.mkdir()
    torch.save(MODEL, folder / "model.pt")
    return "model.pt"


def save_safetensors(folder: Path) -> str:
    folder.mkdir()
    save_file(MODEL, folder / "model.safetensors")
    return "model.safetensors"


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("save", [save_dcp, save_zero, save_torch, save_safetensors], ids=lambda save: save.__name__)
def test_gather_of_a_file_that_cannot_be_opened_now(
    save: Callable[[Path], str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = save(tmp_path / "source")
    monkeypatch.setattr(os, "open", failing(os.open, code, times=10**6, name=name))
    with pytest.raises(XrankError) as caught:
        gather_checkpoint(tmp_path / "source", tmp_path / "out", recipe="none")
    assert caught.value.exit_code == 1, caught.value
    assert ("ulimit -n" if code == errno.EMFILE else "failing disk") in (caught.value.next_step or "")
    assert not (tmp_path / "out").exists()
