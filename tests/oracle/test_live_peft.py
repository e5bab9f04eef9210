"""PEFT's own models, exported while they live: merged they say what the adapted one says, apart PEFT loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

import xrank
from tests.commands.exported import llama
from tests.oracle.test_peft import moe
from xrank.recipes.options import AdapterChoice

# PEFT asks transformers under a name that this is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TOKENS = torch.arange(9)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


@pytest.mark.parametrize("kind", [None, "merge"])
def test_a_live_adapter(tmp_path: Path, kind: AdapterChoice | None) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = get_peft_model(llama(), config)
    report = xrank.export_model(model, tmp_path / "out", adapter=kind)
    assert report.ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if kind is None:
        loaded = PeftModel.from_pretrained(loaded, tmp_path / "out" / "adapter")
        assert torch.equal(logits(loaded), logits(model))
    else:
        torch.testing.assert_close(logits(loaded), logits(model))


@pytest.mark.parametrize("kind", ["separate", "merge"])
def test_a_live_adapter_of_fused_experts(tmp_path: Path, kind: AdapterChoice) -> None:
    torch.manual_seed(0)
    model = get_peft_model(
        moe("qwen3"),
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj"],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
            init_lora_weights=False,
        ),
    )
    assert xrank.export_model(model, tmp_path / "out", adapter=kind).ok
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if kind == "separate":
        loaded = PeftModel.from_pretrained(loaded, tmp_path / "out" / "adapter")
    torch.testing.assert_close(logits(loaded), logits(model), atol=1e-4, rtol=1e-4)
