"""DeepSpeed's reader under the contract of all readers: ZeRO 2 and 3, universal, pipelines, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from tests.readers.made_zero import MadeModel, Zero, write_universal, write_zero
from tests.readers.made_zero_parts import made_experts, made_pipeline, write_experts, write_pipeline
from xrank.readers.deepspeed.reader import DeepSpeedReader
from xrank.testing.reader_contract import ReaderContract, SampleSource, whole


def small_model() -> MadeModel:
    """One of each kind of tensor: the contract tries every fault on every file."""
    random = torch.Generator().manual_seed(0)
    return MadeModel(
        [{"embed.weight": torch.rand(5, 3, generator=random)}, {"bias": torch.rand(3, generator=random)}],
        frozen={"frozen.weight": torch.rand(5, 4, generator=random).bfloat16()},
        buffers={"mean": torch.rand(3, generator=random)},
        shared={"head.weight": "embed.weight"},
    )


class _Contract(ReaderContract):
    reader = DeepSpeedReader()
    frameworks = ("torch", "deepspeed")
    # A tag cut short names another folder, which may be on its way.
    exit_codes: ClassVar = {"a file cut short": frozenset({3, 4})}
    how: ClassVar[Zero]

    def make(self, folder: Path) -> SampleSource:
        model = small_model()
        write_zero(folder / "checkpoint", model, self.how)
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in model.expected.items()})


@pytest.mark.quick
class TestZero3(_Contract):
    how = Zero(stage=3, num_ranks=2)


class TestZero2(_Contract):
    how = Zero(stage=2, num_ranks=2)


class TestUniversal(_Contract):
    how = Zero(stage=3, num_ranks=2)

    def make(self, folder: Path) -> SampleSource:
        model = small_model()
        write_universal(folder / "checkpoint", model, self.how)
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in model.expected.items()})


class TestPipeline(_Contract):
    how = Zero(stage=1, num_ranks=2)
    unseen: ClassVar = {
        "a file missing": "nothing records a layer without trained parameters and buffers; a note lists such numbers"
    }

    def make(self, folder: Path) -> SampleSource:
        model = made_pipeline()
        write_pipeline(folder / "checkpoint", model, self.how)
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in model.expected.items()})


class TestExperts(_Contract):
    how = Zero(stage=2, num_ranks=4)

    def make(self, folder: Path) -> SampleSource:
        model = made_experts()
        write_experts(folder / "checkpoint", model, self.how)
        return SampleSource(folder / "checkpoint", {name: whole(tensor) for name, tensor in model.expected.items()})
