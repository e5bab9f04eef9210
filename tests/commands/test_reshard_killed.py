"""A whole reshard, killed after every call that changes the disk, and gone on with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench import Bench
from tests.commands.made_workspaces import flip, leave, made_model, state_of
from tests.storage.gathered import EXTRA
from tests.storage.kill_points import NO_SPACE, error_points, in_child, kill_points
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import CorruptError, NoSpaceError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.workspace import read_rank_state

_MESH = DeviceMesh((3,), ("r",))


class Reshards:
    """Reshards of one bench's workspace, and what may be seen of them."""

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.bench = bench
        self.options = {"workers": 1, **options}
        model = made_model()
        (bench.folder / "run42").mkdir()
        (bench.folder / "run42" / "tokenizer.json").write_text("{}")
        leave(bench.workspace, model)
        self.layouts = LayoutMap(_MESH)
        for name, tensor in model.items():
            self.layouts[name] = "[n/~r, m]" if tensor.ndim == 2 else "[n/~r]"
        self()
        self.known = self.content()
        self.clear()

    def __call__(self) -> int:
        """Reshard; return how many bytes were gone on with."""
        report = reshard_checkpoint(self.bench.workspace, self.layouts, self.bench.out, **self.options)
        assert report.output is not None
        return int(report.output["resumed_nbytes"])

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.bench.out.iterdir()}

    def seen(self) -> str:
        if not os.path.lexists(self.bench.out):
            return "absent"
        assert self.content() == self.known, "half a workspace is visible"
        return "whole"

    def beside(self) -> list[Path]:
        return [path for path in self.bench.folder.iterdir() if path.name.startswith(".")]

    def clear(self) -> None:
        for path in (*self.beside(), self.bench.out):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()

    def finish(self) -> int:
        """Run the same command again, which must end with the workspace whole and leave nothing beside it."""
        resumed = self()
        assert self.seen() == "whole"
        assert self.beside() == []
        return resumed


def test_killed_at_every_call(bench: Bench, every: int) -> None:
    reshards = Reshards(bench)
    num_calls, resumed = 0, set()
    for point in kill_points(reshards, extra=EXTRA, every=every):
        num_calls = point
        if reshards.seen() == "absent":
            resumed.add(reshards.finish())
        reshards.clear()
    assert num_calls > 60
    sizes = [len(reshards.known[f"rank_{rank}_state.pth"]) for rank in range(3)]
    assert resumed == {0, sizes[0], sum(sizes[:2]), sum(sizes)}


def test_a_full_disk_at_every_call(bench: Bench, every: int) -> None:
    reshards = Reshards(bench)
    for outcome in error_points(reshards, NO_SPACE, extra=EXTRA, every=every):
        if outcome.finished:
            assert reshards.seen() == "whole"
        else:
            assert reshards.seen() in ("absent", "whole")
            assert isinstance(outcome.error, NoSpaceError), outcome.error
            if reshards.seen() == "absent":
                reshards.finish()
        reshards.clear()


def _interrupted(reshards: Reshards) -> Path:
    """Leave the stage of a reshard that was stopped when two states were finished; return where."""

    def stop(number: int, call: Callable[[], object]) -> object:
        result = call()
        journals = list(reshards.bench.folder.glob(".model.xrank-*/*journal.jsonl"))
        if journals and journals[0].read_text().count("\n") == 3:
            raise KeyboardInterrupt
        return result

    in_child(reshards, stop, EXTRA)
    assert reshards.seen() == "absent"
    (stage,) = reshards.bench.folder.glob(".model.xrank-*[0-9a-f]")
    return stage


@pytest.mark.parametrize("where", ["pickle", "header", "tensor", "descriptor", "directory"])
def test_a_finished_state_that_was_damaged_is_written_again(bench: Bench, where: str) -> None:
    reshards = Reshards(bench)
    state = min(_interrupted(reshards).glob("rank_*"))
    record = next(iter(read_rank_state(str(state.parent), 0).archive.records.values()))
    offset = {
        "pickle": 4096 + 20,
        "header": state.read_bytes().index(b"archive/data/0"),
        "tensor": record.offset + 5,
        "descriptor": record.offset + record.nbytes + 5,
        "directory": state.stat().st_size - 130,
    }[where]
    flip(state, offset)
    resumed = reshards.finish()
    sizes = [len(reshards.known[f"rank_{rank}_state.pth"]) for rank in range(2)]
    assert resumed == sizes[1]


def test_nothing_of_a_state_is_kept_whose_source_was_not_checked(bench: Bench) -> None:
    """A record that several new states share is checked whole before the first of them counts as finished."""
    reshards = Reshards(bench)
    path = state_of(bench.workspace, 3)
    flip(path, max(r.offset for r in read_rank_state(str(bench.workspace), 3).archive.records.values()))
    with pytest.raises(CorruptError):
        reshards()
    for stage in bench.folder.glob(".model.xrank-*[0-9a-f]"):
        assert not list(stage.glob("rank_*"))
