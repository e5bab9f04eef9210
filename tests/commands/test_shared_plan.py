"""The plan that one rank of a team makes for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.commands.made_workspaces import layout_of, leave, wide_model
from tests.free_port import free_port
from xrank.commands.shared_plan import ReceivedPlan, plan_together
from xrank.engine.sources import open_source
from xrank.errors import ContradictionError, CorruptError, XrankError
from xrank.ranks.team import Team
from xrank.recipes.decision import FolderPlan, digest_of_plan, plan_gather
from xrank.recipes.options import GatherOptions


class Two(Team):
    """One of two ranks, whose first sends what the other gets."""

    def __init__(self, rank: int, sent: str = "", asked: Sequence[str] = ()) -> None:
        super().__init__((0, 1), rank)
        self.secret, self.sent, self._asked = b"s" * 32, sent, asked

    def agree(
        self,
        what: str,
        make: Callable[[], Any],
        describe: Callable[[Any], Any],
        decide: Callable[[Any, Sequence[Any]], Any],
    ) -> tuple[Any, Any]:
        made = make()
        if self.is_first:
            self.sent = decide(made, [describe(made), *(self._asked or [describe(made)])])
        return made, self.sent


@pytest.fixture
def source(tmp_path: Path) -> Path:
    model = wide_model()
    leave(tmp_path / "run42", model, layouts={name: layout_of(name) for name in model})
    return tmp_path / "run42"


def refuse(share: tuple[int, int]) -> FolderPlan:
    raise AssertionError("a second rank made the plan")


def sent_by_first(source: Path, out: Path) -> tuple[FolderPlan, str]:
    first = Two(0)
    proven = plan_together(first, {}, str(out), GatherOptions(), lambda _: plan_gather(str(source), GatherOptions()))
    assert isinstance(proven, FolderPlan)
    return proven, first.sent


def test_the_others_get_the_plan_that_the_first_has_proven(source: Path, tmp_path: Path) -> None:
    proven, text = sent_by_first(source, tmp_path / "model")
    options = GatherOptions(workers=3)
    received = plan_together(Two(1, text), {}, str(tmp_path / "model"), options, refuse)
    assert isinstance(received, ReceivedPlan) and received.options is options
    assert received.digest == proven.digest == digest_of_plan(received.plan, "verify")
    assert received.source.hashes == proven.source.hashes and len(received.source.shards) == len(wide_model())


def test_a_plan_that_the_first_has_not_sent_is_refused(source: Path, tmp_path: Path) -> None:
    _, text = sent_by_first(source, tmp_path / "model")
    stranger = Two(1, text)
    stranger.secret = b"t" * 32
    with pytest.raises(CorruptError, match="the plan of rank 0 is not the one that it sent"):
        plan_together(stranger, {}, str(tmp_path / "model"), GatherOptions(), refuse)


def test_a_rank_with_other_arguments_is_named_before_anything_is_planned(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="rank 1 plans a different output than rank 0"):
        plan_together(Two(0, asked=["other"]), {"dtype": "keep"}, str(tmp_path / "model"), GatherOptions(), refuse)


def test_each_rank_has_a_report_and_one_has_read_the_source(source: Path, tmp_path: Path) -> None:
    program = (
        "import json, os, sys, xrank.commands.gather as gather\n"
        "if os.environ['RANK'] != '0': gather.plan_apart = None\n"
        "print(json.dumps(gather.gather_checkpoint(*sys.argv[1:], distributed=True).to_dict()))"
    )
    marks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", program, str(source), str(tmp_path / "model")]
    for notes in ((), ("made-before",)):
        started = [
            subprocess.Popen(command, env={**os.environ, **marks, "RANK": rank}, stdout=subprocess.PIPE)
            for rank in "01"
        ]
        first, other = (json.loads(rank.communicate(timeout=60)[0]) for rank in started)
        assert [rank.returncode for rank in started] == [0, 0]
        assert [note["code"] for note in other["notes"]][-1:] == list(notes)
        assert (other["command"], other["source"]) == (first["command"], first["source"])
        for name in ("path", "num_tensors", "num_parameters", "nbytes", "tied", "companions"):
            assert other["output"][name] == first["output"][name]
        if not notes:
            files = [{name: file[name] for name in ("name", "nbytes")} for file in first["output"]["files"]]
            assert other["output"]["files"] == files


@pytest.mark.parametrize("change", [lambda path: os.utime(path, ns=(0, 0)), os.unlink], ids=["another", "missing"])
def test_a_rank_that_sees_another_file_than_the_first_names_it(
    source: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    _, sent = sent_by_first(source, tmp_path / "out")
    received = plan_together(Two(1, sent), {}, str(tmp_path / "out"), GatherOptions(), refuse)
    change(source / "rank_1_state.pth")
    table, into = received.source.records, memoryview(bytearray(1 << 20))
    with closing(open_source(received.source)) as files, pytest.raises(XrankError) as caught:
        for record in range(len(table)):
            files.fetch(record, 0, min(len(into), int(table.nbytes[record])), into)
    assert caught.value.file == str(source / "rank_1_state.pth"), caught.value
