"""Gathers of a real other user: errors name the files that it may not read or replace, and stages of others stay."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import pytest

from tests.cli.bench import Bench, refusal, run
from tests.commands.made_workspaces import assert_holds, leave, made_model
from tests.storage.gathered import EXTRA
from tests.storage.kill_points import in_child
from xrank.commands.gather import gather_checkpoint

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may be another user")

NOBODY = 65534


def as_nobody(bench: Bench, work: Callable[[], object]) -> None:
    """Do the work in a child as another user; its modules are imported before."""
    run("gather", bench.workspace, "-o", bench.folder / "imported", "--json")
    run("gather", bench.folder / "none", "-o", bench.folder / "imported", "--json")
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "its traceback is above"


@pytest.fixture(autouse=True)
def shared(bench: Bench) -> None:
    """A folder where all users may write, and remove their own files."""
    leave(bench.workspace)
    bench.folder.chmod(0o1777)


def test_a_state_that_only_its_owner_reads(bench: Bench) -> None:
    (bench.workspace / "rank_2_state.pth").chmod(0o600)

    def work() -> None:
        error = refusal(run("gather", bench.workspace, "-o", bench.out, "--json"), "UsageError", rank=2)
        assert "run as its owner" in error["try"] and not bench.out.exists()

    as_nobody(bench, work)


def test_a_folder_that_only_its_owner_writes_to(bench: Bench) -> None:
    (bench.folder / "closed").mkdir(mode=0o755)

    def work() -> None:
        error = refusal(run("gather", bench.workspace, "-o", bench.folder / "closed" / "model", "--json"), "UsageError")
        assert "owner uid 0, mode drwxr-xr-x, this process is uid 65534" in error["message"]

    as_nobody(bench, work)


def test_a_stage_and_a_lock_of_another_user_stay(bench: Bench) -> None:
    def stop(number: int, call: Callable[[], object]) -> object:
        if number > 40:
            os._exit(9)
        return call()

    with pytest.raises(AssertionError, match="without a word"):
        in_child(lambda: gather_checkpoint(bench.workspace, bench.out, max_shard_size="600", workers=1), stop, EXTRA)
    left = sorted(path.name for path in bench.folder.iterdir() if path.name.startswith("."))
    assert len(left) == 2, left

    def work() -> None:
        report = gather_checkpoint(bench.workspace, bench.out, max_shard_size="600", workers=1)
        assert report.output is not None and report.output["resumed_nbytes"] == 0

    as_nobody(bench, work)
    assert_holds(bench.out, made_model())
    assert bench.out.stat().st_uid == NOBODY
    assert sorted(path.name for path in bench.folder.iterdir() if path.name.startswith(".")) == left


def test_a_model_of_another_user_is_not_replaced(bench: Bench) -> None:
    gather_checkpoint(bench.workspace, bench.out)
    before = {path.name: path.read_bytes() for path in bench.out.iterdir()}

    def work() -> None:
        again = run("gather", bench.workspace, "-o", bench.out, "--overwrite", "--json")
        error = refusal(again, "UsageError", file="model")
        assert "owner uid 0" in error["got"], error

    as_nobody(bench, work)
    assert {path.name: path.read_bytes() for path in bench.out.iterdir()} == before
    assert not [name for name in bench.names() if name.startswith(".")]
