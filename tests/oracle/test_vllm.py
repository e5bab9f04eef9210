"""The sharded_state of a real vLLM is gathered, and equals the model that the engine loaded.

vLLM asks for a torch of its own, so ``VLLM_PYTHON`` names an interpreter with it; without one the tests are left out.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from xrank.commands.gather import gather_checkpoint
from xrank.errors import UsageError

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="VLLM_PYTHON names no interpreter with vLLM"),
]

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 130,
    "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    "one head of keys": LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=False),
    "tied, with biases": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "heads of another size": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=False),
    "mistral": MistralConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
}

SEVERAL = ("llama", "tied, with biases", "mistral")


def saved(folder: Path, config: PretrainedConfig, tp_size: int, pp_size: int, *options: str) -> Path:
    """Return the folder of an engine's state; the model that it loaded lies beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "model")
    script = Path(__file__).with_name("save_vllm.py")
    sizes = [str(tp_size), str(pp_size)]
    command = [str(PYTHON), str(script), str(folder / "model"), str(folder / "state"), *sizes, *options]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=850)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return folder / "state"


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [*((name, 2, 1) for name in CONFIGS), *((name, *sizes) for name in SEVERAL for sizes in [(1, 1), (1, 2)])],
)
def test_a_state_is_the_model_that_was_loaded(tmp_path, name, tp_size, pp_size):
    """An engine takes one to three minutes to start, so that only some models have one rank, or two stages."""
    state = saved(tmp_path, CONFIGS[name], tp_size, pp_size, "keep")
    gather_checkpoint(state, tmp_path / "out")
    got, want = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "model"))
    assert sorted(got) == sorted(want)
    assert not [tensor for tensor in want if not torch.equal(got[tensor], want[tensor])]


def test_what_a_cpu_packs_is_refused(tmp_path):
    """An engine on a CPU saves no linear layer."""
    state = saved(tmp_path, CONFIGS["llama"], 1, 1)
    with pytest.raises(UsageError, match="no linear layer"):
        gather_checkpoint(state, tmp_path / "out")
