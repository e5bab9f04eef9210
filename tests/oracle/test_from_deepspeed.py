"""The page on DeepSpeed: its program trains, and its commands make what PEFT makes of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.page_blocks import find_block, run_commands, run_program

PAGE = "from-deepspeed.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]


def load(folder: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_a_checkpoint_with_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    model.bfloat16().save_pretrained("base")
    alone = 'engine.save_checkpoint("alone", exclude_frozen_parameters=True)\n'
    program = find_block(PAGE, "import deepspeed").replace("if dist.get_rank()", f"{alone}if dist.get_rank()")
    run_program(tmp_path, program, num_ranks=2)
    commands = find_block(PAGE, "--out apart", "sh")
    run_commands(tmp_path, commands)
    run_commands(tmp_path, find_block(PAGE, "ds_to_universal", "sh"))

    merged = load("merged").state_dict()
    by_peft = PeftModel.from_pretrained(load("apart"), "apart/adapter").merge_and_unload().state_dict()
    changed = [name for name, tensor in load("base").state_dict().items() if not tensor.equal(merged[name])]
    assert len(changed) == 14
    for name, tensor in by_peft.items():
        torch.testing.assert_close(merged[name], tensor, atol=2e-3, rtol=0)  # "apart" was rounded to bf16
    assert_same("model", "merged")

    run_commands(tmp_path, "cp checkpoint/adapter_config.json alone; rm -r apart; mv merged first")
    run_commands(tmp_path, commands.replace("checkpoint", "alone"))
    assert sorted(path.name for path in Path("apart").iterdir() if "adapter" in path.name) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert_same("first", "merged")


def assert_same(one: str, other: str) -> None:
    ours, theirs = (load_file(f"{folder}/model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)
