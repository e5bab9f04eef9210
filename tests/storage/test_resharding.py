"""States of ranks in another layout, written straight into a bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands.forked_ranks import ForkedRanks, forked_ranks
from tests.storage.servers import Bucket
from tests.storage.written import leave_states, read_folder
from xrank.commands.gather import gather_checkpoint
from xrank.commands.reshard import reshard_checkpoint
from xrank.errors import UsageError

VECTORS = 300
"""Small tensors, whose descriptors lie in one part of a state."""
LAYOUT = """
[mesh]
grid = "tp=4"

[tensors]
"a.weight" = "[rows, cols/tp]"
"b.weight" = "[rows, cols/tp]"
".*norm.weight" = "[cols]"
"""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as forked:
        yield forked


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_states(tmp_path_factory.mktemp("resharding") / "states", rows=1800, vectors=VECTORS)


@pytest.fixture(scope="module")
def layout(states: Path) -> Path:
    (states.parent / "layout.toml").write_text(LAYOUT)
    return states.parent / "layout.toml"


@pytest.fixture(scope="module")
def expected(states: Path, layout: Path) -> dict[str, bytes]:
    reshard_checkpoint(states, layout, states.parent / "out")
    return read_folder(states.parent / "out")


def read_made(bucket: Bucket) -> dict[str, bytes]:
    return {key.removeprefix("run/new/"): data for key, data in bucket.read_all("run/new/").items()}


def test_one_process_writes_what_it_writes_to_a_folder(
    states: Path, layout: Path, expected: dict[str, bytes], small_bucket: Bucket
) -> None:
    out = f"{small_bucket.url}/run/new"
    planned = reshard_checkpoint(states, layout, out, dry_run=True).to_dict()["traffic"]
    report = reshard_checkpoint(states, layout, out).to_dict()
    made = read_made(small_bucket)
    assert made.keys() == expected.keys()
    assert [name for name in made if made[name] != expected[name]] == []
    assert small_bucket.list_uploads() == []
    nbytes = sum(map(len, expected.values()))
    assert planned["planned_written_nbytes"] <= nbytes <= report["traffic"]["written_nbytes"] < nbytes + 200_000
    assert "made-before" in [code for code, _ in reshard_checkpoint(states, layout, out).notes]
    with pytest.raises(UsageError):
        reshard_checkpoint(states, layout, out, overwrite=True)
    gather_checkpoint(out, states.parent / "back", workspace=True)
    gather_checkpoint(states, states.parent / "direct")
    back, direct = read_folder(states.parent / "back"), read_folder(states.parent / "direct")
    assert back["model.safetensors"] == direct["model.safetensors"]


def test_ranks_write_it_together_after_one_was_killed(
    ranks: ForkedRanks, states: Path, layout: Path, expected: dict[str, bytes], small_bucket: Bucket
) -> None:
    command = ("reshard", states, "--layout", layout, "--out", f"{small_bucket.url}/run/new", "--json")
    job = {"num_ranks": 2, "environ": small_bucket.environment()}
    ended = ranks(*command, **job, act=(1, "after", 1))
    assert ended[1].exit_code == -9
    assert "RankFailedError: rank 1 failed" in ended[0].stderr
    assert read_made(small_bucket) == {}
    ended = ranks(*command, **job)
    assert [rank.exit_code for rank in ended] == [0, 0], ended
    assert json.loads(ended[0].stdout)["traffic"]["written_nbytes"] < sum(map(len, expected.values()))
    made = read_made(small_bucket)
    assert made.keys() == expected.keys()
    assert [name for name in made if made[name] != expected[name]] == []
