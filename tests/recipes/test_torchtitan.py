"""Trained tensors that Hugging Face's model has no place for are left out by name."""

from pathlib import Path

import pytest
import torch

from tests.recipes.made_checkpoints import leave
from tests.recipes.made_torchtitan import torchtitan_forms
from xrank import gather_checkpoint

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(("family", "is_dropped"), [("qwen3-moe", True), ("deepseek-v3", False)])
def test_router_biases_without_a_place_are_named(tmp_path: Path, family: str, is_dropped: bool) -> None:
    config, _, tensors = next(torchtitan_forms(family))
    routed = sorted(name.removesuffix("router.gate.weight") for name in tensors if name.endswith("router.gate.weight"))
    num_experts = tensors[f"{routed[0]}router.gate.weight"].shape[0]
    beside = {f"{layer}tokens_per_expert": torch.zeros(num_experts) for layer in routed}
    beside |= {f"{layer}expert_bias": torch.ones(num_experts) for layer in routed}
    notes = dict(gather_checkpoint(leave(tmp_path / "src", {**tensors, **beside}, config), tmp_path / "out").notes)
    assert (
        notes["ignored"] == f"{', '.join(f'{layer}tokens_per_expert' for layer in routed)}: left out, because they "
        "are not part of the model"
    )
    assert ("dropped" in notes) == is_dropped
    if is_dropped:
        biases = ", ".join(f"{layer}expert_bias" for layer in routed)
        assert notes["dropped"].startswith(
            f"{biases}: left out, although they were trained, because a model of qwen3_moe"
        )
