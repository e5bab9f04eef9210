"""LoRA on parameters of fused experts (PEFT's `target_parameters`): one wrapper around another in a module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.bench import Bench
from tests.commands.adapted_models import ALPHA, P, write_json
from tests.commands.made_workspaces import assert_holds, leave
from xrank.commands.gather import gather_checkpoint
from xrank.commands.verify import verify_model
from xrank.errors import ContradictionError, UsageError

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


def merged(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return what PEFT's merge gives (peft/tuners/lora/layer.py: ParamWrapper.get_delta_weight)."""
    found, pairs = base_model(dtype), adapter()
    for name, wrapper in (("gate_up_proj", ".base_layer"), ("down_proj", "")):
        a, b = (pairs[f"{P}{EXPERTS}{wrapper}.lora_{half}.weight"] for half in "AB")
        apart = b.reshape(len(b), RANK, NUM_EXPERTS), a.reshape(NUM_EXPERTS, RANK, a.shape[1])
        delta = torch.einsum("ore,eri->eoi", *apart) * (ALPHA / RANK)
        found[f"{EXPERTS}.{name}"] = (found[f"{EXPERTS}.{name}"].float() + delta).to(dtype)
    return found


def taken_apart(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the model as Qwen3-MoE's files have it."""
    found = {"model.norm.weight": model["model.norm.weight"]}
    for number in range(NUM_EXPERTS):
        gate, up = model[f"{EXPERTS}.gate_up_proj"][number].chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": model[f"{EXPERTS}.down_proj"][number]}
        found |= {f"{EXPERTS}.{number}.{name}.weight": part.contiguous() for name, part in parts.items()}
    return found


def assert_close(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-6, rtol=1e-6)


def save_base(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    return folder


QWEN = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}


@pytest.mark.parametrize("form", ["memory", "files"])
def test_merged_into_a_base_model_in_either_form(tmp_path: Path, form: str) -> None:
    source = save_alone(tmp_path / "source")
    if form == "files":
        base, expected = save_base(tmp_path / "base", taken_apart(base_model()), **QWEN), taken_apart(merged())
    else:
        base, expected = save_base(tmp_path / "base", base_model(), model_type="toy"), merged()
    report = gather_checkpoint(source, tmp_path / "out", base_model=base, adapter="merge")
    assert_close(tmp_path / "out", expected)
    assert report.output is not None and len(report.output["merged"]) == len(expected) - 1
    assert verify_model(tmp_path / "out", against=source, base_model=base).ok
    with pytest.raises(UsageError, match="contains only an adapter") as caught:
        verify_model(source, against=tmp_path / "out")
    assert "as base_model=" in (caught.value.next_step or "")
    manifest = json.loads((tmp_path / "out/xrank_manifest.json").read_text())
    assert all(f", {NUM_EXPERTS} experts, from element " in text for text in manifest["merged"].values())


def test_merged_among_the_states_of_ranks(bench: Bench) -> None:
    leave_whole(bench.workspace)
    gather_checkpoint(bench.workspace, bench.out, adapter="merge")
    assert_close(bench.out, merged())
    assert verify_model(bench.out, against=bench.workspace).ok


def test_experts_that_lie_the_other_way(tmp_path: Path) -> None:
    """As GPT-OSS has them: [experts, in, out]."""
    turned = {name: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for name, t in base_model().items()}
    expected = {name: t.transpose(1, 2) if t.dim() == 3 else t for name, t in merged().items()}
    base = save_base(tmp_path / "base", turned, model_type="toy")
    gather_checkpoint(save_alone(tmp_path / "source"), tmp_path / "out", base_model=base, adapter="merge")
    assert_close(tmp_path / "out", expected)


def test_shapes_that_leave_two_ways(tmp_path: Path) -> None:
    source, weight = tmp_path / "source", torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN)
    pair = {f"{P}{EXPERTS}.lora_{half}.weight": torch.randn(HIDDEN, NUM_EXPERTS * RANK) for half in "B"}
    pair[f"{P}{EXPERTS}.lora_A.weight"] = torch.randn(NUM_EXPERTS * RANK, HIDDEN)
    save_alone(source, target_parameters=["experts.down_proj"])
    save_file(pair, source / "adapter_model.safetensors")
    base = save_base(tmp_path / "base", {f"{EXPERTS}.down_proj": weight}, model_type="toy")
    with pytest.raises(UsageError, match="the shapes do not show") as caught:
        gather_checkpoint(source, tmp_path / "out", base_model=base, adapter="merge")
    assert 'adapter="separate"' in (caught.value.next_step or "")


def test_another_rank(tmp_path: Path) -> None:
    with pytest.raises(ContradictionError, match="does not have the rank in adapter_config"):
        gather_checkpoint(save_alone(tmp_path / "source", r=4), tmp_path / "out")
