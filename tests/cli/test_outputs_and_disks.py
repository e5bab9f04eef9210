"""Where the output is to be, what the source's files may be, and disks that are full: refused, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import (
    LAYOUTS,
    MESH,
    assert_holds,
    leave,
    leave_plain,
    made_model,
    model_in,
    record,
    state_of,
)
from xrank.commands.reshard import reshard_checkpoint
from xrank.engine.buffers import FileSource
from xrank.formats.rank_state import TensorRecord
from xrank.layout import LayoutMap
from xrank.storage import disk, output_place

# ---- the output's name is taken


def folder(bench: Bench) -> None:
    bench.out.mkdir()
    (bench.out / "notes.txt").write_text("mine")


def link(bench: Bench) -> None:
    (bench.folder / "real").mkdir()
    bench.out.symlink_to("real")


TAKEN: dict[str, tuple[Callable[[Bench], Any], str]] = {
    "a folder": (folder, "a folder that holds 'notes.txt'"),
    "an empty folder": (lambda bench: bench.out.mkdir(), "an empty folder"),
    "a file": (lambda bench: bench.out.write_text("mine"), "a file"),
    "a link": (link, "a symbolic link to 'real'"),
    "a dangling link": (lambda bench: bench.out.symlink_to("/nothing/there"), "a symbolic link to '/nothing/there'"),
    "a fifo": (lambda bench: os.mkfifo(bench.out), "a device, FIFO or socket"),
}


def everything(folder: Path) -> dict[str, str]:
    """Return all there is, links not followed."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.suffix != ".pth"
    }


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("what", TAKEN)
def test_the_output_is_there(bench: Bench, what: str, overwrite: bool) -> None:
    make, said = TAKEN[what]
    model = leave(bench.workspace)
    make(bench)
    before = everything(bench.folder)
    if overwrite and what == "an empty folder":
        bench.succeeds(model, "--overwrite")
        return
    says = [f"{bench.out} exists already" if not overwrite else f"{bench.out} is a", said, "choose another --out"]
    for options in ([], ["--dry-run"]):
        bench.refused("OutputExistsError", *["--overwrite"] * overwrite, *options, says=says, file="model")
    assert everything(bench.folder) == before
    if bench.out.is_dir() and not bench.out.is_symlink():
        shutil.rmtree(bench.out)
    else:
        bench.out.unlink()
    bench.succeeds(model)


def test_overwrite_replaces_a_model(bench: Bench) -> None:
    bench.succeeds(leave(bench.workspace))
    new = leave(bench.workspace, made_model(seed=1), step=3000)
    bench.refused("OutputExistsError", says=["exists already", "add --overwrite to replace it"])
    bench.succeeds(new, "--overwrite", "--max-shard-size", "600")
    assert not (bench.out / "model.safetensors").exists()


def test_what_the_user_added_to_a_replaced_model_is_told(bench: Bench) -> None:
    model = leave(bench.workspace)
    bench.succeeds(model, "--max-shard-size", "600")
    (bench.out / "empty" / "folder").mkdir(parents=True)
    for name in ("README.md", "config.json.orig"):
        (bench.out / name).write_text("mine")
    report = bench.succeeds(model, "--overwrite")  # its shards and their index go, too, and are no loss
    (told,) = [note["message"] for note in report["notes"] if note["code"] == "stage"]
    assert "held README.md, config.json.orig, which xrank had not written: removed" in told
    assert bench.succeeds(model, "--overwrite")["notes"] == []
    for number in range(7):
        (bench.out / f"note{number}").touch()
    (bench.out / "xrank_manifest.json").write_text("{")
    (note,) = bench.succeeds(model, "--overwrite")["notes"]
    assert "note0, note1, note2, note3, note4 and 2 more" in note["message"]


@pytest.mark.parametrize("how", ["resharded", "config.json", "a model's"])
def test_states_are_not_replaced_by_a_model(bench: Bench, how: str) -> None:
    """No model gives them back: how they were cut, their configs, what no rank's model needs."""
    model = leave(bench.workspace)
    if how == "resharded":
        layouts = LayoutMap(MESH)
        layouts.update(LAYOUTS)
        reshard_checkpoint(bench.workspace, layouts, bench.out)
    elif how == "config.json":
        shutil.copytree(bench.workspace, bench.out)
        (bench.out / "config.json").write_text("{}")
    else:
        bench.succeeds(model)
        leave(bench.out)
    before = {path: path.read_bytes() for path in bench.out.rglob("*") if path.is_file()}
    says = [f"{bench.out} contains the states of 4 ranks, so --overwrite does not", "choose another --out"]
    for options in ([], ["--dry-run"], ["--max-shard-size", "600"]):
        bench.refused("OutputExistsError", "--overwrite", *options, says=says, file="rank_0_state.pth")
    assert {path: path.read_bytes() for path in bench.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("is_ours", [True, False], ids=["of xrank", "of save_pretrained"])
@pytest.mark.parametrize("is_link", [True, False], ids=["link", "folder"])
def test_folders_beside_a_model_are_not_removed_with_it(bench: Bench, is_ours: bool, is_link: bool) -> None:
    model = leave(bench.workspace)
    bench.succeeds(model)
    if not is_ours:
        (bench.out / "xrank_manifest.json").unlink()
    precious = bench.out / "checkpoint-500" / "global_step500" / "optimizer.pt"
    if is_link:
        (bench.folder / "elsewhere" / "global_step500").mkdir(parents=True)
        (bench.out / "checkpoint-500").symlink_to(bench.folder / "elsewhere")
    else:
        precious.parent.mkdir(parents=True)
    precious.write_text("mine")
    says = ["holds 'checkpoint-500', not part of a model that xrank wrote", "move the folder elsewhere"]
    bench.refused("OutputExistsError", "--overwrite", says=says, file="checkpoint-500")
    assert precious.read_text() == "mine"
    precious.unlink()
    if not is_link:
        bench.succeeds(model, "--overwrite")


def test_a_refused_overwrite_leaves_the_old_model(bench: Bench) -> None:
    old = leave(bench.workspace)
    bench.succeeds(old)
    leave(bench.workspace, made_model(seed=1))
    state_of(bench.workspace, 3).unlink()
    bench.refused("IncompleteError", "--overwrite", says=["rank 3 of 4"])
    assert_holds(bench.out, old)


@pytest.mark.parametrize("overwrite", [False, True], ids=["", "overwrite"])
@pytest.mark.parametrize("what", ["equal", "above", "a link to it", "above what is found"])
def test_the_output_would_replace_its_source(bench: Bench, what: str, overwrite: bool) -> None:
    model = leave(bench.workspace)
    (bench.workspace / "config.json").write_text("{}")  # so that it looks like a model to --overwrite
    source = bench.workspace
    options = ["--overwrite"] * overwrite
    if what == "equal":
        bench.out = bench.workspace
    elif what == "above":
        bench.out = bench.folder
    elif what == "a link to it":
        bench.out.symlink_to(bench.workspace)
    else:
        # The path given is searched: the source lies further down than it, and inside the output.
        step = bench.folder / "checkpoints" / "step"
        step.mkdir(parents=True)
        shutil.move(bench.workspace, step / "run42")
        (step / "config.json").write_text("{}")
        source, bench.out = bench.folder / "checkpoints", step
    before = everything(bench.folder)
    ended = run("gather", source, "--out", bench.out, "--json", *options)
    if what == "above what is found":
        refusal(ended, "OutputExistsError")
    else:
        refusal(ended, "UsageError", says=["would replace its source", "give a separate folder as --out"])
    assert everything(bench.folder) == before
    bench.out = bench.folder / "elsewhere"
    ended = run("gather", source, "--out", bench.out)
    assert ended.exit_code == 0, ended.stderr
    assert_holds(bench.out, model)


def test_an_output_inside_its_source(bench: Bench) -> None:
    # As many keep it; replacing it later takes nothing of the source.
    model = leave(bench.workspace)
    bench.out = bench.workspace / "hf"
    bench.succeeds(model)
    bench.succeeds(model, "--overwrite")


def test_folders_above_the_output_are_made(bench: Bench) -> None:
    model = leave(bench.workspace)
    bench.out = bench.folder / "a" / "b" / "c"
    state_of(bench.workspace, 1).unlink()
    bench.refused("IncompleteError", says=["rank 1"])  # not even those
    leave(bench.workspace, ranks=[1])
    bench.succeeds(model)
    bench.out = state_of(bench.workspace, 0) / "model"
    ended = bench.gather()
    assert ended.exit_code == 2
    assert "is not a folder, so" in ended.stderr and "try   choose another --out (exit 2)" in ended.stderr


def test_a_dry_run_foretells_where_an_output_cannot_be(bench: Bench) -> None:
    leave(bench.workspace)
    before = everything(bench.folder)
    bench.out = state_of(bench.workspace, 0) / "model"
    bench.refused("UsageError", "--dry-run", says=["is not a folder, so", "choose another --out"])
    bench.out = bench.workspace
    refusal(bench.gather("--dry-run", "--overwrite"), "UsageError", says=["would replace its source"])
    assert everything(bench.folder) == before


def planned(bench: Bench) -> list[dict[str, Any]]:
    files: list[dict[str, Any]] = json.loads(bench.gather("--dry-run", "--max-shard-size", "600").stdout)["plan"][
        "files"
    ]
    return files


def test_an_output_on_a_read_only_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(bench.workspace)
    access, statvfs = os.access, os.statvfs
    flags = os.ST_RDONLY

    def mounted(path: str) -> Any:
        return mock.Mock(wraps=statvfs(path), f_flag=flags)

    monkeypatch.setattr(os, "access", lambda path, mode: mode & os.W_OK == 0 and access(path, mode))
    monkeypatch.setattr(os, "statvfs", mounted)
    for options in ((), ("--dry-run",)):
        bench.refused("UsageError", *options, says=["its file system is mounted read-only"])
    flags = 0
    bench.refused("UsageError", says=["cannot be written to (owner uid"])


def test_a_dry_run_foretells_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file system that shares blocks it is not said, unless one file alone is too large."""
    leave(bench.workspace)
    sizes = [file["nbytes"] for file in planned(bench)]
    needed, largest = sum(sizes), max(sizes)
    assert largest < needed
    options = ("--dry-run", "--max-shard-size", "600")
    monkeypatch.setattr(output_place, "may_share_blocks", lambda path, other: False)
    monkeypatch.setattr(output_place, "measure_free_nbytes", lambda path: needed - 1)
    bench.refused("NoSpaceError", *options, says=[f"{needed} bytes needed"])
    monkeypatch.setattr(output_place, "may_share_blocks", lambda path, other: True)
    assert bench.gather(*options).exit_code == 0
    monkeypatch.setattr(output_place, "measure_free_nbytes", lambda path: largest - 1)
    bench.refused("NoSpaceError", *options, says=[f"{largest} bytes needed"])


def test_which_file_systems_may_share_blocks(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "source").touch()
    assert not disk.may_share_blocks("/dev/shm/out", str(bench.folder))
    if os.stat(tmp_path).st_dev != os.stat(bench.folder).st_dev:
        assert not disk.may_share_blocks(str(bench.folder / "out"), str(tmp_path / "source"))
    assert disk.may_share_blocks(str(tmp_path / "out"), str(tmp_path / "gone"))  # nothing is known


# ---- the source's files


def test_a_source_that_may_not_be_written(bench: Bench) -> None:
    model = leave(bench.workspace)
    for path in (*bench.workspace.iterdir(), bench.workspace):
        path.chmod(stat.S_IRUSR | stat.S_IXUSR * path.is_dir())
    before = {path.name: path.stat().st_mtime_ns for path in bench.workspace.iterdir()}
    try:
        bench.succeeds(model)
        assert {path.name: path.stat().st_mtime_ns for path in bench.workspace.iterdir()} == before
    finally:
        bench.workspace.chmod(0o700)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts read-only: needs root on Linux")
def test_a_source_on_a_read_only_mount(bench: Bench) -> None:
    model = leave(bench.workspace)
    script = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && ! touch "$1/x" 2>/dev/null && exec "${@:2}"'
    command = ["xrank", "gather", bench.workspace, "--out", bench.out]
    command[0] = os.path.join(os.path.dirname(sys.executable), "xrank")
    ended = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, "sh", bench.workspace, *command], capture_output=True
    )
    if b"unshare" in ended.stderr or b"mount:" in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr.decode()}")
    assert ended.returncode == 0, ended.stderr
    assert_holds(bench.out, model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file: see the test with os.open instead")
def test_a_state_that_may_not_be_read(bench: Bench) -> None:
    model = leave(bench.workspace)
    state_of(bench.workspace, 2).chmod(0)
    says = ["rank 2: ", "cannot be opened: Permission denied", "let this user read it"]
    bench.refused("UsageError", says=says, rank=2, file="rank_2_state.pth")
    state_of(bench.workspace, 2).chmod(0o600)
    bench.succeeds(model)


class Failing:
    """Lets a function of os fail for one file, from its n-th call on."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, path: Path, number: int, after: int = 0) -> None:
        self.real = getattr(os, name)
        self.path, self.number, self.left = str(path), number, after
        self.descriptors: set[int] = set()
        monkeypatch.setattr(os, name, self)
        if name != "open":
            opened = os.open

            def remember(path: Any, *arguments: Any, **named: Any) -> int:
                fd = opened(path, *arguments, **named)
                (self.descriptors.add if path == self.path else self.descriptors.discard)(fd)
                return fd

            monkeypatch.setattr(os, "open", remember)

    def __call__(self, what: Any, *arguments: Any, **named: Any) -> Any:
        if what == self.path or what in self.descriptors:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.number, os.strerror(self.number), *([what] if isinstance(what, str) else []))
        return self.real(what, *arguments, **named)


@pytest.mark.parametrize("after", [0, 1], ids=["for its metadata", "for its bytes"])
@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, "UsageError"), (errno.EIO, "XrankError")])
def test_a_state_that_cannot_be_opened(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, number: int, kind: str, after: int
) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    with monkeypatch.context() as failing:
        Failing("open", failing, path, number, after)
        bench.refused(kind, says=[str(path), os.strerror(number)], file=path.name)
    bench.succeeds(model)


@pytest.mark.parametrize("name", ["pread", "preadv"], ids=["metadata", "bytes"])
def test_a_disk_that_fails_to_read(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    # The file that cannot be read is named, not the one that was being written.
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    with monkeypatch.context() as failing:
        Failing(name, failing, path, errno.EIO)
        bench.refused("XrankError", says=[str(path), "Input/output error"], file=path.name)
    bench.succeeds(model)


CHANGES: dict[str, Callable[[Path, bytes], object]] = {
    "grows": lambda path, content: path.write_bytes(content + b"x"),
    "is replaced": lambda path, content: (path.unlink(), path.write_bytes(content)),
    "is touched": lambda path, content: os.utime(path, ns=(1, 1)),
    "shrinks": lambda path, content: os.truncate(path, 100),
    "goes": lambda path, content: path.unlink(),
}


def at_read(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> list[int]:
    """Do something before a gather's n-th read of its source; return the list that counts the reads."""
    real, calls = FileSource.read_into, [0]

    def read_into(self: FileSource, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            act()
        real(self, *arguments)

    monkeypatch.setattr(FileSource, "read_into", read_into)
    return calls


@pytest.mark.parametrize("last", [False, True], ids=["before it is opened", "after it was read"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changes_while_it_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: str, last: bool
) -> None:
    model = leave(bench.workspace)
    path = state_of(bench.workspace, 2)
    content = path.read_bytes()
    with monkeypatch.context() as counting:
        reads = at_read(counting, 0, lambda: None)
        bench.succeeds(model, "--workers", "1")
        shutil.rmtree(bench.out)
    with monkeypatch.context() as changing:
        at_read(changing, reads[0] if last else 1, lambda: CHANGES[change](path, content))
        ended = bench.gather("--workers", "1")
    kind = "IncompleteError" if change == "goes" and not last else "ContradictionError"
    if "ends before byte" in ended.stderr:
        kind = "CorruptError"
    refusal(ended, kind, says=[str(path)], file=path.name)
    assert not os.path.lexists(bench.out)
    leave(bench.workspace)
    bench.succeeds(model)


def test_an_output_that_appears_meanwhile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Even an empty folder, which a plain rename would replace.
    model = leave(bench.workspace)
    with monkeypatch.context() as meanwhile:
        at_read(meanwhile, 1, bench.out.mkdir)
        ended = bench.gather()
    refusal(ended, "OutputExistsError", says=["another process created it while this gather ran", "an empty folder"])
    assert list(bench.out.iterdir()) == []
    bench.out.rmdir()
    report = bench.succeeds(model)
    assert report["output"]["resumed_nbytes"] > 0  # what was made is kept


# ---- limits


def test_a_hundred_ranks_and_few_descriptors(bench: Bench) -> None:
    model = {"a": torch.arange(400.0)}
    meshes = ((("x",), (100,), tuple(range(100))),)
    for rank in range(100):
        told = {"a": TensorRecord("[n/x]", 0, (400,))}
        text = record(rank, 100, told, meshes=meshes)
        leave_plain(bench.workspace, rank, {"a": model["a"].chunk(100)[rank].clone()}, xrank=text)
    ended = in_shell('ulimit -n 64; exec "$@"', bench)
    assert ended.returncode == 0, ended.stderr
    assert_holds(bench.out, model)


def in_shell(script: str, bench: Bench, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a gather in a shell, as ``"$@"`` of that script."""
    xrank = os.path.join(os.path.dirname(sys.executable), "xrank")
    command = [xrank, "gather", "--workspace", bench.workspace, "--out", bench.out, *options]
    return subprocess.run(["bash", "-c", script, "sh", *command], capture_output=True, text=True, timeout=150)


def test_a_limit_of_file_sizes_in_this_process(bench: Bench) -> None:
    model = leave(bench.workspace)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4200, before[1]))
    try:
        says = ["larger than the maximum size of a file (ulimit -f", "--max-shard-size"]
        bench.refused("UsageError", says=says, file="model.safetensors.part")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    bench.succeeds(model)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a small tmpfs: needs root on Linux")
def test_a_disk_that_is_full(bench: Bench) -> None:
    model = leave(bench.workspace, {**made_model(), "embed.weight": torch.rand(1 << 15, 16)})  # 2 MiB
    disk = bench.folder / "disk"
    disk.mkdir()
    bench.out = disk / "model"
    script = """
        mount -t tmpfs -o size="$SIZE" none "$DISK" || exit 99
        "$@" --max-shard-size 600KB; status=$?
        ls -A "$DISK" >&2; exit $status
    """
    ended = in_namespace(script, bench, SIZE="1m", DISK=disk)
    if ended.returncode == 99 or "unshare" in ended.stderr:
        pytest.skip(f"no mounts here: {ended.stderr}")
    assert ended.returncode == 1, ended.stderr
    assert "xrank: NoSpaceError: " in ended.stderr
    assert "no space left, 2101248 bytes needed, " in ended.stderr
    assert "want 2101248 bytes" in ended.stderr
    assert "choose another --out" in ended.stderr
    ended = in_namespace(
        script.replace("ls -A", "cp -r $DISK/model $DISK/../found; ls -A"), bench, SIZE="8m", DISK=disk
    )
    assert ended.returncode == 0, ended.stderr
    assert model_in(bench.folder / "found").keys() == model.keys()
    assert_holds(bench.folder / "found", model)


def in_namespace(script: str, bench: Bench, **environ: object) -> subprocess.CompletedProcess[str]:
    """Run a gather in a mount namespace of its own."""
    words = " ".join(f"{name}='{value}'" for name, value in environ.items())
    xrank = os.path.join(os.path.dirname(sys.executable), "xrank")
    command = [xrank, "gather", "--workspace", bench.workspace, "--out", bench.out]
    script = f"export {words}\n{script}"
    unshared = ["unshare", "-m", "bash", "-c", script, "sh", *command]
    return subprocess.run(unshared, capture_output=True, text=True, timeout=150)


def test_a_disk_that_fills_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    # Met while writing, after the room was given: quotas and overcommitted pools do that.
    model = leave(bench.workspace)
    real, writes = os.pwrite, 0

    def pwrite(*arguments: Any) -> int:
        nonlocal writes
        writes += 1
        if writes > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", pwrite)
        ended = bench.gather("--max-shard-size", "400", "--workers", "1")
    refusal(ended, "NoSpaceError", says=["no space left", "bytes free", "resumes from the finished files"])
    assert not os.path.lexists(bench.out)
    # The companion and two shards were finished and are kept; no half one.
    (stage,) = bench.folder.glob(".model.xrank-*")
    assert sorted(path.suffix for path in stage.iterdir()) == [".json", ".jsonl", ".safetensors", ".safetensors"]
    report = bench.succeeds(model, "--max-shard-size", "400")
    assert report["output"]["resumed_nbytes"] > 0


def test_no_room_from_the_start(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    model = leave(bench.workspace)
    with monkeypatch.context() as full:
        full.setattr(disk, "measure_free_nbytes", lambda path: 100)
        says = ["no space left, 5240 bytes needed, 100 bytes free"]
        bench.refused("NoSpaceError", says=says, got="100 bytes free", want="5240 bytes")
    bench.succeeds(model)


# ---- the page of --report


def test_a_report_page_is_written_after_success_and_failure(bench: Bench) -> None:
    leave_plain(bench.workspace, 0, {"up.weight": torch.ones(4)})
    page = bench.folder / "report.html"
    ended = run("gather", bench.workspace, "--out", bench.folder / "model", "--recipe", "none", "--report", page)
    assert ended.exit_code == 0 and f"\nreport  {page}\n" in ended.stdout, ended.stderr
    assert "every element exactly once" in page.read_text() and "model.safetensors" in page.read_text()
    refusal(
        run("gather", bench.workspace, "--out", bench.folder / "model", "--dtype", "bf16", "--report", page, "--json"),
        "OutputExistsError",
    )
    assert "OutputExistsError" in page.read_text() and "--overwrite" in page.read_text()
    missing = bench.folder / "no" / "report.html"
    refusal(
        run("gather", bench.workspace, "--out", bench.folder / "other", "--report", missing, "--json"),
        "UsageError",
        says=["cannot be written", "existing folder"],
    )
    assert not (bench.folder / "other").exists()


@pytest.mark.parametrize("what", TAKEN)
def test_a_dry_run_foretells_that_the_output_is_there(bench: Bench, what: str) -> None:
    make, said = TAKEN[what]
    leave(bench.workspace)
    make(bench)
    before = everything(bench.folder)
    bench.refused("OutputExistsError", "--dry-run", says=[said], file="model")
    if what != "an empty folder":
        bench.refused("OutputExistsError", "--dry-run", "--overwrite", says=[said], file="model")
    assert everything(bench.folder) == before


def test_a_limit_of_file_sizes(bench: Bench) -> None:
    model = leave(bench.workspace, {**made_model(), "embed.weight": torch.rand(512, 8)})
    ended = in_shell('ulimit -f 8; exec "$@"', bench)  # 8 KiB
    assert ended.returncode == 2
    assert "xrank: UsageError: " in ended.stderr
    assert "larger than the maximum size of a file (ulimit -f" in ended.stderr
    assert "--max-shard-size" in ended.stderr
    assert bench.names() == ["run42"]
    bench.succeeds(model)
