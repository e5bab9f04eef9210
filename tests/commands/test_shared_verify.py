"""Verifications that the ranks of a launcher share: what one process finds, or a failure that all name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.bench import run
from tests.commands.forked_ranks import ForkedRanks, Rank, forked_ranks
from tests.commands.made_workspaces import flip, layout_of, leave, wide_model
from tests.sampled import sampled

SMALL: dict[str, Any] = {"window_nbytes": 4096, "round_nbytes": 20_000}
"""Of the engine: so that a small model crosses windows, ranks and rounds."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as forked:
        yield forked


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workspace and the model gathered of it, which tests do not change."""
    folder = tmp_path_factory.mktemp("verified")
    leave_both(folder)
    return folder


def leave_both(folder: Path) -> None:
    model = wide_model()
    leave(folder / "workspace", model, layouts={name: layout_of(name) for name in model})
    ended = run("gather", folder / "workspace", "--out", folder / "model", "--max-shard-size", "60KB")
    assert ended.exit_code == 0, ended.stderr


def without_times(text: str) -> dict[str, Any]:
    return {**json.loads(text), "seconds": 0, "peak_rss_nbytes": 0}


def check_follows(rank: Rank, failed: int) -> None:
    assert rank.exit_code == 1 and rank.stdout == "", rank
    assert f"xrank: RankFailedError: rank {failed} failed: " in rank.stderr, rank


@pytest.mark.parametrize("where", sampled([{"far": True}, {}, {"launcher": "srun"}, {"launcher": "bare"}], 4), ids=str)
@pytest.mark.parametrize("what", [["model"], ["workspace"], ["workspace", "--against", "model"]], ids=" ".join)
def test_ranks_find_what_one_process_finds(
    ranks: ForkedRanks, kept: Path, what: list[str], where: dict[str, Any]
) -> None:
    command = ["verify", "--json", *(word if word.startswith("-") else str(kept / word) for word in what)]
    alone = run(*command)
    assert alone.exit_code == 0, alone.stderr
    distributed = ["--distributed"] if where.get("launcher") == "bare" else []
    first, *others = ranks(*command, *distributed, num_ranks=3, **SMALL, **where)
    assert first.exit_code == 0, first
    assert without_times(first.stdout) == without_times(alone.stdout)
    assert others == [Rank(0, "", "")] * 2


@pytest.mark.parametrize("moment", sampled([3, 5], 2))
def test_a_rank_that_dies_is_missed(ranks: ForkedRanks, kept: Path, moment: int) -> None:
    ended = ranks("verify", kept / "model", num_ranks=3, **SMALL, act=(1, "kill", moment))
    assert ended[1].exit_code == -9
    check_follows(ended[0], 1)
    check_follows(ended[2], 1)


def test_a_model_that_is_not_its_manifests(ranks: ForkedRanks, tmp_path: Path) -> None:
    leave_both(tmp_path)
    last = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    flip(last, last.stat().st_size - 1)
    first, *others = ranks("verify", tmp_path / "model", "--json", num_ranks=3, **SMALL)
    error = json.loads(first.stdout)["error"]
    assert (first.exit_code, error["type"], error["file"]) == (4, "CorruptError", str(last))
    for other in others:
        check_follows(other, 0)


def test_a_checksum_that_another_rank_finds_wrong(ranks: ForkedRanks, tmp_path: Path) -> None:
    leave_both(tmp_path)
    state = sorted((tmp_path / "workspace").glob("rank_*_state.pth"))[-1]
    flip(state, state.stat().st_size // 2)
    alone = run("verify", tmp_path / "workspace", "--json")
    ended = ranks("verify", tmp_path / "workspace", "--json", num_ranks=3, **SMALL)
    codes = [rank.exit_code for rank in ended]
    assert alone.exit_code == 4 and 4 in codes and 0 not in codes
    finder = codes.index(4)
    for number, rank in enumerate(ended):
        if number != finder:
            assert rank.exit_code in (1, 4), rank
    assert json.loads(ended[0].stdout)["status"] == "failed"


def test_ranks_that_verify_different_things_are_refused(ranks: ForkedRanks, kept: Path) -> None:
    ended = ranks("verify", kept / "model", num_ranks=2, more=(1, ["--against", str(kept / "workspace")]))
    assert all(rank.exit_code != 0 for rank in ended)
    assert "ContradictionError" in ended[0].stderr and "rank 1" in ended[0].stderr
