"""Workspaces in a bucket: states of ranks as objects."""

from __future__ import annotations

import itertools
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from botocore.httpsession import URLLib3Session

from tests.storage.servers import Bucket, make_bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from xrank.commands.gather import gather_checkpoint
from xrank.errors import RankFailedError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.testing.rank_pool import RankPool
from xrank.testing.workspace_contract import MakeWorkspace, WorkspaceContract
from xrank.workspace.nfs import NFSWorkspace
from xrank.workspace.objects import ObjectWorkspace

_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_bucket(request: pytest.FixtureRequest, small_server: SmallS3) -> Bucket:
    """A bucket for all tests of the contracts, which takes less time than one for each."""
    is_moto = getattr(request, "param", "small") == "moto"
    return make_bucket(request.getfixturevalue("moto_server") if is_moto else small_server.url)


@pytest.fixture
def place(shared_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place; this process's environment leads to it."""
    for name, value in shared_bucket.environment().items():
        monkeypatch.setenv(name, value)
    return f"{shared_bucket.url}/run-{next(_numbers)}/states"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "shared_bucket" in metafunc.fixturenames and metafunc.config.getoption("soak"):
        metafunc.parametrize("shared_bucket", ["small", "moto"], indirect=True, scope="module")
    if "point" in metafunc.fixturenames:
        points = [(n, when) for n in range(1, 6) for when in ("before", "after")]
        chosen = points if metafunc.config.getoption("soak") else [(3, "after"), (5, "before"), (5, "after")]
        metafunc.parametrize(("point", "when"), chosen)


class TestStates(WorkspaceContract):
    @pytest.fixture
    def make_workspace(self, place: str) -> MakeWorkspace:
        def make(rank: int = 0, world_size: int = 1, run_id: str | None = "run") -> ObjectWorkspace:
            return ObjectWorkspace(place, rank=rank, world_size=world_size, run_id=run_id)

        return make

    @pytest.fixture
    def uninitialized(self) -> ObjectWorkspace:
        return ObjectWorkspace()


def write_twice(place: str, environment: dict[str, str], point: int, when: str) -> None:
    """Write two states as rank 1; die at a request of the second one."""
    connection_send, sent = URLLib3Session.send, itertools.count(1)

    def send(connection: URLLib3Session, *arguments: Any) -> Any:
        is_last = next(sent) == point
        if is_last and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = connection_send(connection, *arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    with patch.dict(os.environ, environment):
        workspace = ObjectWorkspace(place, rank=1, world_size=2, run_id="run")
        write(workspace, 1)
        with patch.object(URLLib3Session, "send", send):
            write(workspace, 2)


def write(workspace: ObjectWorkspace, value: int) -> None:
    """Write a state of two whole parts and a rest."""
    workspace.write_configs_and_weights({"value": value}, {"a": torch.full((3_000_000,), float(value))})


def test_a_killed_write_leaves_the_old_state_or_the_new_one(
    place: str, shared_bucket: Bucket, rank_pool: RankPool, point: int, when: str
) -> None:
    with pytest.raises(RankFailedError):
        rank_pool.run(1, write_twice, place, shared_bucket.environment(), point, when)
    config, weights = ObjectWorkspace(place, rank=0, world_size=2, run_id="run").read_configs_and_weights_from_rank(1)
    assert config is not None
    assert weights is not None
    # Requests: the upload, three parts in any order, its completion.
    assert config["value"] == (2 if (point, when) == (5, "after") else 1)
    assert torch.equal(weights["a"], torch.full((3_000_000,), float(config["value"])))
    prefix = place.removeprefix(f"{shared_bucket.url}/")
    assert [key for key in shared_bucket.list_uploads() if key.startswith(prefix)] == (
        [] if (point, when) in ((1, "before"), (5, "after")) else [f"{prefix}/rank_1_state.pth"]
    )
    again = ObjectWorkspace(place, rank=1, world_size=2, run_id="run")
    assert not [key for key in shared_bucket.list_uploads() if key.startswith(prefix)]
    assert again.read_configs_and_weights_from_rank(1)[0] == config


def test_a_reader_sees_whole_states_while_they_are_written(place: str) -> None:
    writer, reader = (ObjectWorkspace(place, rank=rank, world_size=2, run_id="run") for rank in range(2))
    write(writer, 0)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [write(writer, value) for value in range(1, 4)])
        seen = []
        while not writing.done():
            config, weights = reader.read_configs_and_weights_from_rank(0)
            assert config is not None
            assert weights is not None
            assert weights["a"].unique().tolist() == [config["value"]]
            seen.append(config["value"])
        writing.result()
    assert seen == sorted(seen)


def test_gather_reads_the_states(place: str, tmp_path: Path) -> None:
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["a"] = TensorLayout.parse("[rows/tp, cols]")
    whole = torch.randn(600, 2000)
    for rank in range(2):
        for workspace in (
            ObjectWorkspace(place, rank=rank, world_size=2, run_id="run"),
            NFSWorkspace(tmp_path / "states", rank=rank, world_size=2, run_id="run"),
        ):
            weights = {"a": whole.chunk(2)[rank]}
            workspace.write_configs_and_weights({"model_type": "llama"}, weights, layouts=layouts, step=3)
    assert gather_checkpoint(place, tmp_path / "model", workspace=True).source["step"] == 3
    gather_checkpoint(tmp_path / "states", tmp_path / "expected", workspace=True)
    names = ("model.safetensors", "config.json")
    assert all((tmp_path / "model" / n).read_bytes() == (tmp_path / "expected" / n).read_bytes() for n in names)


@pytest.mark.parametrize("method", ["PUT", "HEAD"])
def test_errors_name_the_object_and_the_rank(
    place: str, shared_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    workspace = ObjectWorkspace(place, rank=1, world_size=2, run_id="run")
    write(workspace, 1)
    with open_proxy(shared_bucket.server, lambda _, sent, path: "forbidden" if sent == method else None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(UsageError) as caught:
            if method == "PUT":
                write(workspace, 2)
            else:
                ObjectWorkspace(place, rank=0, world_size=2, run_id="run")
    rank = 1 if method == "PUT" else 0
    assert caught.value.rank == rank
    assert str(caught.value).startswith(f"rank {rank}: {place}/rank_{rank}_state.pth may not be ")
    assert not shared_bucket.list_uploads()


@pytest.mark.parametrize("url", ["gs://bucket", "s3://bucket", "https://host/run"])
def test_other_places_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"workspace is in S3|whole bucket"):
        ObjectWorkspace(url)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_store_that_cannot_be_opened_is_named_by_the_given_url(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "GOOGLE_BASE_URL"):
        monkeypatch.setenv(name, "http://192.0.2.1")
    with pytest.raises(UsageError, match=rf"^rank 0: {scheme}://bucket/run would be reached over plain http") as caught:
        ObjectWorkspace(f"{scheme}://bucket/run", rank=0, world_size=1)
    assert caught.value.file == f"{scheme}://bucket/run"


def test_a_directory_s_workspace_names_the_one_for_stores(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        NFSWorkspace("s3://bucket/run")
    assert "ObjectWorkspace('s3://bucket/run')" in (caught.value.next_step or "")
