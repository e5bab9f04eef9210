"""Versions in a store: read there, applied to models there, by runs that are stopped at any request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import xrank
from tests.readers.made_deltas import Model, change_model, make_model, read_folder, write_delta, write_whole
from tests.storage.fault_proxy import FaultKind
from tests.storage.histories import speed_up
from tests.storage.servers import Bucket, open_proxy
from tests.storage.small_s3 import SmallS3
from xrank.errors import XrankError


def make_chain(folder: Path, most: int = 40) -> list[Model]:
    """Write a base and two versions; return the three models."""
    generator = np.random.default_rng(11)
    models = [make_model(generator, ["BF16", "F32"], most)]
    write_whole(folder / "base", models[0])
    for version in (1, 2):
        models.append(change_model(models[-1], generator))
        write_delta(folder / "deltas", models[-2], models[-1], version)
    return models


def read_model(objects: dict[str, bytes], prefix: str, folder: Path) -> Model | None:
    """Return what a reader finds who follows the index; None without one."""
    index = objects.get(f"{prefix}/model.safetensors.index.json")
    if index is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name in {*json.loads(index)["weight_map"].values()}:
        (folder / name).write_bytes(objects[f"{prefix}/{name}"])
    return read_folder(folder)


def test_versions_in_a_bucket(small_bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The base, too; each byte is fetched about once, and the base once more for the state that a version records."""
    models = make_chain(tmp_path, 1000)
    for name in ("base", "deltas/weight_v000001", "deltas/weight_v000002"):
        small_bucket.put_folder(tmp_path / name, name)
    base, deltas = f"{small_bucket.url}/base", f"{small_bucket.url}/deltas"
    with open_proxy(small_bucket.server) as proxy, monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        report = xrank.apply_deltas(base, deltas, tmp_path / "engine")
        fetched_nbytes = sum(request.answered_nbytes for request in proxy.requests)
    assert report.details.version == 2 and read_folder(tmp_path / "engine") == models[2]
    nbytes = sum(path.stat().st_size for path in tmp_path.glob("[bd]*/**/*.safetensors"))
    assert nbytes > 8 << 20 and fetched_nbytes < 2.2 * nbytes
    xrank.gather_checkpoint(deltas, tmp_path / "out", base_model=base)
    assert read_folder(tmp_path / "out") == models[2]
    xrank.verify_deltas(base, deltas)
    out = f"{small_bucket.url}/engine"
    for version in (1, 2):
        xrank.apply_deltas(base, deltas, out, version=version, max_shard_size="2MB")
        assert read_model(small_bucket.read_all("engine"), "engine", tmp_path / "found") == models[version]
        assert xrank.verify_model(out).ok
    assert xrank.apply_deltas(base, deltas, out).output is None


def test_a_receiver_that_is_stopped_at_any_request(
    small_bucket: Bucket, small_server: SmallS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, soak: bool
) -> None:
    """The store refuses each request in turn, and all after it, as to a killed process; the next call heals."""
    models = make_chain(tmp_path)
    base, deltas = tmp_path / "base", tmp_path / "deltas"
    outcomes = {"refused": 0, "made": 0}
    with open_proxy(small_bucket.server) as proxy:
        for point in range(1, 120, 1 if soak else 13):
            for has_old in (False, True):
                prefix = f"{point}-{has_old}"
                out = f"{small_bucket.url}/{prefix}"
                if has_old:
                    xrank.apply_deltas(base, deltas, out, version=1, max_shard_size="2KB")

                def choose(number: int, method: str, path: str, first: int = point) -> FaultKind | None:
                    return "forbidden" if number >= first else None

                proxy.restart(choose)
                with monkeypatch.context() as patch:
                    speed_up(patch)
                    patch.setenv("AWS_ENDPOINT_URL", proxy.url)
                    try:
                        xrank.apply_deltas(base, deltas, out, max_shard_size="2KB")
                        outcomes["made"] += 1
                    except XrankError:
                        outcomes["refused"] += 1
                allowed = (models[1] if has_old else None, models[2])
                found = read_model(small_server.read_all(small_bucket.name), prefix, tmp_path / "found")
                assert found in allowed, f"request {point}"
                xrank.apply_deltas(base, deltas, out, max_shard_size="2KB")
                found = read_model(small_server.read_all(small_bucket.name), prefix, tmp_path / "found")
                assert found == models[2] and xrank.verify_model(out).ok, f"request {point}"
                small_server.forget(small_bucket.name)
    assert all(outcomes.values()), outcomes


def test_versions_that_no_reader_needs(small_bucket: Bucket, tmp_path: Path) -> None:
    """They go from a bucket as from a disk."""
    models = make_chain(tmp_path)
    write_whole(tmp_path / "deltas" / "weight_v000003", models[1], 3)
    for path in (tmp_path / "deltas").iterdir():
        (path / "xrank_manifest.json").write_text("{}")
        small_bucket.put_folder(path, f"deltas/{path.name}")
    report = xrank.clean(f"{small_bucket.url}/deltas")
    assert report.details["num_removed"] == 2
    assert {key.split("/")[1] for key in small_bucket.read_all("deltas")} == {"weight_v000003"}
