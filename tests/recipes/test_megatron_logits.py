"""A model of Megatron-core's own names and forward pass says the same after a gather, in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.recipes.made_checkpoints import leave
from tests.recipes.megatron_weights import (
    DEEPSEEK_SIZES,
    GLM_SIZES,
    GPT2_SIZES,
    QWEN2_MOE_SIZES,
    SIZES,
    TOKENS,
    recorded,
    weights,
)
from xrank import gather_checkpoint

pytestmark = pytest.mark.timeout(120)

_LITE = {**DEEPSEEK_SIZES, "q_lora_rank": None}
_SIZES = {
    "gpt2": GPT2_SIZES,
    "qwen2_moe": QWEN2_MOE_SIZES,
    "deepseek_v3": DEEPSEEK_SIZES,
    "deepseek_v2": DEEPSEEK_SIZES,
    "deepseek_v2_lite": _LITE,
    "glm4_moe": GLM_SIZES,
}


@pytest.mark.parametrize("family", recorded())
def test_logits_are_megatrons(tmp_path: Path, family: str) -> None:
    import transformers

    said = recorded()[family]
    tensors = {name: torch.from_numpy(array) for name, array in weights(said["shapes"]).items()}
    sizes = _SIZES.get(family, SIZES)
    if family == "qwen2":
        sizes = {key: size for key, size in sizes.items() if key != "head_dim"}
    config = transformers.AutoConfig.for_model(family.removesuffix("_lite"), bos_token_id=1, eos_token_id=2, **sizes)
    source = leave(tmp_path / "ws", tensors, json.loads(config.to_json_string(use_diff=False)))
    assert gather_checkpoint(source, tmp_path / "out").source["recipe"] == f"megatron-{family.replace('_', '-')}"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, -1]
    assert max(map(abs, said["logits"])) > 0.5
    assert logits.tolist() == pytest.approx(said["logits"], abs=1e-4)
