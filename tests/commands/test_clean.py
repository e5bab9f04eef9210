"""What `clean` removes, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import xrank
from tests.cli.bench import refusal, run
from tests.readers.made_deltas import Model, change_model, make_model, read_folder, write_delta, write_whole
from xrank.commands.clean import clean
from xrank.commands.inspect import inspect_source
from xrank.errors import IncompleteError
from xrank.formats.deltas import version_name
from xrank.ranks.directory_messages import DirectoryMessages
from xrank.storage import folder_stage
from xrank.storage.folder_stage import encode_journal
from xrank.storage.output_place import JOURNAL_NAME, OutputPlace, hold_lock


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
    assert abs(folder_stage.folder_time(str(tmp_path / "absent")) - time.time()) < 5


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="only Linux keeps shared memory there")
def test_shared_memory_of_other_programs_stays(tmp_path: Path) -> None:
    """ModelOpt's names, which any program may give; clean once removed an old file that had such a name."""
    path = Path(f"/dev/shm/rank_{os.getpid()}77")
    path.write_bytes(b"a stranger's")
    os.utime(path, (0, 0))
    try:
        assert run("clean", tmp_path).exit_code == 0
        assert path.read_bytes() == b"a stranger's"
    finally:
        path.unlink()


def _leave_user_folder(folder: Path) -> Path:
    path = folder / ".notes.xrank-0123456789abcdef"
    path.mkdir()
    (path / "notes.txt").write_text("mine")
    os.utime(path / "notes.txt", (0, 0))
    os.utime(path, (0, 0))
    return path


def _message_name(folder: Path) -> Path:
    return folder / f".rank_0.{'0' * 16}.{dead_pid()}.{'0' * 16}.1.message"


def _leave_folder_message(folder: Path) -> Path:
    path = _message_name(folder)
    path.mkdir()
    os.utime(path, (0, 0))
    return path


def _leave_link_message(folder: Path) -> Path:
    path = _message_name(folder)
    path.symlink_to(folder / "nowhere")
    os.utime(path, (0, 0), follow_symlinks=False)
    return path


def _leave_pipe_message(folder: Path) -> Path:
    path = _message_name(folder)
    os.mkfifo(path)
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize("leave", [_leave_user_folder, _leave_folder_message, _leave_link_message, _leave_pipe_message])
def test_a_name_alone_does_not_make_a_thing_xranks(tmp_path: Path, leave: Callable[[Path], Path]) -> None:
    path = leave(tmp_path)
    ended = run("clean", tmp_path)
    assert ended.exit_code == 0 and os.path.lexists(path)
    assert "removed  0 things" in ended.stdout


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_what_another_user_owns_stays(tmp_path: Path) -> None:
    message, folder = _message_name(tmp_path), stage(tmp_path, pid=dead_pid())
    message.write_bytes(b"x")
    for path in (message, folder):
        os.utime(path, (0, 0))
        os.chown(path, 12345, 12345)
    clean([tmp_path])
    assert message.exists() and folder.exists()


def test_a_gather_leaves_a_users_folder_beside_its_output_alone(tmp_path: Path) -> None:
    folder = tmp_path / ".model.xrank-0123456789abcdef"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    xrank.NFSWorkspace(tmp_path / "states", rank=0, world_size=1).write_configs_and_weights(
        {"model_type": "llama"}, {"norm.weight": torch.ones(4)}
    )
    report = xrank.gather_checkpoint(tmp_path / "states", tmp_path / "model")
    assert (folder / "notes.txt").read_text() == "mine"
    assert any("nothing in it shows that xrank made it" in text for _, text in report.notes)


def test_what_a_kill_left_of_a_removal_goes(tmp_path: Path) -> None:
    """The journal is removed last, so that the next clean knows the rest."""
    path = stage(tmp_path, pid=dead_pid())
    (path / "inner").mkdir()
    removed = []

    def die(target: str) -> None:
        removed.append(os.path.basename(target))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", die)
        with pytest.raises(KeyboardInterrupt):
            clean([tmp_path])
    (rest,) = tmp_path.glob(".model.xrank-*")
    assert removed == ["inner"] and (rest / JOURNAL_NAME).exists()
    clean([tmp_path])
    assert not [*tmp_path.iterdir()]


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
    committed_once_read(monkeypatch, folder_stage, tmp_path / "model")
    assert clean([tmp_path], dry_run=True).details["stages"] == []


def test_a_stage_is_inspected_while_its_gather_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stage(tmp_path, pid=os.getpid())
    with monkeypatch.context() as patch:
        part = path / "model.safetensors.part"
        listed_before(patch, "scandir", lambda _: part.rename(path / "model.safetensors"))
        assert inspect_source(path).details["stage"]["begun_nbytes"] == 0
    committed_once_read(monkeypatch, folder_stage, tmp_path / "model")
    with pytest.raises(IncompleteError, match="does not exist"):
        inspect_source(path)


def make_versions(folder: Path, *wholes: int) -> list[Model]:
    """Write six versions with xrank, some of them whole."""
    generator = np.random.default_rng(0)
    models = [make_model(generator, ["BF16"], 9)]
    for version in range(1, 7):
        models.append(change_model(models[-1], generator))
        place = folder / version_name(version)
        (write_whole(place, models[-1]) if version in wholes else write_delta(folder, models[-2], models[-1], version))
        (place / "xrank_manifest.json").write_text("{}")
    return models


def test_versions_before_the_newest_whole_one_go(tmp_path: Path) -> None:
    """Readers of the versions that stay find all that they need."""
    models = make_versions(tmp_path, 2, 4)
    (tmp_path / "weight_v000002" / "xrank_manifest.json").unlink()
    listed = xrank.clean(tmp_path, dry_run=True).details["stages"]
    assert [(Path(row["path"]).name, row["removed"]) for row in listed] == [
        *(("weight_v000001", True), ("weight_v000002", False), ("weight_v000003", True)),
    ]
    assert len(list(tmp_path.iterdir())) == 6
    report = xrank.clean(tmp_path)
    assert report.details["num_removed"] == 2 and report.details["removed_nbytes"] > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"weight_v00000{number}" for number in (2, 4, 5, 6)]
    xrank.gather_checkpoint(tmp_path / "weight_v000006", tmp_path / "out")
    assert read_folder(tmp_path / "out") == models[6]


def test_versions_stay_if_the_chain_is_not_there(tmp_path: Path) -> None:
    """Without a whole version, with a hole after it, or with a whole one that lacks a file."""
    for name, wholes in (("none", ()), ("hole", (3,)), ("file", (3,))):
        make_versions(tmp_path / name, *wholes)
        if name == "hole":
            shutil.rmtree(tmp_path / name / "weight_v000005")
        if name == "file":
            next((tmp_path / name / "weight_v000003").glob("*.safetensors")).unlink()
        before = sorted((tmp_path / name).rglob("*"))
        assert xrank.clean(tmp_path / name).details["num_removed"] == 0
        assert sorted((tmp_path / name).rglob("*")) == before
