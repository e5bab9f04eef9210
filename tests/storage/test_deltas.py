"""Versions in a store: read there, applied to models there, by runs that are stopped at any request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import xrank
from tests.readers.made_deltas import Model, change_model, make_model, read_folder, write_delta, write_whole
from tests.storage.fault_proxy import FaultKind, FaultProxy
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


def _run_killed(work: Callable[[], object], proxy: FaultProxy, point: int, when: Literal["before", "after"]) -> None:
    """Run the work in a child, which is killed before or after the store answers one of its requests."""
    pids: list[int] = []
    proxy.restart()
    proxy.kill(lambda: pids[0], point, when)
    pids.append(os.fork())
    if pids[0] == 0:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url
        with suppress(BaseException):
            work()
        os._exit(0)
    os.waitpid(pids[0], 0)


def _run_refused(work: Callable[[], object], proxy: FaultProxy, point: int) -> None:
    """Run the work while the store refuses all requests from one of them on."""

    def choose(number: int, method: str, path: str) -> FaultKind | None:
        return "forbidden" if number >= point else None

    proxy.restart(choose)
    with pytest.MonkeyPatch.context() as patch, suppress(XrankError):
        speed_up(patch)
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        work()


@pytest.mark.parametrize("work", ["apply", "make"])
@pytest.mark.parametrize("way", ["before", "after", "refused"])
@pytest.mark.timeout(900)
def test_a_run_that_ends_at_any_request(
    work: str, way: Any, small_bucket: Bucket, small_server: SmallS3, tmp_path: Path, soak: bool
) -> None:
    """It is killed, or the store refuses all that it asks: old or new is there, or neither; the next call heals."""
    models = make_chain(tmp_path)
    write_whole(tmp_path / "old", change_model(models[1], np.random.default_rng(5)))
    write_whole(tmp_path / "new", models[1])

    def call(out: str, *, is_old: bool = False) -> None:
        if work == "apply":
            version = 1 if is_old else None
            xrank.apply_deltas(tmp_path / "base", tmp_path / "deltas", out, version=version, max_shard_size="2KB")
        else:
            new = tmp_path / ("old" if is_old else "new")
            options: dict[str, Any] = {"max_shard_size": "1KB", "overwrite": has_old}
            xrank.make_delta(tmp_path / "base", new, f"{out}/weight_v000001", **options)

    def find(prefix: str) -> Model | None:
        name = prefix if work == "apply" else f"{prefix}/weight_v000001"
        return read_model(small_server.read_all(small_bucket.name), name, tmp_path / "found")

    has_old = False
    known: list[Model | None] = [None]
    for is_old in (True, False):
        call(f"{small_bucket.url}/{is_old}", is_old=is_old)
        known.append(find(str(is_old)))
    seen = dict.fromkeys(range(3), 0)
    with open_proxy(small_bucket.server) as proxy:
        for point in range(1, 100, 1 if soak else 33):
            for has_old in (False, True):
                prefix = f"{point}-{has_old}"
                out = f"{small_bucket.url}/{prefix}"
                if has_old:
                    call(out, is_old=True)
                run = partial(call, out)
                if way == "refused":
                    _run_refused(run, proxy, point)
                else:
                    _run_killed(run, proxy, point, way)
                found = find(prefix)
                assert found in (known[1 if has_old else 0], known[2]), f"request {point}"
                seen[known.index(found)] += 1
                call(out)
                assert find(prefix) == known[2], f"request {point}"
                small_server.forget(small_bucket.name)
    assert all(seen.values()), seen


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
