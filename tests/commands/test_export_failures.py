"""Exports in which a rank raises, dies, stops or disagrees: named on all, nothing visible, the next call right."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands.exported import tensors_of
from tests.commands.forked_exports import ForkedExports, forked_exports
from tests.commands.made_workspaces import wide_model
from tests.sampled import sampled
from xrank.engine import shared_writing

pytestmark = pytest.mark.timeout(300)

SOON_SECONDS = 18
"""For what comes at once, on a machine that may stand still for some seconds; a call's own patience is 20."""
PATIENCE_SECONDS = 6
"""Of calls that wait in vain: longer than such a machine lets one rank stand, which would be missed as well."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedExports]:
    with forked_exports() as forked:
        yield forked


def check_made(out: Path, step: int = 0) -> None:
    made, want = tensors_of(out), wide_model(step)
    assert sorted(made) == sorted(want)
    for name, tensor in want.items():
        assert made[name].dtype == tensor.dtype and torch.equal(made[name], tensor), name
    # What killed ranks had sent to other hosts is swept by their next start there.
    assert [name for name in os.listdir(out.parent) if name[0] == "." and not name.endswith(".message")] == []


def reports(said: list[Any]) -> dict[str, Any]:
    """Check that all ranks have the same report, and return it."""
    assert all(one is not None and "report" in one for one in said), said
    assert all(one["report"] == said[0]["report"] for one in said) and not any(one["left"] for one in said)
    return dict(said[0]["report"])


def check_named(said: list[Any], failed: int, kind: str = "RankFailedError") -> None:
    """Check that every rank but the one that failed names it."""
    for rank, one in enumerate(said):
        if rank != failed:
            assert one is not None and one["type"] == kind and one["rank"] == failed, (rank, said)


@pytest.mark.parametrize("num_files", [1, 10])
@pytest.mark.parametrize("far", sampled([False, True], 2), ids=["one host", "hosts"])
def test_plain_and_strided_tensors_with_layouts(
    ranks: ForkedExports, tmp_path: Path, far: bool, num_files: int
) -> None:
    size = {"max_shard_size": "60KB" if num_files > 1 else "5GB"}
    report = reports(ranks(tmp_path / "out", far=far, options=size))
    check_made(tmp_path / "out")
    assert len(report["output"]["files"]) >= num_files
    assert report["proof"] == {
        "coverage": "proven",
        "base_model": None,
        # Norms and steps on 3 other ranks; what is cut over tp alone on the other row of the mesh, in 2 parts.
        "num_replicas_compared": 6 * 3 + 2 * (2 + 8),
        "num_checksums": 0,
    }


def test_a_rank_that_raises_is_named_and_the_next_call_is_right(ranks: ForkedExports, tmp_path: Path) -> None:
    said = ranks(tmp_path / "out", raises=2, again=True)
    check_named([one["first"] for one in said], 2)
    assert said[2]["first"]["type"] == "UsageError" and "0.up" in said[2]["first"]["message"]
    assert all(one["first"]["took_seconds"] < SOON_SECONDS for one in said)
    reports(said)
    check_made(tmp_path / "out")


def test_a_replica_that_differs_is_named_on_every_rank(ranks: ForkedExports, tmp_path: Path) -> None:
    for out in (tmp_path / "out", tmp_path / "far"):
        said = ranks(out, differs=3, far=out.name == "far")
        assert [one["type"] for one in said] == ["ContradictionError"] * 4
        for one in said:
            assert (one["tensor"], one["rank"]) == ("norm.weight", 3)
            assert "rank 0" in one["message"] and one["index_range"] == "elements 3-3", one
            assert one["got"].startswith("1 of 8 elements differ")
        assert os.listdir(tmp_path) == []


def test_a_rank_to_which_the_folder_is_another_says_so_at_once(ranks: ForkedExports, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    said = ranks(tmp_path / "shared" / "out", elsewhere=[2, str(tmp_path / "own")])
    check_named(said, 2)
    assert said[2]["type"] == "UsageError" and "rank 2 does not see" in said[2]["message"]
    assert f"{tmp_path / 'own'} to be one folder that all hosts mount" in said[2]["want"]
    assert max(one["took_seconds"] for one in said) < SOON_SECONDS
    assert not (tmp_path / "shared" / "out").exists()


def test_whether_a_folder_is_another_ones(tmp_path: Path) -> None:
    stage = str(tmp_path / "a" / "b" / "stage")
    (tmp_path / "a" / "b").mkdir(parents=True)
    above = [list(pair) for pair in shared_writing._list_parents(stage)]
    assert above[0][0] == str(tmp_path / "a" / "b") and not shared_writing._is_elsewhere(stage, above)
    # What rank 0 just made may not be visible yet.
    assert not shared_writing._is_elsewhere(str(tmp_path / "a" / "c" / "stage"), above)
    assert shared_writing._is_elsewhere(stage, [[folder, inode + 1] for folder, inode in above])


def test_what_is_there_is_not_replaced(ranks: ForkedExports, tmp_path: Path) -> None:
    reports(ranks(tmp_path / "out"))
    said = ranks(tmp_path / "out", step=1)
    assert [one["type"] for one in said] == ["OutputExistsError"] * 4
    check_made(tmp_path / "out")
    reports(ranks(tmp_path / "out", step=1, options={"overwrite": True}))
    check_made(tmp_path / "out", 1)


@pytest.mark.parametrize("absent", sampled([2, 0], 2))
def test_a_rank_that_does_not_come_is_named(ranks: ForkedExports, tmp_path: Path, absent: int) -> None:
    said = ranks(tmp_path / "out", absent=absent, options={"timeout_seconds": PATIENCE_SECONDS})
    # Its process ends, which the others notice if they look for longer than a moment.
    kind = next(one["type"] for one in said if "type" in one)
    assert kind in ("RankTimeoutError", "RankFailedError")
    check_named(said, absent, kind)
    assert os.listdir(tmp_path) == []


def test_a_rank_that_stops_is_named(ranks: ForkedExports, tmp_path: Path) -> None:
    said = ranks(tmp_path / "out", act=[1, "stop", 12], options={"timeout_seconds": PATIENCE_SECONDS})
    for rank in (0, 2, 3):
        # Which rank's patience ends first is nobody's to say; the others hear of it with its cause.
        assert said[rank]["type"] in ("RankTimeoutError", "RankFailedError") and "rank 1" in said[rank]["message"], said
    assert not (tmp_path / "out").exists()
    reports(ranks(tmp_path / "out"))
    check_made(tmp_path / "out")


@pytest.mark.parametrize("seed", sampled(range(3), 3))
def test_a_rank_that_is_killed_is_named_and_the_next_run_goes_on(
    ranks: ForkedExports, tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    killed = rng.randrange(4) if seed else 0
    act, patience = [killed, "kill", rng.randint(1, 60)], {"timeout_seconds": 60}
    said = ranks(tmp_path / "out", act=act, far=seed % 2, options=patience)
    if said[killed] is None:
        if not (tmp_path / "out").exists():
            check_named(said, killed)
        # Of another host it is known after five beats of 2 seconds, which a machine that stands still delays.
        assert all(one["took_seconds"] < 40 for one in said if one is not None)
    if not (tmp_path / "out").exists():
        report = reports(ranks(tmp_path / "out"))
        assert report["output"]["resumed_nbytes"] >= 0
    check_made(tmp_path / "out")


def test_what_an_interrupted_run_finished_is_kept_only_if_the_ranks_hold_it_still(
    ranks: ForkedExports, tmp_path: Path
) -> None:
    """Killed late enough for finished files, then once with the same weights and once with those of another step."""
    kept = []
    for step in (0, 1):
        # How many calls come before the first file is finished is nobody's to know: later and later.
        for moment in range(50, 250, 15):
            out = tmp_path / f"out{step}" / str(moment)
            said = ranks(out, act=[0, "kill", moment])
            assert said[0] is None and not out.exists()
            if list(out.parent.glob(f".{moment}.*/*.safetensors")):
                break
        report = reports(ranks(out, step=step))
        kept.append(report["output"]["resumed_nbytes"])
        made, want = tensors_of(out), wide_model(step)
        assert all(torch.equal(made[name], tensor) for name, tensor in want.items())
    assert kept[0] > 0 and kept[1] < kept[0], kept


def test_the_same_input_gives_the_same_bytes(ranks: ForkedExports, tmp_path: Path) -> None:
    contents = []
    for name, far in (("a", False), ("b", True)):
        reports(ranks(tmp_path / name, far=far))
        contents.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert contents[0] == contents[1]
