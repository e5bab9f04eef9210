"""--overwrite in a store: a reader that follows the index finds the old model or the new one at every moment."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

import xrank
from tests.sampled import sampled
from tests.storage.fault_proxy import FaultKind
from tests.storage.histories import speed_up
from tests.storage.servers import Bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from tests.storage.written import leave_states, read_folder
from xrank.engine.windows import WINDOW_NBYTES
from xrank.errors import IncompleteError, OutputExistsError, UsageError, XrankError
from xrank.storage import bucket_stage

PART_NBYTES = WINDOW_NBYTES
FILE_NBYTES = "3300KB"
"""Two files of three parts and a rest each, and a small one; parts are whole windows, as always."""
Tensors = dict[str, bytes]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("replacing")
    return leave_states(folder / "old", rows=416), leave_states(folder / "new", seed=1, rows=416)


@pytest.fixture(autouse=True)
def small_parts(small_server: SmallS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_stage, "part_nbytes_for", lambda nbytes: PART_NBYTES)
    monkeypatch.setattr(small_server, "smallest_part_nbytes", PART_NBYTES)


def gather(source: Path, out: str, **options: Any) -> Any:
    return xrank.gather_checkpoint(source, out, **{"max_shard_size": FILE_NBYTES, **options})


def read_tensors(objects: dict[str, bytes], prefix: str = "one") -> Tensors:
    """Return what a reader finds who follows the index, or the only weights file."""
    index = objects.get(f"{prefix}/model.safetensors.index.json")
    names = {"model.safetensors"} if index is None else {*json.loads(index)["weight_map"].values()}
    found = [load(objects[f"{prefix}/{name}"]) for name in names]
    return {name: tensor.numpy().tobytes() for one in found for name, tensor in one.items()}


def read_source(source: Path, folder: Path) -> Tensors:
    xrank.gather_checkpoint(source, folder / "model")
    return read_tensors({f"one/{name}": data for name, data in read_folder(folder / "model").items()})


@pytest.mark.parametrize("size", sampled([FILE_NBYTES, "1GB"], 2))
def test_a_reader_sees_old_or_new(
    sources: tuple[Path, Path],
    small_bucket: Bucket,
    small_server: SmallS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: str,
) -> None:
    out = f"{small_bucket.url}/one"
    gather(sources[0], out, max_shard_size=size)
    old, new = read_tensors(small_server.read_all(small_bucket.name)), read_source(sources[1], tmp_path)
    seen: list[Tensors] = []

    def look(number: int, method: str, path: str) -> None:
        seen.append(read_tensors(small_server.read_all(small_bucket.name)))

    with open_proxy(small_bucket.server, look) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        gather(sources[1], out, max_shard_size=size, overwrite=True)
    left = small_server.read_all(small_bucket.name)
    assert read_tensors(left) == new != old
    changes = [one for one, before in zip(seen[1:], seen, strict=False) if one != before]
    assert seen[0] == old and changes == [new]
    assert len(left) == (6 if size == FILE_NBYTES else 3)  # nothing of the old model, and no journal
    assert xrank.verify_model(out).ok
    gather(sources[0], out, max_shard_size=size, overwrite=True)
    assert read_tensors(small_server.read_all(small_bucket.name)) == old
    assert len(small_server.read_all(small_bucket.name)) == len(left)


def test_an_overwrite_that_fails_at_any_request(
    sources: tuple[Path, Path],
    small_bucket: Bucket,
    small_server: SmallS3,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    soak: bool,
) -> None:
    """The store refuses each request in turn, and all after it, as to a killed process."""
    new = read_source(sources[1], tmp_path)
    ends = {"refused": 0, "made": 0}
    with open_proxy(small_bucket.server) as proxy:
        for point in range(1, 100, 1 if soak else 11):
            out, prefix = f"{small_bucket.url}/{point}", str(point)
            gather(sources[0], out)
            old = read_tensors(small_server.read_all(small_bucket.name), prefix)

            def choose(number: int, method: str, path: str, first: int = point) -> FaultKind | None:
                return "forbidden" if number >= first else None

            proxy.restart(choose)
            with monkeypatch.context() as patch:
                speed_up(patch)
                patch.setenv("AWS_ENDPOINT_URL", proxy.url)
                try:
                    gather(sources[1], out, overwrite=True)
                    ends["made"] += 1
                except XrankError:
                    ends["refused"] += 1
            assert read_tensors(small_server.read_all(small_bucket.name), prefix) in (old, new), f"request {point}"
            if point % 2:
                xrank.clean(out)
                assert read_tensors(small_server.read_all(small_bucket.name), prefix) in (old, new), f"request {point}"
            with contextlib.suppress(OutputExistsError):
                gather(sources[1], out)  # which ends what has begun, or finds the old model
                assert read_tensors(small_server.read_all(small_bucket.name), prefix) == new, f"request {point}"
            gather(sources[1], out, overwrite=True)
            left = small_server.read_all(small_bucket.name)
            assert read_tensors(left, prefix) == new and len(left) == 6, f"request {point}"
            assert xrank.verify_model(out).ok
            small_server.forget(small_bucket.name)
    assert ends["refused"], ends


def test_refuses_what_a_store_cannot_replace(
    sources: tuple[Path, Path], small_bucket: Bucket, small_server: SmallS3
) -> None:
    out = f"{small_bucket.url}/one"
    small_bucket.put("one/other", b"a user's")
    with pytest.raises(OutputExistsError, match="no model that xrank wrote"):
        gather(sources[1], out, overwrite=True)
    small_server.forget(small_bucket.name)
    gather(sources[0], out)
    before = small_server.read_all(small_bucket.name)
    with pytest.raises(UsageError, match=r"readers open model\.safetensors\.index\.json first"):
        gather(sources[1], out, max_shard_size="1GB", overwrite=True)
    assert read_tensors(small_server.read_all(small_bucket.name)) == read_tensors(before)
    assert xrank.clean(out).details["num_removed"] >= 1
    assert small_server.read_all(small_bucket.name) == before
    small_bucket.put("one/config.json", b"{}")
    with pytest.raises(UsageError, match=r"its config\.json differs"):
        gather(sources[1], out, overwrite=True)
    assert not small_server.list_uploads(small_bucket.name)


def test_another_gather_was_faster(
    sources: tuple[Path, Path], small_bucket: Bucket, small_server: SmallS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"{small_bucket.url}/one"
    gather(sources[0], out)
    index = "one/model.safetensors.index.json"

    def replace_index(number: int, method: str, path: str) -> None:
        if method == "PUT" and path.endswith(index):
            small_bucket.put(index, b"another's")

    with open_proxy(small_bucket.server, replace_index) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(OutputExistsError, match="another program wrote it"):
            gather(sources[1], out, overwrite=True)
    assert small_server.read_all(small_bucket.name)[index] == b"another's"


def test_verify_between_index_and_manifest(
    sources: tuple[Path, Path], small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"{small_bucket.url}/one"
    gather(sources[0], out)

    def choose(number: int, method: str, path: str) -> FaultKind | None:
        return "forbidden" if method == "PUT" and path.endswith("xrank_manifest.json") else None

    with open_proxy(small_bucket.server, choose) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(UsageError, match="may not be written"):
            gather(sources[1], out, overwrite=True)
    report = xrank.verify_model(out)
    assert (report.exit_code, type(report.fault)) == (3, IncompleteError)
    assert "is replacing the model" in str(report.fault)
    gather(sources[1], out, overwrite=True)
    assert xrank.verify_model(out).ok
