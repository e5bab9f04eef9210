"""Trainers that lend their weights in another form; `test_pairs` takes random ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import xrank
from tests.layout.test_layouts_through_files import facts
from xrank import Quantization
from xrank.errors import ContradictionError, RankFailedError, UsageError

pytestmark = pytest.mark.timeout(900)


def test_blocks_have_scales_of_their_own() -> None:
    weight = torch.tensor([[1.0, -4.0, 0.5], [2.0, 3.0, -8.0], [0.0, 0.0, 16.0]])
    made = Quantization("int8", (2, 2))("w", weight)
    assert made["w_scale_inv"].tolist() == (torch.tensor([[4.0, 8.0], [1e-10, 16.0]]) / 127).tolist()
    assert made["w"].tolist() == [[32, -127, 8], [64, 95, -127], [0, 0, 127]]
    made = Quantization("fp8")("w", weight)
    assert made["w_scale"].shape == () and made["w_scale"] == torch.tensor(16.0) / 448
    assert made["w"].float().mul(made["w_scale"]).allclose(weight, rtol=0.07)
    assert Quantization("fp8")("norm.weight", weight) == {"norm.weight": weight}


@pytest.mark.parametrize(
    ("held", "options", "error", "match"),
    [
        ({"w": torch.ones(2, 2)}, {"transform": Quantization(scale_suffix="")}, UsageError, "two tensors would have"),
        ({"w": torch.ones(2, 2), "w_scale": torch.ones(1)}, {"transform": Quantization()}, UsageError, "w_scale: two"),
        ({"w": torch.ones(2, 2)}, {"dtype": "int3"}, UsageError, "dtype"),
        ({"w": torch.ones(2, 2)}, {"transform": lambda name, tensor: 3}, UsageError, "transform of w returned int"),
    ],
)
def test_transforms_that_cannot_be_offered(tmp_path: Path, held: Any, options: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        xrank.offer_weights(held, tmp_path, **options)
    assert not (tmp_path / "trainer.json").exists()


def test_there_are_few_quantizations() -> None:
    for arguments in (("fp4",), ("fp8", "row"), ("int8", (0, 4)), ("int8", (4,))):
        with pytest.raises(UsageError, match="there is no quantization"):
            Quantization(*arguments)  # type: ignore[arg-type]


def test_values_that_are_not_finite_are_refused_and_the_next_step_is_right(tmp_path: Path) -> None:
    held, quantize = {"w": torch.randn(4, 4), "v": torch.randn(4, 4)}, Quantization("int8", "channel")
    target = {name: torch.zeros_like(one) for each in held.items() for name, one in quantize(*each).items()}
    with (
        xrank.offer_weights(held, tmp_path, transform=quantize, snapshot=True) as offer,
        xrank.take_weights(target, tmp_path) as weights,
    ):
        held["v"][2, 1] = float("nan")
        with pytest.raises(ContradictionError, match="v has values that are not finite"):
            offer.publish(1)
        with pytest.raises(RankFailedError, match="v has values that are not finite"):
            weights.update(timeout_seconds=5)
        assert weights.step is None and not target["w"].any()
        held["v"][2, 1] = 1
        offer.publish(2)
        assert weights.update(timeout_seconds=5).step == 2
    assert facts(target) == facts({name: one for each in held.items() for name, one in quantize(*each).items()})


def test_an_engine_without_scales_of_its_own_is_refused(tmp_path: Path) -> None:
    """fp8 does not become bf16: the scales would be lost."""
    target = {"w": torch.zeros(4, 4, dtype=torch.bfloat16)}
    with (
        xrank.offer_weights({"w": torch.ones(4, 4)}, tmp_path, transform=Quantization(), snapshot=True) as offer,
        xrank.take_weights(target, tmp_path) as weights,
    ):
        offer.publish(1)
        with pytest.raises(UsageError, match="w: F8_E4M3 in the source cannot be converted to BF16"):
            weights.update(timeout_seconds=5)
