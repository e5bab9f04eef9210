"""Models in the memory of several ranks, exported straight into a bucket."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.storage.servers import Bucket
from tests.storage.written import read_folder
from xrank.commands.export import export_model
from xrank.errors import RankFailedError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout


def quantize(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.float16), f"{name}.scale": tensor.abs().amax().reshape(1)}


def make_part(rank: int) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    """Return a rank's rows of two matrices of 12 MB, and a vector that all ranks hold."""
    generator = torch.Generator().manual_seed(3)
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    layouts["norm.weight"] = TensorLayout.parse("[cols]")
    part = {"norm.weight": torch.ones(2000)}
    for name in ("a.weight", "b.weight"):
        layouts[name] = TensorLayout.parse("[rows/tp, cols]")
        part[name] = torch.randn(1500, 2000, generator=generator).chunk(2)[rank]
    return part, layouts


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["plain", "transform", "quantize", "background"])
def test_ranks_export_what_they_export_to_a_folder(rank: int, small_bucket: Bucket, tmp_path: Path, way: str) -> None:
    part, layouts = make_part(rank)
    options = {"layouts": layouts, "max_shard_size": "10MB", "config_overrides": {"model_type": "llama"}}
    options |= {"transform": quantize} if way == "transform" else {}
    options |= {"quantize": "FP8_BLOCK"} if way == "quantize" else {}
    with patch.dict(os.environ, small_bucket.environment()):
        url = f"{small_bucket.url}/models/live"
        if way == "background":
            report = export_model(part, url, background=True, **options).result(timeout=40)
        else:
            report = export_model(part, url, **options)
    export_model(part, tmp_path / "model", **options)
    if rank == 0:
        expected = read_folder(tmp_path / "model")
        made = {key.removeprefix("models/live/"): data for key, data in small_bucket.read_all().items()}
        assert made.keys() == expected.keys()
        assert [name for name in made if made[name] != expected[name]] == []
        assert small_bucket.list_uploads() == []
    assert report.traffic is not None
    nbytes = sum(file["nbytes"] for file in report.output["files"])
    assert nbytes < report.traffic["written_nbytes"] < nbytes + 100_000


@pytest.mark.ranks(2)
def test_a_rank_that_raises_leaves_nothing_visible(rank: int, small_bucket: Bucket) -> None:
    part, layouts = make_part(rank)

    def fail(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name == "b.weight" and tensor.device.type == "cpu":
            raise RuntimeError("a transform's own")
        return {name: tensor + 0}

    with patch.dict(os.environ, small_bucket.environment()):
        with pytest.raises((RuntimeError, RankFailedError), match="a transform's own"):
            export_model(part, f"{small_bucket.url}/models/live", layouts=layouts, transform=fail)
        torch.distributed.barrier()
        assert not small_bucket.read_all("models/live/")


@pytest.mark.ranks(2)
def test_ranks_with_another_url_are_named(rank: int, small_bucket: Bucket) -> None:
    part, layouts = make_part(rank)
    with patch.dict(os.environ, small_bucket.environment()), pytest.raises(UsageError, match="rank 1 has out s3://"):
        export_model(part, f"{small_bucket.url}/models/{rank}", layouts=layouts)
