"""A directory that several clients make at once, and what a client with an old view of it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from xrank.errors import UsageError
from xrank.storage import shared_directory
from xrank.storage.shared_directory import list_names, make_directory


def test_there_or_not(tmp_path: Path) -> None:
    for _ in range(2):
        make_directory(str(tmp_path / "a" / "b"))
        assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["file", "file/below", "link"])
def test_what_is_no_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    with pytest.raises(UsageError, match="is not a directory"):
        make_directory(str(tmp_path / name))


@pytest.mark.parametrize("looks", [1, 3])
def test_an_old_view_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    path = tmp_path / "made by another client"
    path.mkdir()
    plain, asked = os.stat, []

    def stale(name: Any, **how: Any) -> os.stat_result:
        if os.fspath(name) == str(path):
            asked.append(name)
            if len(asked) <= looks:
                raise FileNotFoundError(2, "No such file or directory", str(path))
        return plain(name, **how)

    monkeypatch.setattr(shared_directory.os, "stat", stale)
    make_directory(str(path))
    assert len(asked) == looks + 1
    asked.clear()
    with pytest.raises(UsageError, match="is not a directory"):
        make_directory(str(path), stale_seconds=-1.0)
    assert len(asked) == 1


@pytest.mark.parametrize("looks", [0, 3])
def test_a_listing_that_is_refused_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    path = tmp_path / "made by two"
    (path / "rank_0_state.pth").mkdir(parents=True)
    plain, asked = os.listdir, []

    def stale(name: Any) -> list[str]:
        asked.append(name)
        if len(asked) <= looks:
            raise FileNotFoundError(2, "No such file or directory", name)
        return plain(name)

    monkeypatch.setattr(shared_directory.os, "listdir", stale)
    assert list_names(str(path)) == ["rank_0_state.pth"]
    assert len(asked) == looks + 1
    with pytest.raises(FileNotFoundError):
        list_names(str(tmp_path / "absent"), stale_seconds=-1.0)
