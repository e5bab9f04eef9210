"""What `clean` removes, and what it leaves alone."""

from __future__ import annotations

import json
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.bench import refusal, run
from xrank.conversion import clean as clean_module
from xrank.conversion.clean import clean
from xrank.conversion.inspect import inspect_source
from xrank.errors import IncompleteError
from xrank.workspace.abandoned_memory import find_abandoned_segments
from xrank.workspace.directory_messages import DirectoryMessages
from xrank.writers import cleaning, stage_inspection
from xrank.writers.journal import JOURNAL_NAME, encode_journal
from xrank.writers.output_lock import hold_lock
from xrank.writers.output_place import OutputPlace


@pytest.fixture(autouse=True)
def machines_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let nothing be looked for, nor removed, in this machine's shared memory: other programs have theirs there."""
    monkeypatch.setitem(clean_module.clean.__wrapped__.__kwdefaults__, "memory", str(tmp_path / "no memory"))


def stage(folder: Path, *, pid: int, host: str | None = None, age_seconds: float = 0, name: str = "model") -> Path:
    """Leave a stage as a gather of that process would."""
    path = Path(OutputPlace.from_path(folder / name).new_stage())
    path.mkdir()
    (path / "model.safetensors.part").write_bytes(bytes(1000))
    (path / JOURNAL_NAME).write_bytes(encode_journal("plan", host or socket.gethostname(), pid))
    for entry in (*path.iterdir(), path):
        os.utime(entry, (time.time() - age_seconds,) * 2)
    return path


def dead_pid() -> int:
    """Return the number of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def test_a_dead_gathers_stage_goes_and_nothing_else(tmp_path: Path) -> None:
    gone, alive = stage(tmp_path, pid=dead_pid()), stage(tmp_path, pid=os.getpid(), name="other")
    bystanders = [tmp_path / ".model.xrank-notes", tmp_path / "model", tmp_path / ".xrank-0123456789abcdef"]
    for path in bystanders:
        path.mkdir()
    report = clean([tmp_path])
    assert not gone.exists() and alive.exists() and all(path.exists() for path in bystanders)
    assert report.details["num_removed"] == 1 and report.details["removed_nbytes"] > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in (alive, *bystanders))


@pytest.mark.parametrize(("age_seconds", "removed"), [(60, False), (4000, True)])
def test_a_stage_of_another_host_goes_when_it_is_old(tmp_path: Path, age_seconds: float, removed: bool) -> None:
    path = stage(tmp_path, pid=1, host="elsewhere", age_seconds=age_seconds)
    clean([tmp_path])
    assert path.exists() is not removed


def test_a_stage_whose_lock_is_held_stays(tmp_path: Path) -> None:
    path = stage(tmp_path, pid=dead_pid())
    place = OutputPlace.from_path(tmp_path / "model")
    with hold_lock(place.lock_path, place.path, owner=str):
        report = clean([tmp_path])
    assert path.exists() and report.details["stages"][0]["why"] == "its gather is running"


def test_the_output_itself_may_be_named_and_dry_run_removes_nothing(tmp_path: Path) -> None:
    path = stage(tmp_path, pid=dead_pid())
    (tmp_path / "model").mkdir()
    ended = run("clean", "--dry-run", "--json", tmp_path / "model")
    shown = json.loads(ended.stdout)
    assert ended.exit_code == 0 and shown["num_removed"] == 1 and path.exists()
    assert "would go" in run("clean", "--dry-run", tmp_path).stdout
    ended = run("clean", tmp_path / "model")
    assert "removed  1 thing" in ended.stdout and not path.exists()


def test_an_interrupted_replacement_is_finished(tmp_path: Path) -> None:
    place = OutputPlace.from_path(tmp_path / "model")
    old = Path(f"{place.new_stage()}-old")
    old.mkdir()
    (old / "config.json").write_text("{}")
    clean([tmp_path])
    assert (tmp_path / "model" / "config.json").exists() and not old.exists()


def test_what_is_no_folder_is_refused_and_no_path_is_nothing_to_do(tmp_path: Path) -> None:
    refusal(run("clean", tmp_path / "nowhere", "--json"), "UsageError", says=["is not a folder"])
    assert run("clean").exit_code == 0


def test_messages_of_dead_processes_go(tmp_path: Path) -> None:
    alive = DirectoryMessages(tmp_path, 0)
    alive.publish("{}", [])
    pid = os.fork()
    if pid == 0:
        DirectoryMessages(tmp_path, 1).publish("{}", [])
        os._exit(0)
    os.waitpid(pid, 0)
    (dead,) = tmp_path.glob(".rank_1.*")
    (kept,) = tmp_path.glob(".rank_0.*")
    elsewhere = tmp_path / kept.name.replace(kept.name.split(".")[2], "0" * 16)
    elsewhere.write_bytes(b"x")
    assert clean([tmp_path], dry_run=True).details["num_removed"] == 1 and dead.exists()
    clean([tmp_path])
    assert not dead.exists() and kept.exists() and elsewhere.exists()
    clean([tmp_path], now=lambda folder: time.time() + 4000)
    assert kept.exists() and not elsewhere.exists()
    alive.close()


def test_the_age_is_by_the_clock_that_stamps_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is two hours ahead of the file server's removes no message that is fresh."""
    own = DirectoryMessages(tmp_path, 0)
    own.publish("{}", [])
    (mine,) = tmp_path.glob(".rank_0.*")
    message = tmp_path / mine.name.replace(mine.name.split(".")[2], "0" * 16)
    own.close()
    message.write_bytes(b"of a host that cannot be asked")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    clean([tmp_path])
    assert message.exists() and list(tmp_path.iterdir()) == [message]
    os.utime(message, (real() - 7200, real() - 7200))
    clean([tmp_path])
    assert not message.exists()


def test_without_a_file_the_time_is_this_hosts(tmp_path: Path) -> None:
    assert abs(cleaning.folder_time(str(tmp_path / "absent")) - time.time()) < 5


def test_segments_that_nobody_holds_go_when_they_are_old(tmp_path: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    for name in ("rank_1", "rank_2", "rank_3", "psm_12345678", "xrank"):
        (shm / name).write_bytes(b"x")
    os.symlink(tmp_path, shm / "rank_4")
    with (shm / "rank_2").open("r+b") as opened, (shm / "rank_3").open("r+b") as other:
        mapped = mmap.mmap(other.fileno(), 1)
        other.close()
        assert clean([], memory=str(shm)).details["segments"] == []
        report = clean([], memory=str(shm), now=lambda folder: time.time() + 4000)
        assert [row["path"] for row in report.details["segments"]] == [str(shm / "rank_1")] and not opened.closed
        mapped.close()
    assert {path.name for path in shm.iterdir()} == {"rank_2", "rank_3", "rank_4", "psm_12345678", "xrank"}


# ---- what changes meanwhile


def listed_before(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[str], object]) -> None:
    """Let something happen to a folder each time when it has been listed, and before its entries are looked at."""
    plain = getattr(os, name)

    def listing(folder: Any) -> Iterator[Any]:
        found = list(plain(folder))
        act(os.fspath(folder))
        return iter(found)

    monkeypatch.setattr(os, name, listing)


def committed_once_read(monkeypatch: pytest.MonkeyPatch, module: ModuleType, out: Path) -> None:
    """Let the gather that makes a stage name it as the output once a module has read its journal."""
    plain = module.read_journal

    def read_journal(path: str) -> Any:
        journal = plain(path)
        os.rename(path, out)
        return journal

    monkeypatch.setattr(module, "read_journal", read_journal)


def test_a_message_that_its_rank_removes_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = DirectoryMessages(tmp_path, 0)
    read, kept = alive.publish("{}", []), alive.publish("{}", [])
    with monkeypatch.context() as patch:
        listed_before(patch, "scandir", lambda folder: alive.retire(read))
        rows = clean([tmp_path]).details["messages"]
    assert [os.path.basename(row["path"]) for row in rows] == [json.loads(kept)["name"]]
    alive.close()


def test_what_a_running_gather_finishes_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, place = stage(tmp_path, pid=os.getpid()), OutputPlace.from_path(tmp_path / "model")
    gone = stage(tmp_path, pid=dead_pid(), name="other")

    def finish(folder: str) -> None:
        part = os.path.join(folder, "model.safetensors.part")
        if folder == str(path) and os.path.exists(part):
            os.rename(part, part.removesuffix(".part"))

    with monkeypatch.context() as patch, hold_lock(place.lock_path, place.path, owner=str):
        listed_before(patch, "walk", finish)
        report = clean([tmp_path])
    assert (path / "model.safetensors").exists() and not gone.exists()
    assert [(row["removed"], row["path"]) for row in report.details["stages"]] == [
        (False, str(path)),
        (True, str(gone)),
    ]


def test_a_stage_that_becomes_the_output_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(tmp_path, pid=os.getpid())
    committed_once_read(monkeypatch, cleaning, tmp_path / "model")
    assert clean([tmp_path], dry_run=True).details["stages"] == []


def test_a_stage_is_inspected_while_its_gather_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stage(tmp_path, pid=os.getpid())
    with monkeypatch.context() as patch:
        part = path / "model.safetensors.part"
        listed_before(patch, "scandir", lambda _: part.rename(path / "model.safetensors"))
        assert inspect_source(path).details["stage"]["begun_nbytes"] == 0
    committed_once_read(monkeypatch, stage_inspection, tmp_path / "model")
    with pytest.raises(IncompleteError, match="does not exist"):
        inspect_source(path)


def test_a_segment_that_goes_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        (tmp_path / f"rank_{rank}").touch()
    first, *others = [entry.path for entry in os.scandir(tmp_path)]
    listed_before(monkeypatch, "scandir", lambda _: os.unlink(first))
    found = find_abandoned_segments(str(tmp_path), older_than=time.time() + 4000)
    assert [path for path, _ in found] == others


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="only Linux keeps shared memory there")
def test_a_segment_that_is_only_mapped_is_held_for_whoever_is_not_root_too() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.chmod(folder, 0o777)
        child = os.fork()
        if child == 0:
            try:
                os.chdir(folder)
                if os.geteuid() == 0:
                    os.setresuid(65534, 65534, 65534)
                for rank in range(2):
                    Path(f"rank_{rank}").write_bytes(bytes(4096))
                with open("rank_0", "r+b") as file:
                    kept = mmap.mmap(file.fileno(), 4096)
                os.closerange(3, 4096)  # the mapping's own descriptor, too
                found = [path for path, _ in find_abandoned_segments(".", older_than=time.time() + 4000)]
                os._exit(0 if len(kept) and found == ["./rank_1"] else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
