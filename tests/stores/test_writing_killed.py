"""A gather to a store is killed at any request: the output is absent or complete, and the next run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.fault_proxy import FaultProxy
from tests.stores.servers import Bucket, open_proxy
from tests.stores.small_s3 import SmallS3
from tests.stores.written import leave_states, part_of, read_folder, read_model, run, start
from xrank.conversion.gather import gather_checkpoint

FILE_NBYTES = "8KB"
"""Every tensor is a file, two of them of two parts and a rest."""
POINTS = 175
"""More requests than a gather sends: kills after the last one find it done."""


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_states(tmp_path_factory.mktemp("killed") / "states", vectors=19)


@pytest.fixture(scope="module")
def expected(states: Path) -> dict[str, bytes]:
    gather_checkpoint(states, states.parent / "model", max_shard_size=FILE_NBYTES)
    return read_folder(states.parent / "model")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "point" in metafunc.fixturenames:
        soak = metafunc.config.getoption("soak")
        points = range(1, POINTS) if soak else (15, 125)
        metafunc.parametrize(("point", "when"), [(n, when) for n in points for when in ("before", "after")])


def test_killed_at_a_request(
    states: Path, expected: dict[str, bytes], small_bucket: Bucket, small_server: SmallS3, point: int, when: str
) -> None:
    command = ("gather", states, "--out", f"{small_bucket.url}/models/one", "--max-shard-size", FILE_NBYTES)
    with open_proxy(small_bucket.server) as proxy:
        code = _run_killed(proxy, small_bucket.behind(proxy), point, when, command)
        assert code in (-9, 0)
        there = read_model(small_bucket.read_all(), "models/one")
        assert there is None or there == expected
        uploads = [upload for upload in small_server.uploads.values() if upload.bucket == small_bucket.name]
        kept = {(upload.key, number) for upload in uploads for number in upload.parts}
        proxy.restart()
        code, text = run(small_bucket.behind(proxy), *command)
    assert code == 0, text
    assert small_bucket.read_all() == {f"models/one/{name}": data for name, data in expected.items()}
    assert not kept & {part for request in proxy.requests if (part := part_of(small_bucket, request))}
    # A kill between the beginning of an upload and the journal's line leaves an upload, which is empty.
    left = [upload for upload in small_server.uploads.values() if upload.bucket == small_bucket.name]
    assert not any(upload.parts for upload in left)


def _run_killed(proxy: FaultProxy, bucket: Bucket, point: int, when: str, command: tuple[object, ...]) -> int:
    child = start(bucket, *command)
    proxy.kill(lambda: child.pid, point, "before" if when == "before" else "after")
    with child:
        child.communicate(timeout=120)
    return child.returncode
