"""A whole gather, killed after every call that changes the disk; and two of them that race for one output."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.bench import Bench
from tests.commands.made_workspaces import CONFIG, assert_holds, leave, made_model
from tests.storage.gathered import EXTRA
from tests.storage.kill_points import in_child, kill_points
from xrank.commands.gather import gather_checkpoint
from xrank.errors import OutputExistsError
from xrank.storage import disk
from xrank.storage.staging import open_stage

OPTIONS: dict[str, Any] = {"max_shard_size": "600", "workers": 1}  # three shards and an index


class Gathers:
    """Gathers of one bench's workspace, and what may be seen of them."""

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.bench = bench
        self.options = {**OPTIONS, **options}
        base = bench.folder / "base"
        base.mkdir()
        (base / "tokenizer.json").write_text("{}")
        (base / "config.json").write_text("{}")
        self.known: dict[str, dict[str, bytes]] = {}
        for version, seed in (("old", 1), ("new", 0)):
            leave(bench.workspace, made_model(seed), config={**CONFIG, "version": version})
            self()
            assert_holds(bench.out, made_model(seed))
            self.known[version] = self.content()
            shutil.move(bench.out, bench.folder / version)

    def __call__(self) -> int:
        """Gather; return how many bytes were gone on with."""
        base = self.bench.folder / "base"
        report = gather_checkpoint(self.bench.workspace, self.bench.out, base_model=base, **self.options)
        assert report.output is not None
        return int(report.output["resumed_nbytes"])

    def content(self) -> dict[str, bytes]:
        """All files; the manifest without the plan's digest, which depends on the times of the source's files."""
        return {path.name: re.sub(rb'"plan": .*', b"", path.read_bytes()) for path in self.bench.out.iterdir()}

    def seen(self) -> str:
        """Say what a reader finds: nothing, or one of the two models whole."""
        if not os.path.lexists(self.bench.out):
            return "absent"
        found = self.content()
        versions = [version for version, content in self.known.items() if content == found]
        assert versions, f"half a model is visible: {sorted(found)}"
        return versions[0]

    def beside(self) -> list[Path]:
        return [path for path in self.bench.folder.iterdir() if path.name.startswith(".")]

    def clear(self, old: bool = False) -> None:
        for path in (*self.beside(), self.bench.out):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
        if old:
            shutil.copytree(self.bench.folder / "old", self.bench.out)

    def finish(self, point: int) -> int:
        """Run the same command again, which must end with the new model and leave nothing beside it."""
        resumed = self()
        assert self.seen() == "new", point
        assert [path.name for path in self.beside()] == [], point
        return resumed


def test_fresh(bench: Bench, every: int) -> None:
    gathers = Gathers(bench)
    point, resumed = 0, set()
    for point in kill_points(gathers, extra=EXTRA, every=every):
        state = gathers.seen()
        assert state in ("absent", "new")
        if state == "absent":
            resumed.add(gathers.finish(point))
        gathers.clear()
    assert point > 60
    assert len(resumed) == 4  # gone on with none, one, two and all three shards


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "no exchange"])
def test_overwrite(bench: Bench, monkeypatch: pytest.MonkeyPatch, exchange: bool, every: int) -> None:
    if not exchange:
        monkeypatch.setattr(disk, "renameat2", _unsupported)
    gathers = Gathers(bench, overwrite=True)
    gathers.clear(old=True)
    states = set()
    for point in kill_points(gathers, extra=EXTRA, every=every):
        states.add(gathers.seen())
        gathers.finish(point)
        gathers.clear(old=True)
    # Between two renames nothing is there for the time of one call.
    assert states - {"absent"} == {"old", "new"}
    assert ("absent" in states) == (not exchange) or (every > 1 and "absent" not in states)


def _unsupported(source: str, target: str, flags: int) -> None:
    raise OSError(22, "not here")


def test_resuming(bench: Bench, every: int) -> None:
    gathers = Gathers(bench)
    stage = _interrupted(gathers)
    kept = bench.folder / "kept"
    shutil.copytree(stage, kept)
    for point in kill_points(gathers, extra=EXTRA, every=every):
        state = gathers.seen()
        assert state in ("absent", "new")
        if state == "absent":
            # Its last steps take the journal out of what becomes the output: killed there, the next run begins anew.
            journals = list(bench.folder.glob(".model.xrank-*/*journal.jsonl"))
            assert (gathers.finish(point) > 0) == bool(journals), point
        gathers.clear()
        shutil.copytree(kept, stage)


def _interrupted(gathers: Gathers) -> Path:
    """Leave the stage of a gather that was killed when two shards were finished; return where."""

    def stop(number: int, call: Callable[[], object]) -> object:
        result = call()
        journals = list(gathers.bench.folder.glob(".model.xrank-*/*journal.jsonl"))
        if journals and journals[0].read_text().count("\n") == 3:  # its head, and a line for each finished shard
            raise KeyboardInterrupt
        return result

    in_child(gathers, stop, EXTRA)
    assert gathers.seen() == "absent"
    (stage,) = gathers.bench.folder.glob(".model.xrank-*[0-9a-f]")
    return stage


def test_progress_goes_on_from_what_was_finished(bench: Bench) -> None:
    gathers = Gathers(bench)
    _interrupted(gathers)
    told: list[tuple[int, int]] = []
    gathers.options["progress"] = lambda *counts: told.append(counts)
    resumed = gathers.finish(0)
    total = sum(len(data) for name, data in gathers.known["new"].items() if name.endswith(".safetensors"))
    assert {of for _, of in told} == {total}
    done = [nbytes for nbytes, _ in told]
    assert resumed < done[0] and done == sorted(done) and done[-1] == total


def test_a_finished_shard_that_was_damaged_is_written_again(bench: Bench) -> None:
    gathers = Gathers(bench)
    stage = _interrupted(gathers)
    shard = min(stage.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert 0 < gathers.finish(0) < sum(len(data) for data in gathers.known["new"].values())


def test_a_stage_of_another_source_is_not_gone_on_with(bench: Bench) -> None:
    gathers = Gathers(bench)
    _interrupted(gathers)
    leave(bench.workspace, made_model(0), config={**CONFIG, "version": "new"})  # the same, but who knows
    assert gathers.finish(0) == 0


# ---- races


def _race(bench: Bench, options: dict[str, Any]) -> list[str]:
    """Let two processes start one gather at the same time; return how each ended."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    racers = [context.Process(target=_run, args=(bench, options, barrier, results)) for _ in range(2)]
    for racer in racers:
        racer.start()
    ended = [results.get() for _ in racers]
    for racer in racers:
        racer.join()
    return sorted(ended)


def _run(bench: Bench, options: dict[str, Any], barrier: Barrier, results: Any) -> None:
    barrier.wait()
    try:
        report = gather_checkpoint(bench.workspace, bench.out, **options)
        results.put("found" if "made-before" in {code for code, _ in report.notes} else "done")
    except OutputExistsError:
        results.put("refused")
    except BaseException as error:
        results.put(repr(error))


@pytest.fixture
def raced(bench: Bench) -> Iterator[dict[str, torch.Tensor]]:
    model = leave(bench.workspace)
    yield model
    assert not [name for name in bench.names() if name.startswith(".")]


@pytest.mark.parametrize("workers", [1, 2])
def test_two_gathers_to_one_output(bench: Bench, raced: dict[str, torch.Tensor], workers: int, every: int) -> None:
    for _ in range(25 // every):
        # The slower one is refused, or finds the faster one's output complete.
        assert _race(bench, {**OPTIONS, "workers": workers}) in (["done", "found"], ["done", "refused"])
        assert_holds(bench.out, raced)
        shutil.rmtree(bench.out)


def test_one_that_is_under_way_is_named(bench: Bench) -> None:
    model = leave(bench.workspace)
    with open_stage(bench.out, plan_digest="another"):
        says = [
            "another gather to it is running (host ",
            f", pid {os.getpid()})",
            "wait for it, or choose a different",
        ]
        bench.refused("OutputExistsError", says=says, file="model")
    bench.succeeds(model)


def test_two_that_overwrite(bench: Bench, raced: dict[str, torch.Tensor], every: int) -> None:
    endings = set()
    gather_checkpoint(bench.workspace, bench.out)
    for _ in range(25 // every):
        ended = _race(bench, {**OPTIONS, "overwrite": True})
        assert ended in (["done", "done"], ["done", "refused"])
        assert_holds(bench.out, raced)
        endings.add(tuple(ended))
    assert endings
