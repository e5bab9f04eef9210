"""Torch DCP checkpoints, written by torch on four ranks: gathered bit for bit, damaged, and of every nesting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch.distributed.checkpoint.filesystem import SerializationFormat

from tests.readers.dcp_checkpoints import CUTS, expected, saved
from xrank.conversion.gather import gather_checkpoint
from xrank.readers.dcp import DcpReader
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import Made, ReaderContract, read_model


class DcpContract(ReaderContract):
    reader = DcpReader()
    cut = "fsdp2"
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def made(cls, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
        folder = tmp_path_factory.mktemp("dcp")
        yield Made(saved(rank_pool, folder / "checkpoint-20", cls.cut, **cls.options), expected())


class TestFsdp(DcpContract):
    options: ClassVar = {"nesting": "trainer"}


class TestFsdpTensorParallel(DcpContract):
    cut = "fsdp2 x tp"
    options: ClassVar = {"thread_count": 2, "nesting": "flat"}


class TestSafetensorsPayload(DcpContract):
    options: ClassVar = {"serialization_format": SerializationFormat.SAFETENSORS, "nesting": "trainer"}


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut(rank_pool: RankPool, tmp_path: Path, cut: str) -> None:
    saved(rank_pool, tmp_path / "checkpoint", cut)
    gather_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert read_model(tmp_path / "out") == expected()
