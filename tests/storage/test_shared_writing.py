"""Outputs in a bucket that several ranks write: the objects of one process, or a failure that all ranks name."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands.forked_ranks import ForkedRanks, Rank, forked_ranks
from tests.sampled import sampled, sampled_rows
from tests.storage.servers import Bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from tests.storage.written import leave_states, part_of, read_folder, read_model
from xrank.commands.clean import clean
from xrank.commands.gather import gather_checkpoint

FILES = {"several files": "12MB", "one file": "5GB"}
"""Files of two parts and a rest each, or one of four parts and a rest."""
REQUESTS = {0: 30, 1: 4}
"""By rank: fewer requests than it sends in a gather of one file."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[ForkedRanks]:
    with forked_ranks() as forked:
        yield forked


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_states(tmp_path_factory.mktemp("shared") / "states", vectors=3)


@pytest.fixture(scope="module")
def expected(states: Path) -> dict[str, dict[str, bytes]]:
    """The output of one process in a folder, by the number of files."""
    found = {}
    for name, size in FILES.items():
        gather_checkpoint(states, states.parent / name, max_shard_size=size)
        found[name] = read_folder(states.parent / name)
    return found


def shared(ended: list[Rank]) -> dict[str, Any]:
    """Check that all ranks ended well, and return the report of rank 0."""
    assert [rank.exit_code for rank in ended] == [0] * len(ended), ended
    assert [rank.stdout for rank in ended[1:]] == [""] * (len(ended) - 1)
    return dict(json.loads(ended[0].stdout))


@pytest.mark.parametrize(
    ("bucket", "launcher", "num_ranks", "files"),
    sampled_rows([("small", "srun", 3, "several files"), ("moto", "torchrun", 2, "one file")], 2),
    indirect=["bucket"],
)
def test_ranks_write_what_one_process_writes(
    ranks: ForkedRanks,
    states: Path,
    expected: dict[str, dict[str, bytes]],
    bucket: Bucket,
    launcher: str,
    num_ranks: int,
    files: str,
) -> None:
    out = f"{bucket.url}/models/one"
    command = ("gather", states, "--out", out, "--max-shard-size", FILES[files], "--json")
    job = {"num_ranks": num_ranks, "launcher": launcher, "far": launcher == "srun", "environ": bucket.environment()}
    report = shared(ranks(*command, **job))
    assert bucket.read_all() == {f"models/one/{name}": data for name, data in expected[files].items()}
    assert bucket.list_uploads() == []
    nbytes = sum(map(len, expected[files].values()))
    assert nbytes <= report["traffic"]["written_nbytes"] < nbytes + 200_000
    again = shared(ranks(*command, **job))
    assert [note["code"] for note in again["notes"]].count("made-before") == 1


def test_a_bucket_to_a_bucket(ranks: ForkedRanks, states: Path, small_bucket: Bucket) -> None:
    source = small_bucket.put_folder(states, "run/states")
    command = ("gather", source, "--out", f"{small_bucket.url}/run/model", "--json")
    report = shared(ranks(*command, num_ranks=2, environ=small_bucket.environment()))
    nbytes = sum(path.stat().st_size for path in states.iterdir())
    assert 0.9 * nbytes < report["traffic"]["read_nbytes"] < 1.2 * nbytes
    verify = ("verify", f"{small_bucket.url}/run/model", "--json")
    shared(ranks(*verify, num_ranks=2, environ=small_bucket.environment()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        moments = [(rank, n, when) for rank in REQUESTS for n in range(1, REQUESTS[rank]) for when in WHEN]
        few = [*random.Random(7).sample(moments, 3), (1, 2, "after")]
        metafunc.parametrize("point", moments if metafunc.config.getoption("soak") else sampled(few, 2), ids=str)


WHEN = ("before", "after")


def test_a_killed_rank_is_named_and_the_next_run_goes_on(
    ranks: ForkedRanks,
    states: Path,
    expected: dict[str, dict[str, bytes]],
    small_bucket: Bucket,
    small_server: SmallS3,
    point: tuple[int, int, str],
) -> None:
    rank, number, when = point
    job = {"num_ranks": 2, "environ": small_bucket.environment()}
    command = ("gather", states, "--out", f"{small_bucket.url}/models/one", "--max-shard-size", "12MB")
    ended = ranks(*command, **job, act=(rank, when, number))
    assert ended[rank].exit_code in (-9, 0), ended
    there = read_model(small_bucket.read_all(), "models/one")
    assert there is None or there == expected["several files"]
    if ended[rank].exit_code == -9 and there is None:
        other = ended[1 - rank]
        assert other.exit_code == 1
        assert f"RankFailedError: rank {rank} failed" in other.stderr, other
    kept = {
        (upload.key, number)
        for upload in small_server.uploads.values()
        if upload.bucket == small_bucket.name
        for number in upload.parts
    }
    with open_proxy(small_bucket.server) as proxy:
        job["environ"] = small_bucket.behind(proxy).environment()
        assert [rank.exit_code for rank in ranks(*command, **job)] == [0, 0]
        sent = {part for request in proxy.requests if (part := part_of(small_bucket, request))}
    assert not kept & sent
    assert small_bucket.read_all() == {f"models/one/{name}": d for name, d in expected["several files"].items()}
    left = [upload for upload in small_server.uploads.values() if upload.bucket == small_bucket.name]
    assert not any(upload.parts for upload in left)


def test_clean_aborts_what_a_killed_gather_left(ranks: ForkedRanks, states: Path, small_bucket: Bucket) -> None:
    out = f"{small_bucket.url}/models/one"
    ended = ranks("gather", states, "--out", out, num_ranks=2, environ=small_bucket.environment(), act=(1, "after", 1))
    assert ended[1].exit_code == -9
    assert small_bucket.list_uploads() == ["models/one/model.safetensors"]
    assert clean(out).details["num_removed"] == 2
    assert (small_bucket.list_uploads(), small_bucket.read_all()) == ([], {})


def test_a_dry_run_counts_what_it_would_write(states: Path, small_bucket: Bucket) -> None:
    report = gather_checkpoint(states, f"{small_bucket.url}/models/one", max_shard_size="12MB", dry_run=True)
    traffic = report.to_dict()["traffic"]
    # Two files of three parts and one of one, with five requests each beside them.
    assert traffic["planned_written_requests"] == 7 + 15
    assert 24_000_000 < traffic["planned_written_nbytes"] < 24_100_000
    assert report.notes[-1][1].endswith("the tensors will take 22 requests to write 24.0 MB")
    assert small_bucket.read_all() == {}
