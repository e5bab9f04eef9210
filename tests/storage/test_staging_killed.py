"""SIGKILL after every call that changes the disk, and errors at every call."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sampled import sampled
from tests.storage.gathered import EXTRA, SHARDS, beside, gather, seen
from tests.storage.kill_points import error_points, in_child, kill_points
from xrank.errors import NoSpaceError, XrankError
from xrank.storage import disk

pytestmark = pytest.mark.timeout(180)  # hundreds of processes, which a slow disk makes wait


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "companion.txt").write_bytes(b"print()\n")
    return tmp_path / "model"


@pytest.fixture
def out_in_memory(tmp_path: Path) -> Iterator[Path]:
    """The same where syncing costs nothing: the calls are the same, but for the reservation of room."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        Path(folder, "companion.txt").write_bytes(b"print()\n")
        yield Path(folder, "model")


@pytest.fixture(params=["exchange", "no renameat2"])
def both_renames(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "exchange":
        monkeypatch.setattr(disk, "renameat2", _unsupported)
    return str(request.param)


def _unsupported(source: str, target: str, flags: int) -> None:
    raise OSError(errno.EINVAL, "not here")


def _clear(out: Path) -> None:
    for path in out.parent.iterdir():
        if path.name != "companion.txt":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _reset(out: Path, old: bool) -> None:
    _clear(out)
    if old:
        gather(out, "old")


def test_fresh(out_in_memory: Path, both_renames: str, every: int) -> None:
    out = out_in_memory
    resumed = set()
    point = 0
    for point in kill_points(lambda: gather(out), extra=EXTRA, every=every):
        state = seen(out)
        assert state in ("absent", "new")
        if state == "absent":
            resumed.add(len(gather(out)))
        assert seen(out) == "new", point
        assert beside(out) in ([], [".model.xrank.lock"]), point
        _clear(out)
    assert point > 40
    assert resumed == {0, 1, 2}


def test_overwrite(out_in_memory: Path, both_renames: str, every: int) -> None:
    out = out_in_memory
    _reset(out, old=True)
    states = set()
    for point in kill_points(lambda: gather(out, overwrite=True), extra=EXTRA, every=every):
        state = seen(out)
        states.add(state)
        gather(out, overwrite=True)
        assert seen(out) == "new", point
        assert beside(out) == [], point
        _reset(out, old=True)
    # Between two renames nothing is there for the time of one call.
    assert states - {"absent"} == {"old", "new"}
    assert ("absent" in states) == (both_renames != "exchange") or (every > 1 and "absent" not in states)


@pytest.mark.slow
def test_absent_for_an_instant_is_rolled_forward(out_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = out_in_memory
    # A start that may not overwrite finds the new output where a kill had left none.
    monkeypatch.setattr(disk, "renameat2", _unsupported)
    _reset(out, old=True)
    absent = 0
    for _ in kill_points(lambda: gather(out, overwrite=True), extra=EXTRA):
        if seen(out) == "absent":
            absent += 1
            with pytest.raises(FileExistsError):
                gather(out)
            assert seen(out) == "new"
            assert beside(out) == []
        _reset(out, old=True)
    assert absent > 0


def test_resume_killed_in_turn(out_in_memory: Path, every: int) -> None:
    out = out_in_memory

    def interrupted() -> None:
        raise_at = iter(range(2))

        def stop(number: int, call: Callable[[], object]) -> object:
            result = call()
            if number == 25:
                next(raise_at)
                raise KeyboardInterrupt
            return result

        in_child(lambda: gather(out), stop, EXTRA)
        assert seen(out) == "absent"
        assert beside(out) != []

    interrupted()
    for point in kill_points(lambda: gather(out), extra=EXTRA, every=every):
        if seen(out) == "absent":
            gather(out)
        assert seen(out) == "new", point
        assert beside(out) in ([], [".model.xrank.lock"]), point
        _clear(out)
        interrupted()


def test_killed_at_each_point_of_a_chain_of_starts(out: Path) -> None:  # on a disk: each start goes on from the last
    # Each start is killed one call later than the last, without anybody clearing up between.
    for point in kill_points(lambda: gather(out) if seen(out) == "absent" else None, extra=EXTRA):
        assert seen(out) in ("absent", "new"), point
    assert seen(out) == "new"


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_error_at_each_call_on_disk(out: Path, number: int) -> None:
    _error_at_each_call(out, number, False, 1)


@pytest.mark.parametrize("number", sampled([errno.ENOSPC, errno.EIO, errno.ESTALE], 3))
@pytest.mark.parametrize("old", [False, True], ids=["fresh", "overwrite"])
def test_error_at_each_call(out_in_memory: Path, number: int, old: bool, both_renames: str, every: int) -> None:
    _error_at_each_call(out_in_memory, number, old, every)


def _error_at_each_call(out: Path, number: int, old: bool, every: int) -> None:
    before = "old" if old else "absent"
    _reset(out, old)
    failed = 0
    for outcome in error_points(lambda: gather(out, overwrite=old), number, extra=EXTRA, every=every):
        where = f"call {len(outcome.calls)}, {outcome.calls[-1]}"
        state = seen(out)
        if outcome.finished:
            # Forgiven are only the steps after the rename: removing what was replaced, and the lock.
            assert state == "new", where
        else:
            failed += 1
            assert isinstance(outcome.error, XrankError), (where, outcome.error)
            if number == errno.ENOSPC:
                assert isinstance(outcome.error, NoSpaceError), (where, outcome.error)
                assert outcome.error.free_nbytes is not None
            assert str(out.parent) in (outcome.error.file or ""), where
            assert state in (before, "new"), where
            for folder in out.parent.glob(".model.xrank-*"):
                assert not list(folder.rglob("*.part")) or outcome.calls[-1] == "unlink", where
        if state != "new":
            gather(out, overwrite=old)
            assert seen(out) == "new", where
        _reset(out, old)
    assert failed > 25 // every


@pytest.mark.parametrize("old", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fresh", "overwrite"])
def test_rename_done_but_answered_by_an_error(out_in_memory: Path, old: bool, both_renames: str, every: int) -> None:
    out = out_in_memory
    every = min(every, 2)  # so that renames are among the calls
    # An NFS client repeats a rename whose answer was lost and is told ENOENT.
    _reset(out, old)
    for outcome in error_points(
        lambda: gather(out, overwrite=old), errno.ENOENT, extra=EXTRA[:1], perform=True, every=every
    ):
        if outcome.calls[-1] in ("renameat2", "rename"):
            assert outcome.finished, outcome.error
        state = seen(out)
        assert state in (("old", "new") if old else ("absent", "new"))
        gather(out, overwrite=True)
        assert seen(out) == "new"
        _reset(out, old)


def test_finished_shards_survive_a_full_disk(out_in_memory: Path, every: int) -> None:
    out, kept = out_in_memory, set()
    for _ in error_points(lambda: gather(out), errno.ENOSPC, extra=EXTRA, every=every):
        if seen(out) == "absent":
            kept.add(tuple(gather(out)))
        _clear(out)
    assert kept == {(), SHARDS[:1], SHARDS}
