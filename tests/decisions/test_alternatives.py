"""One folder with a model in several forms: the best is taken, if the others hold the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import xrank
from tests.readers.made_zero import made_model, write_zero
from xrank.cli.main import cli
from xrank.errors import UsageError, XrankError


def write_checkpoint(folder: Path, saved: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Write what the Trainer leaves with ZeRO: the model in bf16, and DeepSpeed's state with fp32 masters."""
    made = made_model()
    write_zero(folder, made)
    if saved is None:
        saved = {
            name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in made.expected.items()
        }
    save_file(saved, folder / "model.safetensors")
    return saved


def notes(report: xrank.Report) -> list[str]:
    return [text for code, text in report.notes if code == "also-here"]


def test_the_saved_model_is_taken_and_the_masters_are_named(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "checkpoint-2")
    report = xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found.keys() == saved.keys()
    assert all(found[name].dtype == saved[name].dtype and torch.equal(found[name], saved[name]) for name in saved)
    (note,) = notes(report)
    assert note == (
        "deepspeed files lie beside the safetensors files that are read: 14 tensors (BF16, F32, I64) there, "
        "13 tensors (BF16, I64) here; 8 compared tensors agree"
    )


def test_another_format_is_taken_if_it_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint-2")
    report = xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model", format="deepspeed")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert found["up.weight"].dtype == torch.float32 and notes(report) == []


def test_inspect_lists_both_forms(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint-2")
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "checkpoint-2"), "--json"])
    report = json.loads(shown.stdout)
    assert (shown.exit_code, report["source"]["format"], report["problems"]) == (0, "safetensors", [])
    assert any("deepspeed files lie beside" in note["message"] for note in report["notes"])
    other = CliRunner().invoke(cli, ["inspect", str(tmp_path / "checkpoint-2"), "--format", "deepspeed"])
    assert other.exit_code == 0 and "ZeRO 3" in other.output


@pytest.mark.parametrize("name", ["up.weight", "gate"])
def test_the_model_from_before_the_training_is_not_taken(tmp_path: Path, name: str) -> None:
    saved = write_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    save_file({**saved, name: saved[name] + 1}, tmp_path / "checkpoint-2" / "model.safetensors")
    with pytest.raises(UsageError, match="give different models") as caught:
        xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    assert caught.value.tensor == name
    assert caught.value.next_step == 'choose one: format="safetensors" or format="deepspeed"'
    assert not (tmp_path / "model").exists()


def test_models_without_a_common_tensor_are_not_chosen_from(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run", {"other": torch.ones(3)})
    with pytest.raises(UsageError, match="give different models") as caught:
        xrank.gather_checkpoint(tmp_path / "run", tmp_path / "model")
    assert caught.value.got == "safetensors files and deepspeed files without a tensor in common"


def test_empty_tensors_of_zero_3_give_way_to_its_state(tmp_path: Path) -> None:
    """As a trainer leaves them that saves a partitioned model on one rank."""
    made = made_model()
    empty = {name: torch.empty(0) for name in made.trained} | {"count": made.buffers["count"]}
    write_checkpoint(tmp_path / "checkpoint-2", empty)
    report = xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(found["up.weight"], made.expected["up.weight"])
    (note,) = notes(report)
    assert note.startswith("safetensors files lie beside the deepspeed files that are read, and cannot be read: ")


def test_a_damaged_state_beside_the_model_is_a_note(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    report = xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == saved.keys()
    (note,) = notes(report)
    assert "and cannot be read: rank 1" in note


def test_a_damaged_model_is_refused_although_a_state_lies_beside_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint-2")
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(XrankError) as caught:
        xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    assert caught.value.exit_code == 4 and not (tmp_path / "model").exists()


def test_an_adapter_is_compared_although_its_name_is_left_out(tmp_path: Path) -> None:
    pairs = {
        f"base_model.model.layers.{number}.up.lora_{half}.weight": torch.randn(shape)
        for number in range(2)
        for half, shape in (("A", (2, 6)), ("B", (7, 2)))
    }
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    state = {name.replace(".weight", ".default.weight"): tensor for name, tensor in pairs.items()}
    torch.save(state, folder / "pytorch_model.bin")
    save_file(pairs, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    report = xrank.gather_checkpoint(folder, tmp_path / "model", adapter="separate")
    assert "4 compared tensors agree" in notes(report)[0]


@pytest.mark.parametrize("is_other_empty", [False, True])
def test_files_without_a_tensor_give_way_to_others(tmp_path: Path, is_other_empty: bool) -> None:
    """FSDP1 with PEFT leaves two empty files: the trainer could not save the adapter."""
    folder = tmp_path / "checkpoint-2"
    folder.mkdir()
    save_file({}, folder / "model.safetensors")
    torch.save({} if is_other_empty else {"up.weight": torch.ones(3)}, folder / "pytorch_model.bin")
    if is_other_empty:
        with pytest.raises(UsageError, match="its safetensors files hold no tensor"):
            xrank.gather_checkpoint(folder, tmp_path / "model")
        return
    xrank.gather_checkpoint(folder, tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"up.weight"}
