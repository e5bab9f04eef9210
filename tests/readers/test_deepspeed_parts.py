"""DeepSpeed's pipelines and experts: gathers and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.readers.made_zero import Zero
from tests.readers.made_zero_parts import (
    MadePipeline,
    made_experts,
    made_pipeline,
    rename_saved,
    write_experts,
    write_pipeline,
)
from tests.readers.test_deepspeed import TAG, assert_same, changed, gathered, inspected, refused
from xrank import open_checkpoint, reshard_checkpoint, verify_model
from xrank.errors import ContradictionError, CorruptError, IncompleteError, UsageError
from xrank.layout import DeviceMesh, LayoutMap

PIPELINE = Zero(stage=1, num_ranks=2)
EXPERTS = Zero(stage=2, num_ranks=4)


@pytest.mark.parametrize(
    ("how", "suffix"),
    [
        (PIPELINE, ""),
        (replace(PIPELINE, num_ranks=1, prefix=""), "-model_00"),
        (replace(PIPELINE, is_bf16_optimizer=True), ""),
        # Without ZeRO the optimizer has no names of its own, and param_shapes is None.
        (replace(PIPELINE, stage=0, is_bf16_optimizer=True), ""),
        (replace(PIPELINE, stage=0), ""),
    ],
)
def test_pipelines(tmp_path, how, suffix):
    model = made_pipeline()
    write_pipeline(tmp_path / "run", model, how, suffix)
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)
    assert "2 layers without a file" not in inspected(tmp_path / "run")
    assert "1 layer without a file: 2" in inspected(tmp_path / "run")


@pytest.mark.parametrize(("ep_size", "is_last"), [(2, False), (2, True), (1, False), (4, False)])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_experts(tmp_path, ep_size, is_last, stage):
    model = made_experts()
    write_experts(tmp_path / "run", model, replace(EXPERTS, stage=stage), ep_size, is_last=is_last)
    got = gathered(tmp_path / "run", tmp_path / "out")
    dense = {name: got[name] for name in model.dense.expected}
    want = (
        model.expected if stage else {**model.expected, **{n: t for n, t in dense.items() if t.dtype != torch.float32}}
    )
    assert_same(got, want)


def test_experts_without_shapes(tmp_path):
    """As `BF16_Optimizer` leaves them without ZeRO: the partitions alone name the weights."""
    write_experts(tmp_path / "run", made_experts(), replace(EXPERTS, changed_state={"param_shapes": None}))
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), made_experts().expected)


def test_experts_in_the_wrong_order_of_ranks_are_seen(tmp_path):
    """Nothing but the configuration says which ranks have which experts, and the experts' files show it."""
    write_experts(tmp_path / "run", made_experts(), replace(EXPERTS, changed_optimizer={}), is_last=True)
    for file in (tmp_path / "run" / TAG).glob("*"):
        if "expert_" not in file.name:
            with_classes = torch.load(file, weights_only=False) if "model" in file.name else None
            if with_classes is not None:
                with_classes["ds_config"]["use_data_before_expert_parallelism"] = False
                torch.save(with_classes, file)
    refused(tmp_path / "run", ContradictionError)


@pytest.mark.parametrize("kind", ["pipeline", "experts"])
def test_every_command(tmp_path, kind):
    run, model = tmp_path / "run", made_pipeline() if kind == "pipeline" else made_experts()
    if isinstance(model, MadePipeline):
        write_pipeline(run, model, PIPELINE)
    else:
        write_experts(run, model, EXPERTS)
    gathered(run, tmp_path / "out")
    verify_model(tmp_path / "out", against=run)
    assert {*model.expected} <= {*open_checkpoint(run)}
    layouts = LayoutMap(DeviceMesh((2,), ("tp",)))
    for name, tensor in model.expected.items():
        layouts[name] = f"[{', '.join(['n/~tp', *('m' * (tensor.ndim - 1))])}]"
    reshard_checkpoint(run, layouts, tmp_path / "states")
    again = gathered(tmp_path / "states", tmp_path / "again")
    again.pop("head.weight", None)  # has no rule, so it comes back beside what it is tied to
    assert_same(again, model.expected)


def test_a_base_model_and_a_recipe_name_a_pipeline(tmp_path):
    """Layers' numbers are the pipeline's, so a recipe has a line for each tensor."""
    model = made_pipeline()
    write_pipeline(tmp_path / "run", model, PIPELINE)
    recipe = tmp_path / "pipe.toml"
    names = {name: f"model.{name.replace('tied_modules.', '')}" for name in model.expected}
    sizes = {
        name: ", ".join(f"x{number}y{dim}" for dim in range(tensor.ndim))
        for number, (name, tensor) in enumerate(model.expected.items())
    }
    lines = [f'"{name} [{sizes[name]}]" = "{to} [{sizes[name]}]"' for name, to in names.items()]
    recipe.write_text("\n".join(["[tensors]", *lines]))
    got = gathered(tmp_path / "run", tmp_path / "out", recipe=str(recipe))
    assert_same(got, {names[name]: tensor for name, tensor in model.expected.items()})


# ---- refusals


def layer(run: Path, number: int) -> Path:
    return run / TAG / f"layer_{number:02d}-model_states.pt"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_03-model_states.pt", ("layer_03", "3.up")),
        ("layer_00-model_states.pt", ("tied_modules.embed.scale",)),
        ("mp_rank_01_model_states.pt", ("stage 1",)),
        ("mp_rank_02_model_states.pt", ("stage 2",)),
        ("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", ("rank 1 of 2", "rank_1_mp_rank_01")),
    ],
)
def test_a_pipelines_missing_file(tmp_path, name, words):
    write_pipeline(tmp_path / "run", made_pipeline(), PIPELINE)
    (tmp_path / "run" / TAG / name).unlink()
    refused(tmp_path / "run", IncompleteError, *words)


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_layer_without_zero_that_the_optimizer_trained(tmp_path, number):
    """Without ZeRO and buffers, the moments of the stages' optimizers alone show how many layers there are."""
    model = replace(made_pipeline(), buffers=[{}, {}, {}])
    write_pipeline(tmp_path / "run", model, Zero(stage=0))
    twins: dict[str, torch.Tensor] = {}
    for stage, groups in enumerate(model.stages):
        named = {name: tensor for group in groups for name, tensor in group.items()}
        moments = [{"exp_avg": twins.setdefault(name, torch.rand_like(tensor))} for name, tensor in named.items()]
        changed(
            tmp_path / "run" / TAG / f"mp_rank_0{stage}_model_states.pt",
            lambda state, moments=moments: state.update(optimizer={"state": dict(enumerate(moments))}),
        )
    gathered(tmp_path / "run", tmp_path / "out")
    layer(tmp_path / "run", number).unlink()
    refused(tmp_path / "run", IncompleteError, "lacks files of layers", "tensors of shape")


def test_a_pipeline_without_any_layer_or_stage(tmp_path):
    write_pipeline(tmp_path / "run", made_pipeline(), PIPELINE)
    for file in (tmp_path / "run" / TAG).glob("layer_*"):
        file.unlink()
    refused(tmp_path / "run", IncompleteError, "layer_01")
    write_pipeline(tmp_path / "other", made_pipeline(), PIPELINE)
    for file in (tmp_path / "other" / TAG).glob("*_mp_rank_02*"):
        file.unlink()
    refused(tmp_path / "other", IncompleteError, "stage 2")
    for file in (tmp_path / "other" / TAG).glob("*_optim_states.pt"):
        file.unlink()
    refused(tmp_path / "other", IncompleteError, "optim_states")


def test_a_stage_of_another_step(tmp_path):
    write_pipeline(tmp_path / "run", made_pipeline(0), PIPELINE)
    write_pipeline(tmp_path / "later", made_pipeline(1), replace(PIPELINE, step=3))
    later = tmp_path / "later" / "global_step3"
    for file in later.glob("*mp_rank_01_optim*"):
        shutil.copy(file, tmp_path / "run" / TAG)
    refused(tmp_path / "run", ContradictionError, "a different save, layer or expert than the fp32 weights")
    shutil.copy(later / "mp_rank_01_model_states.pt", tmp_path / "run" / TAG)
    refused(tmp_path / "run", ContradictionError, "global_steps differs")


@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_of_another_step_is_seen_by_its_weights(tmp_path, number):
    write_pipeline(tmp_path / "run", made_pipeline(0), PIPELINE)
    write_pipeline(tmp_path / "other", made_pipeline(1), PIPELINE)
    shutil.copy(layer(tmp_path / "other", number), layer(tmp_path / "run", number))
    refused(
        tmp_path / "run",
        ContradictionError,
        layer(tmp_path, number).name,
        "a different save, layer or expert than the fp32 weights",
    )


def test_another_layers_file(tmp_path):
    run = tmp_path / "run"
    write_pipeline(run, made_pipeline(), PIPELINE)
    shutil.copy(layer(run, 5), layer(run, 3))
    refused(run, ContradictionError, "renamed or copied")
    rename_saved(layer(run, 3), layer(run, 5).read_bytes())
    refused(run, ContradictionError, "a different save, layer or expert than the fp32 weights")
    shutil.copy(layer(run, 5), run / TAG / "layer_05-model_00-model_states.pt")
    refused(run, ContradictionError, "both belong to layer 5")


def test_another_stages_partition(tmp_path):
    run = tmp_path / "run"
    write_pipeline(run, made_pipeline(), PIPELINE)
    one, two = (run / TAG / f"bf16_zero_pp_rank_0_mp_rank_0{stage}_optim_states.pt" for stage in (0, 2))
    rename_saved(two, one.read_bytes())
    refused(run, ContradictionError, "mp_rank_02", "parameters of no rank's partition")


def test_layers_that_pickles_or_tensors_spoil(tmp_path):
    run = tmp_path / "run"
    write_pipeline(run, made_pipeline(), PIPELINE)
    torch.save({"up.weight": torch.nn.Linear(1, 1)}, layer(run, 3))
    refused(run, UsageError, "up.weight is a whole module")
    torch.save([torch.rand(1)], layer(run, 3))
    refused(run, CorruptError, "layer_03")
    torch.save({"up.weight": torch.rand(3, 4)}, layer(run, 3))
    refused(run, ContradictionError, "3.up.weight", "[4, 3]")


def with_stages(change: Callable[[MadePipeline], MadePipeline]) -> MadePipeline:
    return change(made_pipeline())


def test_layers_that_share_a_key_alone(tmp_path):
    """`tied_weight_attr` names what stages keep equal; a tied layer without a function of its own leaves two files."""
    model = made_pipeline()
    norm = {f"tied_modules.norm.{name}": torch.rand(3) + 0.5 for name in ("weight", "bias")}
    stages = [
        [*model.stages[0][:1], {**model.stages[0][1], **norm}],
        model.stages[1],
        [*model.stages[2][:1], {**model.stages[2][1], **norm}],
    ]
    layers = {**model.layers, 2: "tied_modules.norm.", 7: "tied_modules.norm."}
    model = replace(model, stages=stages, layers=layers)
    write_pipeline(tmp_path / "run", model, PIPELINE)
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)
    content = torch.load(layer(tmp_path / "run", 7))
    torch.save({**content, "bias": content["bias"] + 1}, layer(tmp_path / "run", 7))
    refused(tmp_path / "run", UsageError, "tied_modules.norm.bias", "tied_weight_attr")


def test_layers_that_look_alike(tmp_path):
    model = made_pipeline()
    twins = {f"tied_modules.{key}.weight": torch.rand(3) + 0.5 for key in ("one", "two")}
    stages = [[*model.stages[0][:1], {**model.stages[0][1], **twins}], *model.stages[1:]]
    layers = {**model.layers, 2: "tied_modules.one.", 7: "tied_modules.two."}
    write_pipeline(tmp_path / "run", replace(model, stages=stages, layers=layers), PIPELINE)
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), {**model.expected, **twins})
    # In the other order the values contradict.
    swapped = {**layers, 2: "tied_modules.two.", 7: "tied_modules.one."}
    write_pipeline(tmp_path / "swapped", replace(model, stages=stages, layers=swapped), PIPELINE)
    refused(tmp_path / "swapped", ContradictionError, "save, layer or expert")
    write_pipeline(tmp_path / "one", replace(model, stages=stages, layers={**layers, 8: "tied_modules.two."}), PIPELINE)
    refused(tmp_path / "one", UsageError, "any of 2 tied layers", "one, two")


@pytest.mark.parametrize(
    ("changes", "kind", "word"),
    [
        ({"checkpoint_parallel_dimensions": {"pp_degree": 3, "tp_degree": 2}}, UsageError, "tensor-parallel"),
        ({"mp_world_size": 2}, ContradictionError, "stage 2"),
        ({"dp_world_size": 3}, ContradictionError, "dp_world_size 3"),
        ({"param_shapes": [{"1.up.weight": torch.Size([4, 3])}]}, ContradictionError, "an earlier stage trains"),
    ],
)
def test_stages_that_do_not_fit(tmp_path, changes: Mapping[str, Any], kind, word):
    write_pipeline(tmp_path / "run", made_pipeline(), replace(PIPELINE, changed_state=changes))
    refused(tmp_path / "run", kind, word)


def test_a_trained_loss_is_no_layer(tmp_path):
    model = made_pipeline()
    stages = [*model.stages[:2], [*model.stages[2], {"loss.weight": torch.rand(3)}]]
    write_pipeline(tmp_path / "run", replace(model, stages=stages), PIPELINE)
    refused(tmp_path / "run", UsageError, "loss.weight belongs to no layer", "belongs to no layer")


def test_universal_pipelines_are_refused_with_the_way_out(tmp_path):
    write_pipeline(tmp_path / "run", made_pipeline(), PIPELINE)
    (tmp_path / "run" / TAG / "zero").mkdir()
    for file in (tmp_path / "run" / TAG).glob("*"):
        if file.name.startswith(("layer_", "bf16_")):
            file.unlink()
    refused(tmp_path / "run", UsageError, "universal checkpoints of pipelines", "from which the universal one was made")


def expert(run: Path, number: int) -> Path:
    return run / TAG / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"


def test_experts_that_are_missing_or_too_many(tmp_path):
    run = tmp_path / "run"
    write_experts(run, made_experts(), EXPERTS)
    kept = expert(run, 3).read_bytes()
    expert(run, 3).unlink()
    refused(run, IncompleteError, expert(run, 3).name, "experts 0-2")
    expert(run, 3).write_bytes(kept)
    shutil.copy(expert(run, 3), expert(run, 4))
    refused(run, ContradictionError, "do not count", "4 experts")
    expert(run, 4).unlink()
    shutil.copy(expert(run, 3), run / TAG / "layer_1_expert_0_mp_rank_00_model_states.pt")
    refused(run, ContradictionError, "do not count", "1 layers of experts")
    for file in (run / TAG).glob("*expert_*"):
        file.unlink()
    refused(run, IncompleteError, expert(run, 0).name)


def test_another_experts_file(tmp_path):
    run = tmp_path / "run"
    write_experts(run, made_experts(0), EXPERTS)
    shutil.copy(expert(run, 1), expert(run, 2))
    refused(run, ContradictionError, "renamed or copied")
    write_experts(tmp_path / "other", made_experts(1), EXPERTS)
    shutil.copy(expert(tmp_path / "other", 2), expert(run, 2))
    refused(run, ContradictionError, "a different save, layer or expert than the fp32 weights")
    own = {name.replace(".2.", ".1."): tensor for name, tensor in torch.load(expert(run, 2)).items()}
    torch.save(own, expert(run, 2))
    refused(run, ContradictionError, "does not belong to expert 2")
    torch.save({"x": torch.nn.Linear(1, 1)}, expert(run, 2))
    refused(run, UsageError, "x is a whole module")


def test_a_missing_rank_of_experts(tmp_path):
    write_experts(tmp_path / "run", made_experts(), EXPERTS)
    (tmp_path / "run" / TAG / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    refused(tmp_path / "run", IncompleteError, "rank 2 of 4")
    for file in (tmp_path / "run" / TAG).glob("*optim_states.pt"):
        file.unlink()
    refused(tmp_path / "run", IncompleteError, "with the fp32 weights")


def test_numbers_that_the_ranks_do_not_share(tmp_path):
    write_experts(tmp_path / "run", made_experts(), replace(EXPERTS, changed_optimizer={}))
    for number in range(4):
        content = torch.load(expert(tmp_path / "run", number))
        torch.save({n: t for n, t in content.items() if "up.bias" not in n}, expert(tmp_path / "run", number))
    refused(tmp_path / "run", ContradictionError, "a different shape", "up.bias")
