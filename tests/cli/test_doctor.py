"""`xrank doctor` reports the machine and the folder, and leaves no files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench import refusal, run
from xrank.commands import doctor


def checks(folder: Path, **environ: str) -> dict[str, dict[str, Any]]:
    ended = run("doctor", folder, "--json", environ=environ)
    assert ended.exit_code == 0, ended.stderr
    return {row["name"]: row for row in json.loads(ended.stdout)["checks"]}


def test_what_this_machine_offers(tmp_path: Path) -> None:
    found = checks(tmp_path, XRANK_WORKERS="3")
    assert found["numpy"]["text"] == __import__("numpy").__version__
    assert found["process_vm_readv"]["is_there"] is True
    assert found["shared memory"]["is_there"] is True
    assert found["writable"]["is_there"] is found["exchange"]["is_there"] is True
    assert found["XRANK_WORKERS"]["text"] == "3"
    assert os.listdir(tmp_path) == []
    text = run("doctor", tmp_path).stdout
    assert "\nkernel" in text and "\n+ writable " in text


def test_what_is_missing_is_told_and_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> Any:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(doctor, "allocate", refuse)
    monkeypatch.setattr(doctor, "exchange", lambda *folders: False)
    monkeypatch.setattr(doctor, "_READ_PARENT", "raise SystemExit(1)")
    monkeypatch.setattr(doctor, "shares_blocks", lambda *arguments: False)
    monkeypatch.setattr(doctor, "_OPTIONAL", {"no-such-package": "this"})
    found = checks(tmp_path, RANK="3", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="run")
    for name in (
        "shared memory",
        "room reserved",
        "exchange",
        "process_vm_readv",
        "reflink",
        "no-such-package",
        "launcher",
    ):
        assert found[name]["is_there"] is False, name
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(doctor.tempfile, "TemporaryDirectory", refuse)
    assert checks(tmp_path)["writable"]["text"] == "not here"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    refusal(run("doctor", tmp_path / "none", "--json"), "UsageError", says=["is not a folder"])
