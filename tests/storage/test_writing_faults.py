"""Gathers to a store on a bad day: a gather that returns has written the right model, and one that raises no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage import fault_proxy
from tests.storage.fault_proxy import EVERY, choose_by_seed
from tests.storage.histories import make_seeds, set_up, speed_up
from tests.storage.servers import Bucket, Container, GoogleBucket, Place, open_proxy
from tests.storage.small_azure import SmallAzure
from tests.storage.small_google import SmallGoogle
from tests.storage.small_s3 import SmallS3
from tests.storage.written import leave_states, read_folder, read_model
from xrank.commands.gather import gather_checkpoint
from xrank.engine.windows import WINDOW_NBYTES
from xrank.errors import CorruptError, XrankError
from xrank.storage import bucket_stage

PART_NBYTES = WINDOW_NBYTES
FILE_NBYTES = "3300KB"
"""Two files of three parts and a rest each, and a small one; parts are whole windows, as always."""
_SEEDS_A_JOB = 8
_RATES = (0.02, 0.05, 0.1, 0.3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    make_seeds(metafunc, count=8, soak=1000, a_job=_SEEDS_A_JOB)
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", ("s3", "gs", "az"))


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave_states(tmp_path_factory.mktemp("faults") / "states", rows=416)


@pytest.fixture(scope="module")
def expected(states: Path) -> dict[str, bytes]:
    gather_checkpoint(states, states.parent / "model", max_shard_size=FILE_NBYTES)
    return read_folder(states.parent / "model")


@pytest.fixture
def small_parts(small_server: SmallS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_stage, "part_nbytes_for", lambda nbytes: PART_NBYTES)
    monkeypatch.setattr(small_server, "smallest_part_nbytes", PART_NBYTES)


@pytest.fixture
def place(
    kind: str,
    request: pytest.FixtureRequest,
    small_azure: SmallAzure,
    small_google: SmallGoogle,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    """An empty bucket or container; this process's environment leads to it."""
    if kind == "s3":
        bucket: Bucket = request.getfixturevalue("small_bucket")
        return bucket
    small_azure.forget("faults")
    small_google.forget("faults")
    made = GoogleBucket(small_google.url, "faults") if kind == "gs" else Container(small_azure.url, "faults")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


@pytest.mark.usefixtures("small_parts")
def test_seeded_histories(
    first_seed: int,
    kind: str,
    states: Path,
    expected: dict[str, bytes],
    place: Place,
    small_server: SmallS3,
    small_azure: SmallAzure,
    small_google: SmallGoogle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = {"made": 0, "refused": 0}
    server = {"s3": small_server, "gs": small_google, "az": small_azure}[kind]
    with open_proxy(place.server) as proxy:
        set_up(proxy)
        for seed in range(first_seed, first_seed + _SEEDS_A_JOB):
            out = f"{place.url}/one-{seed}"
            proxy.restart(choose_by_seed(seed, _RATES[seed % len(_RATES)], EVERY))
            with monkeypatch.context() as patch:
                speed_up(patch)
                for name, value in place.behind(proxy).environment().items():
                    patch.setenv(name, value)
                try:
                    gather_checkpoint(states, out, max_shard_size=FILE_NBYTES)
                    ends["made"] += 1
                    is_made = True
                except XrankError as error:
                    ends["refused"] += 1
                    is_made = False
                    assert f"{place.url}/" in f"{error.file} {error}", f"seed {seed}: {error}"
            there = read_model(server.read_all(place.name), f"one-{seed}")
            assert there == expected if is_made else there in (None, expected), f"seed {seed}: a wrong model"
            # The network is good again: the same command ends what it began.
            gather_checkpoint(states, out, max_shard_size=FILE_NBYTES)
            left = server.read_all(place.name)
            assert left == {f"one-{seed}/{name}": data for name, data in expected.items()}, f"seed {seed}"
            assert not small_server.list_uploads(place.name), f"seed {seed}"
            assert not small_google.list_parts(place.name), f"seed {seed}"
            # A blob whose record was damaged is made again beside itself; Azure itself removes such blocks.
            assert {key for key, _ in small_azure.list_blocks(place.name)} <= left.keys(), f"seed {seed}"
            server.forget(place.name)
    assert ends["refused"], ends


@pytest.mark.usefixtures("small_parts")
def test_damaged_lists_of_parts(
    states: Path,
    expected: dict[str, bytes],
    small_bucket: Bucket,
    small_server: SmallS3,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store that does not compare the body's hash makes an object of the parts that a damaged list names."""
    monkeypatch.setattr(small_server, "compares_sums", False)
    refused = []
    with open_proxy(small_bucket.server) as proxy:
        for dropped in range(1, 4):
            out = f"{small_bucket.url}/one-{dropped}"
            proxy.restart(lambda number, method, path: "wrong" if "-00002-" in path and method == "POST" else None)
            monkeypatch.setattr(fault_proxy, "_flip", lambda data, seed, one=dropped: _drop_part(data, one))
            with monkeypatch.context() as patch:
                patch.setenv("AWS_ENDPOINT_URL", proxy.url)
                with pytest.raises(CorruptError, match="is not the object") as caught:
                    gather_checkpoint(states, out, max_shard_size=FILE_NBYTES)
            refused.append(caught.value.file)
            assert read_model(small_server.read_all(small_bucket.name), f"one-{dropped}") is None
            gather_checkpoint(states, out, max_shard_size=FILE_NBYTES)
            assert read_model(small_server.read_all(small_bucket.name), f"one-{dropped}") == expected
    assert len(refused) == 3
    assert small_server.list_uploads(small_bucket.name) == []


def _drop_part(body: bytes, number: int) -> bytes:
    return body.replace(b"<Part><PartNumber>%d<" % number, b"<Qart><PartNumber>%d<" % number)
