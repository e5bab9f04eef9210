"""Versions that are written into a bucket: the objects are the files that a folder would have."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import xrank
from tests.storage.servers import Bucket
from tests.storage.test_live_exports import make_part
from tests.storage.written import read_folder


def read_objects(bucket: Bucket, key: str) -> dict[str, bytes]:
    return {
        name.removeprefix(f"{key}/"): data for name, data in bucket.read_all().items() if name.startswith(f"{key}/")
    }


@pytest.mark.ranks(2)
def test_ranks_write_deltas_into_a_bucket(rank: int, small_bucket: Bucket, tmp_path: Path) -> None:
    part, layouts = make_part(rank)
    xrank.export_model(part, tmp_path / "weight_v000000", layouts=layouts)
    part["a.weight"][3, 1:2000:50] += 1
    options = {"layouts": layouts, "delta_from": tmp_path / "weight_v000000"}
    xrank.export_model(part, tmp_path / "weight_v000001", **options)
    with patch.dict(os.environ, small_bucket.environment()):
        report = xrank.export_model(part, f"{small_bucket.url}/deltas/weight_v000001", **options)
        unchanged = {"layouts": layouts, "delta_from": f"{small_bucket.url}/weight_v000000"}
        xrank.export_model(part, f"{small_bucket.url}/weight_v000000", layouts=layouts)
        again = xrank.export_model(part, f"{small_bucket.url}/weight_v000001", **unchanged)
    assert (report.details.num_changed, again.details.num_changed) == (1, 0)
    if rank == 0:
        assert read_objects(small_bucket, "deltas/weight_v000001") == read_folder(tmp_path / "weight_v000001")
        assert {*read_objects(small_bucket, "weight_v000001")} == {
            "model.safetensors.index.json",
            "xrank_manifest.json",
        }
        assert small_bucket.list_uploads() == []


@pytest.mark.ranks(2)
def test_an_offer_writes_its_steps_into_a_bucket(rank: int, small_bucket: Bucket, tmp_path: Path) -> None:
    part, layouts = make_part(rank)
    with patch.dict(os.environ, small_bucket.environment()):
        url = f"{small_bucket.url}/run"
        with xrank.offer_weights(part, tmp_path / "refit", layouts=layouts, deltas=url) as offer:
            for step in range(3):
                offer.publish(step)
                part["b.weight"][rank, step] += 1
        assert small_bucket.list_uploads() == []
        if rank == 0:
            xrank.gather_checkpoint(f"{url}/weight_v000002", tmp_path / "out")
    part["b.weight"][rank, 2] -= 1
    xrank.export_model(part, tmp_path / "want", layouts=layouts)
    if rank == 0:
        made, want = (read_folder(tmp_path / name)["model.safetensors"] for name in ("out", "want"))
        assert made == want


def test_a_delta_and_its_fold_of_objects(small_bucket: Bucket, tmp_path: Path) -> None:
    models = [{"a.weight": torch.randn(50, 40)}]
    with patch.dict(os.environ, small_bucket.environment()):
        urls = [f"{small_bucket.url}/model-{number}" for number in range(3)]
        for number, url in enumerate(urls):
            models.append({"a.weight": models[-1]["a.weight"].clone()})
            models[-1]["a.weight"][number] += 1
            xrank.save_model(models[number + 1], url)
            if number:
                xrank.make_delta(urls[number - 1], url, f"{small_bucket.url}/run/weight_v{number:06d}")
        xrank.fold_deltas(f"{small_bucket.url}/run", f"{small_bucket.url}/folded/weight_v000002")
        xrank.gather_checkpoint(f"{small_bucket.url}/folded/weight_v000002", tmp_path / "out", base_model=urls[0])
        xrank.gather_checkpoint(urls[2], tmp_path / "want")
    made, want = (read_folder(tmp_path / name)["model.safetensors"] for name in ("out", "want"))
    assert made == want
