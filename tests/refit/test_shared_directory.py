"""Trainers and engines in a directory where all users may write: anything may have a registration's name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import xrank
from xrank.errors import UsageError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

STRANGER = 12_345


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_broken_link(path: Path) -> None:
    path.symlink_to("nowhere")


def put_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def put_holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path may be at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def put_foreign(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    path.write_text('{"format": 2, "id": "x"}')
    os.chown(path, STRANGER, STRANGER)


KINDS = [put_fifo, put_link, put_broken_link, put_folder, put_holes, put_socket, put_foreign]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "refit"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("put", KINDS)
@pytest.mark.parametrize("start", ["engine", "relay"])
def test_what_has_an_engines_name_is_passed_over(place: Path, put: Callable[[Path], None], start: str) -> None:
    put(place / f"{start}-0000-0.json")
    served = torch.zeros(2, 2)
    with (
        xrank.offer_weights({"weight": torch.ones(2, 2)}, place, snapshot=True) as offer,
        xrank.take_weights({"weight": served}, place, relay=True) as weights,
    ):
        offer.publish(1)
        assert weights.update().step == 1
    assert served.eq(1).all() and os.path.lexists(place / f"{start}-0000-0.json")


@pytest.mark.parametrize("put", KINDS)
def test_what_has_the_trainers_name_is_refused_by_name(place: Path, put: Callable[[Path], None]) -> None:
    put(place / "trainer.json")
    with pytest.raises(UsageError, match=r"trainer\.json"):
        xrank.offer_weights({"weight": torch.ones(2, 2)}, place, snapshot=True)
    with (
        xrank.take_weights({"weight": torch.zeros(2, 2)}, place) as weights,
        pytest.raises(UsageError, match=r"trainer\.json"),
    ):
        weights.update(timeout_seconds=5)
    assert os.path.lexists(place / "trainer.json")
    assert sorted(path.name for path in place.iterdir()) == ["trainer.json"]
