"""LoRA on parameters of fused experts (PEFT's `target_parameters`): one wrapper around another in a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.bench import Bench
from tests.conversion.adapted_models import ALPHA, P, write_json
from tests.conversion.made_workspaces import assert_holds, leave
from xrank.conversion.gather import gather_checkpoint
from xrank.errors import ContradictionError

NUM_EXPERTS, RANK, HIDDEN, INNER = 3, 2, 8, 5
EXPERTS = "model.layers.0.mlp.experts"
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": [],
    "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
}


def base_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        f"{EXPERTS}.gate_up_proj": torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=made).to(dtype),
        f"{EXPERTS}.down_proj": torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=made).to(dtype),
        "model.norm.weight": torch.randn(HIDDEN, generator=made).to(dtype),
    }


def adapter() -> dict[str, torch.Tensor]:
    """Return the adapter as PEFT saves it: the parameter that the module registers first has the inner wrapper."""
    made = torch.Generator().manual_seed(1)
    rows = NUM_EXPERTS * RANK
    return {
        f"{P}{EXPERTS}.base_layer.lora_A.weight": torch.randn(rows, HIDDEN, generator=made),
        f"{P}{EXPERTS}.base_layer.lora_B.weight": torch.randn(2 * INNER, rows, generator=made),
        f"{P}{EXPERTS}.lora_A.weight": torch.randn(rows, INNER, generator=made),
        f"{P}{EXPERTS}.lora_B.weight": torch.randn(HIDDEN, rows, generator=made),
    }


def save_alone(folder: Path, **config: Any) -> Path:
    """Save the adapter as PEFT does."""
    folder.mkdir()
    save_file(adapter(), folder / "adapter_model.safetensors")
    write_json(folder / "adapter_config.json", {**CONFIG, **config})
    return folder


def leave_whole(folder: Path) -> None:
    """Let ranks leave the state of the PEFT model, under its names in memory."""
    state = {
        f"{P}{EXPERTS}.base_layer.base_layer.{name.rpartition('.')[2]}" if "experts" in name else P + name: value
        for name, value in base_model().items()
    }
    state |= {name.replace(".weight", ".default.weight"): value for name, value in adapter().items()}
    cut = {
        name: "[e, m, n]" if value.dim() == 3 else "[m, n]" if value.dim() == 2 else "[h]"
        for name, value in state.items()
    }
    leave(folder, state, layouts=cut)
    write_json(folder / "adapter_config.json", CONFIG)


def test_an_adapter_alone_is_copied(tmp_path: Path) -> None:
    gather_checkpoint(save_alone(tmp_path / "source"), tmp_path / "out")
    assert_holds(tmp_path / "out", adapter())


def test_the_base_model_loses_all_wrappers(bench: Bench) -> None:
    leave_whole(bench.workspace)
    gather_checkpoint(bench.workspace, bench.out)
    assert_holds(bench.out, base_model())
    assert_holds(bench.out / "adapter", adapter())


def test_another_rank(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="another rank than adapter_config"):
        gather_checkpoint(save_alone(tmp_path / "source", r=4), tmp_path / "out")
