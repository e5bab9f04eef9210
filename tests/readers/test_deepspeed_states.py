"""Training states of DeepSpeed: every stage and form of ZeRO, universal checkpoints, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.readers.made_zero import MadeModel, Zero, changed_entries, made_model, write_universal, write_zero
from tests.readers.stored_tensors import read_moments, read_tensors
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError, XrankError
from xrank.layout.training_state import TrainingState
from xrank.readers.training_states import read_training_state

FORMS = {
    "stage 1": Zero(stage=1),
    "stage 2": Zero(stage=2),
    "stage 3": Zero(),
    "four ranks": Zero(stage=2, num_ranks=4),
    "one rank": Zero(stage=1, num_ranks=1),
    "aligned": Zero(stage=2, alignment=4),
    "dealt": Zero(stage=2, is_dealt=True),
    "bf16": Zero(stage=1, is_bf16_optimizer=True),
    "many sub-groups": Zero(sub_group_numel=10),
}


def assert_holds(state: TrainingState, model: MadeModel, step: int = 2) -> None:
    moments = read_moments(state)
    assert set(moments) == set(model.trained)
    for name, tensor in model.trained.items():
        assert torch.equal(moments[name]["fp32_param"], tensor), name
        assert torch.equal(moments[name]["exp_avg"], tensor * 0.1), name
        assert torch.equal(moments[name]["exp_avg_sq"], tensor * tensor), name
    assert state.steps == dict.fromkeys(model.trained, step)
    tensors = read_tensors(state.stored, model.expected)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.expected.items())
    assert state.stored.aliases == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("form", FORMS)
def test_partitions(tmp_path: Path, form: str) -> None:
    how = FORMS[form]
    write_zero(tmp_path, made_model(), how)
    state = read_training_state(str(tmp_path))
    assert_holds(state, made_model())
    grouped = {name: group.options["weight_decay"] for group in state.groups for name in group.parameters}
    assert set(grouped) == set(made_model().trained)
    if how.stage < 3:
        decays = [{grouped[name] for name in group} for group in made_model().groups]
        assert decays == [{0.0}, {0.1}]
    assert state.values["global_steps"] == 2 and "module" not in state.values


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal(tmp_path: Path, stage: int) -> None:
    write_universal(tmp_path, made_model(), Zero(stage=stage))
    state = read_training_state(str(tmp_path))
    assert_holds(state, made_model())
    decays = {name: group.options["weight_decay"] for group in state.groups for name in group.parameters}
    assert decays["embed.weight"] == 0.0 and decays["norm.weight"] > 0


def test_values(tmp_path: Path) -> None:
    scheduler = {"last_batch_iteration": 1, "warmup": [0.1, 0.2]}
    state = {"lr_scheduler": scheduler, "epoch": 3, "data_sampler": {"seen": 4}, "extra": Path("a")}
    write_zero(tmp_path, made_model(), Zero(stage=2, changed_state=state))
    found = read_training_state(str(tmp_path))
    assert (found.values["lr_scheduler"], found.values["epoch"]) == (scheduler, 3)
    assert {each.name: each.why for each in found.left_out}.keys() == {"data_sampler", "extra"}


def test_trainers_files(tmp_path: Path) -> None:
    write_zero(tmp_path / "checkpoint-2", made_model(), Zero(stage=2))
    log = tmp_path / "checkpoint-2" / "trainer_state.json"
    log.write_text(json.dumps({"global_step": 2}))
    state = read_training_state(str(tmp_path / "checkpoint-2"))
    assert [each.path for each in state.left_out] == [str(log)]
    log.write_text(json.dumps({"global_step": 1}))
    with pytest.raises(ContradictionError, match="a different step than the optimizer"):
        read_training_state(str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize(
    ("config", "optimizer"),
    [
        ({"type": "AdamW"}, "AdamW"),
        ({"type": "Adam"}, "AdamW"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        (None, None),
    ],
)
def test_class_of_the_optimizer(tmp_path: Path, config: Any, optimizer: str | None) -> None:
    ds_config = {"zero_optimization": {"stage": 2}, "optimizer": config}
    write_zero(tmp_path, made_model(), Zero(stage=2, changed_state={"ds_config": ds_config}))
    assert read_training_state(str(tmp_path)).optimizer == optimizer


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the state in a file; classes of DeepSpeed in it become plain numbers."""
    from tests.readers.made_zero import deepspeed_classes

    with deepspeed_classes():
        state = torch.load(path, weights_only=False)
        change(state)
        torch.save(state, path)


def base_of(state: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = state["optimizer_state_dict"]
    found: dict[str, Any] = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))
    return found


def on_all(how: Zero, change: Callable[[dict[str, Any]], Any], ranks: int | None = None) -> Callable[[Path], None]:
    """Return a function that changes the optimizer's state on the last ranks, or on all."""

    def run(folder: Path) -> None:
        paths = sorted(folder.rglob("*_optim_states.pt"))
        for path in paths if ranks is None else paths[-ranks:]:
            edit(path, lambda state: change(base_of(state)))

    return run


def momentum(base: dict[str, Any]) -> None:
    for own in base["state"].values():
        own["momentum_buffer"] = own.pop("exp_avg")


FAULTS: Mapping[str, tuple[Callable[[dict[str, Any]], Any], int | None, type[XrankError], str]] = {
    "muon": (momentum, None, UsageError, "SGD or Muon"),
    "lamb": (lambda base: base["param_groups"][0].update(max_coeff=10.0), None, UsageError, "LAMB"),
    "no moment on a rank": (lambda base: base["state"][0].pop("exp_avg"), 1, IncompleteError, "lacks exp_avg"),
    "no second moments": (
        lambda base: [own.pop("exp_avg_sq") for own in base["state"].values()], None, IncompleteError, "exp_avg_sq"
    ),
    "a short moment": (
        lambda base: base["state"][0].update(exp_avg=base["state"][0]["exp_avg"][:-3].clone()),
        1, ContradictionError, "exp_avg do not fit",
    ),
    "another step": (
        lambda base: [own.update(step=torch.tensor(1.0)) for own in base["state"].values()],
        None, ContradictionError, "a different step than the optimizer",
    ),
    "another step on a rank": (
        lambda base: [own.update(step=torch.tensor(1.0)) for own in base["state"].values()],
        1, ContradictionError, "not from the same save",
    ),
    "no step": (lambda base: [own.pop("step") for own in base["state"].values()], None, IncompleteError, "lacks step"),
    "no options": (lambda base: base.pop("param_groups"), None, ContradictionError, "no group"),
    "other parameters": (
        lambda base: base["param_groups"][0].update(params=[7]), None, ContradictionError, "other parameters"
    ),
    "a state of no group": (lambda base: base["state"].update({9: {}}), None, CorruptError, "not that of its groups"),
    "never stepped": (lambda base: base["state"].clear(), None, UsageError, "has taken no step"),
}  # fmt: skip


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("fault", FAULTS)
def test_refused(tmp_path: Path, fault: str, stage: int) -> None:
    change, ranks, kind, message = FAULTS[fault]
    write_zero(tmp_path, made_model(), Zero(stage=stage))
    on_all(Zero(), change, ranks)(tmp_path)
    with pytest.raises(kind, match=message) as raised:
        read_training_state(str(tmp_path))
    assert raised.value.next_step


def test_step_of_a_group(tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam counted in its groups."""

    def count(base: dict[str, Any]) -> None:
        for own in base["state"].values():
            del own["step"]
        for group in base["param_groups"]:
            group["step"] = 2

    write_zero(tmp_path, made_model(), Zero(stage=2))
    on_all(Zero(), count)(tmp_path)
    state = read_training_state(str(tmp_path))
    assert_holds(state, made_model())
    assert all("step" not in group.options for group in state.groups)


def test_skipped_steps(tmp_path: Path) -> None:
    write_zero(tmp_path, made_model(), Zero(stage=2, changed_state={"global_steps": 5, "skipped_steps": 3}))
    assert_holds(read_training_state(str(tmp_path)), made_model())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (Zero(stage=2, changed_optimizer={"base_optimizer_state": [{}, {}]}), "elastic_checkpoint"),
        (Zero(ends=[30, 60]), "cut parameters"),
        (Zero(stage=0), "without ZeRO"),
        (Zero(stage=2, changed_state={"ds_config": {"optimizer": {"type": "Muon"}}}), "muon"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, how: Zero, message: str) -> None:
    write_zero(tmp_path, made_model(), how)
    with pytest.raises(UsageError, match=message):
        read_training_state(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero/up.weight/exp_avg_sq.pt", "exp_avg_sq.pt is missing"),
        ("zero/up.weight/step.pt", "lacks step"),
        ("zero/optimizer_state.pt", "no such file"),
    ],
)
def test_half_a_universal_checkpoint(tmp_path: Path, name: str, message: str) -> None:
    write_universal(tmp_path, made_model(), Zero(stage=2))
    next(tmp_path.glob(f"*/{name}")).unlink()
    with pytest.raises(IncompleteError, match=message):
        read_training_state(str(tmp_path))


def test_a_moment_of_another_parameter(tmp_path: Path) -> None:
    write_universal(tmp_path, made_model(), Zero(stage=2))
    (zero,) = tmp_path.glob("*/zero")
    shutil.copy(zero / "down.weight" / "exp_avg.pt", zero / "up.weight" / "exp_avg.pt")
    with pytest.raises(ContradictionError, match="does not have the shape"):
        read_training_state(str(tmp_path))
    shutil.copy(zero / "up.weight" / "exp_avg_sq.pt", zero / "up.weight" / "exp_avg.pt")
    with pytest.raises(ContradictionError, match="renamed or copied"):
        read_training_state(str(tmp_path))


def test_a_kind_of_another_optimizer(tmp_path: Path) -> None:
    write_universal(tmp_path, made_model(), Zero(stage=2))
    (folder,) = tmp_path.glob("*/zero/up.weight")
    shutil.copy(folder / "exp_avg.pt", folder / "momentum_buffer.pt")
    with pytest.raises(UsageError, match="SGD or Muon"):
        read_training_state(str(tmp_path))


def test_universal_of_another_step(tmp_path: Path) -> None:
    write_universal(tmp_path, made_model(), Zero(stage=2))
    (states,) = tmp_path.glob("*/mp_rank_00_model_states.pt")
    edit(states, lambda state: state.update(changed_entries(state, {"global_steps": 9})))
    with pytest.raises(ContradictionError, match="a different step than the optimizer"):
        read_training_state(str(tmp_path))
