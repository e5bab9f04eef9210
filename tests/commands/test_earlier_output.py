"""A command whose output an earlier run of it has made: it ends well where nothing differs, else it is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import xrank
from tests.cli.bench import Bench
from tests.commands.made_workspaces import leave, made_model
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import OutputExistsError, XrankError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.storage import folder_stage


def _gather(bench: Bench, **options: Any) -> list[str]:
    """Gather; return the codes of the notes."""
    report = gather_checkpoint(bench.workspace, bench.out, base_model=bench.folder / "base", **options)
    return [code for code, _ in report.notes]


def _reshard(bench: Bench, **options: Any) -> list[str]:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    for name, tensor in made_model().items():
        layouts[name] = f"[{', '.join('abc'[: tensor.ndim])}]"
    report = reshard_checkpoint(bench.workspace, layouts, bench.out, base_model=bench.folder / "base", **options)
    return [code for code, _ in report.notes]


@pytest.fixture(autouse=True)
def source(bench: Bench) -> None:
    leave(bench.workspace)
    (bench.folder / "base").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (bench.folder / "base" / name).write_text("{}")


@pytest.fixture(params=[_gather, _reshard])
def make(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    function: Callable[..., list[str]] = request.param
    return function


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_the_same_command_again_ends_well_and_writes_nothing(bench: Bench, make: Callable[..., list[str]]) -> None:
    assert "made-before" not in make(bench)
    before = _state(bench.out)
    assert "made-before" in make(bench)
    make(bench, dry_run=True)
    assert _state(bench.out) == before
    assert "made-before" not in make(bench, overwrite=True)
    assert _state(bench.out) != before
    assert [path.name for path in bench.out.parent.iterdir() if ".xrank" in path.name] == []


def _change_dtype(bench: Bench) -> dict[str, Any]:
    return {"dtype": "bf16"}


def _change_source(bench: Bench) -> dict[str, Any]:
    leave(bench.workspace, made_model(1))
    return {}


def _change_companion(bench: Bench) -> dict[str, Any]:
    (bench.folder / "base" / "tokenizer.json").write_text('{"a": 1}')
    return {}


def _cut_output(bench: Bench) -> dict[str, Any]:
    file = next(path for path in sorted(bench.out.iterdir()) if path.suffix in (".safetensors", ".pth"))
    os.truncate(file, file.stat().st_size - 1)
    return {}


def _damage_manifest(bench: Bench) -> dict[str, Any]:
    (bench.out / "xrank_manifest.json").write_text("{}")
    return {}


@pytest.mark.parametrize("change", [_change_dtype, _change_source, _change_companion, _cut_output, _damage_manifest])
@pytest.mark.parametrize("dry_run", [False, True])
def test_another_output_is_refused(
    bench: Bench, make: Callable[..., list[str]], change: Callable[[Bench], dict[str, Any]], dry_run: bool
) -> None:
    make(bench)
    options = change(bench)
    before = _state(bench.out)
    with pytest.raises(OutputExistsError, match="exists already"):
        make(bench, dry_run=dry_run, **options)
    assert _state(bench.out) == before


def test_exports_of_memory_are_never_taken_for_earlier_ones(tmp_path: Path) -> None:
    """Their plan does not decide the values."""
    model = torch.nn.Linear(2, 2)
    xrank.export_model(model, tmp_path / "out")
    with pytest.raises(OutputExistsError):
        xrank.export_model(model, tmp_path / "out")


def test_a_disk_that_fails_after_the_rename(
    bench: Bench, make: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sync(folder: str) -> None:
        if folder == str(bench.out.parent) and bench.out.exists():
            raise OSError(5, "Input/output error", folder)

    with monkeypatch.context() as patch:
        patch.setattr(folder_stage, "sync_folder", sync)
        with pytest.raises(XrankError, match=r"model is complete, but then: .*Input/output error"):
            make(bench)
    assert "made-before" in make(bench)


def test_a_signal_after_the_rename(bench: Bench) -> None:
    """The command says that its work is done, the lock is gone, and the same command ends well."""
    code = (
        "import os, signal, sys\nfrom xrank.cli.main import main\nfrom xrank.storage import folder_stage\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\nparent, sync = os.path.dirname(out), folder_stage.sync_folder\n"
        "def strike(folder):\n    sync(folder)\n"
        "    if folder == parent and os.path.exists(out): os.kill(os.getpid(), signal.SIGTERM)\n"
        "folder_stage.sync_folder = strike\nmain()"
    )
    command = ["gather", str(bench.workspace), "--base-model", str(bench.folder / "base"), "--out", str(bench.out)]
    ended = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        143,
        f"xrank: terminated; {bench.out} is complete (exit 143)",
    )
    assert sorted(path.name for path in bench.out.parent.iterdir() if "xrank" in path.name) == []
    again = subprocess.run([sys.executable, "-m", "xrank", *command], capture_output=True, text=True, timeout=60)
    assert again.returncode == 0 and f"\nfound   {bench.out}: 1 file, 1.1 KB; see the note\n" in again.stdout
    assert "an earlier run of this command had made the output" in again.stdout
