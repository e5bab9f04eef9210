"""One folder with a model in several forms: the best is taken, if the others hold the same values."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import xrank
from tests.readers.made_zero import MadeModel, made_model, write_zero
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
        "deepspeed files are next to the safetensors files that are read: 14 tensors (BF16, F32, I64) there, "
        "13 tensors (BF16, I64) here; 13 compared tensors agree"
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
    assert any("deepspeed files are next to" in note["message"] for note in report["notes"])
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
    assert note.startswith("safetensors files are next to the deepspeed files that are read, but cannot be read: ")


def test_a_damaged_state_beside_the_model_must_be_chosen_from(tmp_path: Path) -> None:
    """The files beside it may be those of the model that training started from."""
    saved = write_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(UsageError, match="its deepspeed files cannot be read, so it is unknown") as caught:
        xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    assert "rank 1 of 3" in str(caught.value.got) and 'format="safetensors"' in str(caught.value.next_step)
    xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model", format="safetensors")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == saved.keys()


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
        with pytest.raises(UsageError, match="its safetensors files contain no tensor"):
            xrank.gather_checkpoint(folder, tmp_path / "model")
        return
    xrank.gather_checkpoint(folder, tmp_path / "model")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"up.weight"}


# ---- two models in one folder that agree in all but one tensor, as after training that froze the rest

FORMS = ["deepspeed", "dcp", "dcp-beside", "fsdp-folder", "torch-save", "bin"]
LORA = (("A", (1, 8)), ("B", (6, 1)))


def trained_model() -> dict[str, torch.Tensor]:
    """Six layers whose largest matrices are far behind those of the smallest that a sample would take."""
    random = torch.Generator().manual_seed(3)
    layer = {"q_proj": (6, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
    return {
        f"model.layers.{number}.{name}.weight": torch.rand(shape, generator=random)
        for number in range(6)
        for name, shape in layer.items()
    } | {"model.norm.weight": torch.rand(8, generator=random)}


def write_state(folder: Path, form: str, state: Mapping[str, torch.Tensor]) -> None:
    """Write a trainer's state into the folder of a model."""
    folder.mkdir(exist_ok=True)
    if form == "deepspeed":
        write_zero(folder, MadeModel([state]))
    elif form == "torch-save":
        torch.save(dict(state), folder / "model.pt")
    elif form == "bin":
        torch.save(dict(state), folder / "pytorch_model.bin")
    else:
        place = folder / "pytorch_model_fsdp_0" if form == "fsdp-folder" else folder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": dict(state)}, checkpoint_id=place, no_dist=True)


def format_of(form: str) -> str:
    return "dcp" if form in ("dcp-beside", "fsdp-folder") else form


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_agrees_in_all_tensors_is_no_second_model(tmp_path: Path, form: str) -> None:
    trained = trained_model()
    write_state(tmp_path / "checkpoint-2", form, trained)
    save_file(
        {name: tensor.bfloat16() for name, tensor in trained.items()}, tmp_path / "checkpoint-2/model.safetensors"
    )
    report = xrank.gather_checkpoint(tmp_path / "checkpoint-2", tmp_path / "model")
    assert "19 compared tensors agree" in notes(report)[0] and len(notes(report)) == 1
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == trained.keys()


@pytest.mark.parametrize("name", ["model.layers.5.down_proj.weight", "model.layers.2.q_proj.weight"])
@pytest.mark.parametrize("form", FORMS)
def test_one_trained_tensor_tells_a_start_model_from_the_trained_one(tmp_path: Path, form: str, name: str) -> None:
    start = trained_model()
    trained = {**start, name: start[name] + 1}
    folder, out = tmp_path / "checkpoint-2", tmp_path / "model"
    write_state(folder, form, trained)
    save_file(start, folder / "model.safetensors")
    ended = CliRunner().invoke(cli, ["gather", str(folder), "--out", str(out)])
    assert ended.exit_code == 2 and f"different values of {name}" in ended.stderr, ended.output
    assert "--format safetensors" in ended.stderr and not out.exists()
    shown = json.loads(CliRunner().invoke(cli, ["inspect", str(folder), "--json"]).stdout)
    assert [problem["exit_code"] for problem in shown["problems"]] == [2]
    # The advice, followed, gives the trained model.
    xrank.gather_checkpoint(folder, out, format=format_of(form))
    assert torch.equal(load_file(out / "model.safetensors")[name], trained[name])


@pytest.mark.parametrize("form", ["deepspeed", "dcp", "torch-save"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"v_head.weight": torch.ones(1, 8)}, "and only they contain v_head.weight"),
        ({"model.norm.weight": torch.ones(9)}, "model.norm.weight is F32 [8] and F32 [9]"),
        (
            {f"model.layers.0.q_proj.lora_{half}.default.weight": torch.ones(shape) for half, shape in LORA},
            "and only they contain model.layers.0.q_proj.lora_A.default.weight",
        ),
    ],
)
def test_a_state_that_holds_more_or_other_sizes_is_another_model(
    tmp_path: Path, form: str, change: dict[str, torch.Tensor], text: str
) -> None:
    start = trained_model()
    write_state(tmp_path / "run", form, {**start, **change})
    save_file(start, tmp_path / "run" / "model.safetensors")
    with pytest.raises(UsageError) as caught:
        xrank.gather_checkpoint(tmp_path / "run", tmp_path / "model")
    assert text in str(caught.value.got)


def test_experts_are_compared_although_files_name_them_otherwise(tmp_path: Path) -> None:
    """A module stacks its experts; files have a tensor for each."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)
    for name, change in (("agree", 0.0), ("differ", 1.0)):
        model.save_pretrained(tmp_path / name)
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[2, 3, 4] += change
        write_state(tmp_path / name, "fsdp-folder", model.state_dict())
    report = xrank.gather_checkpoint(tmp_path / "agree", tmp_path / "model")
    saved = load_file(tmp_path / "agree" / "model.safetensors")
    assert f"{len(saved)} compared tensors agree" in notes(report)[0]
    with pytest.raises(UsageError, match="hold different models") as caught:
        xrank.gather_checkpoint(tmp_path / "differ", tmp_path / "never")
    assert "layers.1" in str(caught.value.tensor) and "experts.2" in str(caught.value.tensor)


def test_data_beside_a_model_is_not_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    save_file(trained_model(), folder / "model.safetensors")
    torch.save({"tokens": torch.arange(4), "mean": torch.rand(3)}, folder / "data.pth")
    torch.save([1, 2], folder / "list.pt")
    report = xrank.gather_checkpoint(folder, tmp_path / "model")
    assert [text.partition("read, but ")[2].split(":")[0] for text in notes(report)] == ["cannot be read"]
