"""DeepSpeed's checkpoints: every way in which ZeRO cuts comes back bit for bit; what does not fit is refused."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.readers.made_zero import MadeModel, Zero, made_model, write_universal, write_zero
from tests.sampled import count_of
from xrank.cli.main import cli
from xrank.commands.gather import gather_checkpoint
from xrank.commands.inspect import inspect_source
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    UnknownFormatError,
    UnsafeError,
    UsageError,
    XrankError,
)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert sorted(got) == sorted(want)
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(got[name], tensor), name


def gathered(source: Path, out: Path, **options: Any) -> dict[str, torch.Tensor]:
    gather_checkpoint(source, out, **options)
    return load_file(out / "model.safetensors")


def test_deepspeed_is_not_here():
    assert importlib.util.find_spec("deepspeed") is None


# ---- every way to cut

WAYS = {
    "zero3": Zero(),
    "zero3 of one rank": Zero(num_ranks=1),
    "zero3 of seven ranks": Zero(num_ranks=7, prefix="fp16_"),
    "zero3 with a sub-group for each parameter": Zero(num_ranks=4, sub_group_numel=1),
    "zero3 with one sub-group a group": Zero(num_ranks=2, sub_group_numel=10**9, prefix=""),
    "zero3 with parameters across sub-groups": Zero(num_ranks=3, ends=[1, 2, 30, 31, 45]),
    "zero2": Zero(stage=2, num_ranks=4),
    "zero2 of one rank": Zero(stage=2, num_ranks=1),
    "zero2 of more ranks than a group has elements": Zero(stage=2, num_ranks=9),
    "zero2 with aligned parameters": Zero(stage=2, alignment=8),
    "zero2 with parameters dealt to ranks": Zero(stage=2, num_ranks=2, is_dealt=True),
    "zero2 with aligned parameters dealt to ranks": Zero(stage=2, num_ranks=2, alignment=8, is_dealt=True),
    "zero2 of old": Zero(stage=2, is_old=True, prefix="", suffix="optim_states.pt"),
    "zero2 of very old": Zero(stage=2, is_old=True, prefix="", multiple=1),
    "zero1": Zero(stage=1, prefix=""),
    "zero1 by BF16_Optimizer": Zero(stage=1, is_bf16_optimizer=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_cut(tmp_path, way):
    model = made_model()
    write_zero(tmp_path / "run", model, WAYS[way])
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)


def test_random_models_ranks_and_stages(tmp_path, soak):
    for seed in range(2000 if soak else count_of(40)):
        draw = random.Random(seed)
        values = torch.Generator().manual_seed(seed)
        names = iter(f"p{number}" for number in range(100))

        def tensors(most: int, draw=draw, values=values, names=names) -> dict[str, torch.Tensor]:
            shapes = ([draw.randint(1, 9) for _ in range(draw.randint(0, 3))] for _ in range(draw.randint(1, most)))
            return {next(names): torch.rand(shape, generator=values) + 0.5 for shape in shapes}

        model = MadeModel(
            [tensors(6) for _ in range(draw.randint(1, 3))],
            frozen=tensors(3) if draw.random() < 0.5 else {},
            buffers=tensors(2) if draw.random() < 0.5 else {},
        )
        model.frozen = {name: tensor.bfloat16() for name, tensor in model.frozen.items()}
        stage, num_ranks = draw.choice((1, 2, 3, 3)), draw.randint(1, 6)
        stream = sum(math.ceil(tensor.numel() / num_ranks) for tensor in model.trained.values())
        how = Zero(
            stage=stage,
            num_ranks=num_ranks,
            sub_group_numel=draw.randint(1, 200),
            ends=sorted(draw.sample(range(1, stream), min(2, stream - 1))) if draw.random() < 0.3 else None,
            alignment=draw.choice((1, 1, 4, 8)),
            is_dealt=draw.random() < 0.3,
            is_old=draw.random() < 0.2,
            multiple=draw.choice((1, 2, 2)),
        )
        if how.is_old:
            how.alignment = 1
        write_zero(tmp_path / "run", model, how)
        try:
            assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)
        except (AssertionError, XrankError):
            print(f"seed {seed}: {how}")
            raise
        shutil.rmtree(tmp_path / "run")
        shutil.rmtree(tmp_path / "out")


def test_without_zero_the_modules_are_whole(tmp_path):
    model = made_model()
    write_zero(tmp_path / "run", model, Zero(stage=0))
    rounded = {name: tensor.bfloat16() for name, tensor in model.trained.items()}
    got = gathered(tmp_path / "run", tmp_path / "out")
    assert_same(got, {**model.expected, **rounded})  # the tie is written once: one storage under two names


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ties_that_deepspeed_does_not_list(tmp_path, stage):
    """A module that its parent has under two names: the state dict has one memory for both, the list says nothing."""
    model = made_model()
    model.shared = {"head.weight": "embed.weight", "frozen_again.weight": "frozen.weight"}
    write_zero(tmp_path / "run", model, Zero(stage=stage, changed_state={"shared_params": {}}))
    want = {**model.expected, **({} if stage else {n: t.bfloat16() for n, t in model.trained.items()})}
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), want)
    assert inspect_source(tmp_path / "run").details["format"]["shared"] == model.shared


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", ["lora", "whole"])
def test_ties_to_a_frozen_parameter_that_the_trainer_left_out(tmp_path, stage, kind):
    """As a Trainer saves an adapter of a model with tied embeddings: `exclude_frozen_parameters` keeps the alias."""
    prefix = "base_model.model." if kind == "lora" else ""
    names = [f"{prefix}q.{kind}_{half}.default.weight" for half in "AB"]
    model = MadeModel([{name: torch.rand(3, 3) for name in names}])
    head = f"{prefix}lm_head.weight"
    held = model.trained if stage == 2 else {name: torch.empty(0) for name in names}
    changes = {
        "module": {**held, head: torch.rand(5, 3) if stage == 2 else torch.empty(0)},
        "shared_params": {head: f"{prefix}model.embed_tokens.weight"},
    }
    write_zero(tmp_path / "run", model, Zero(stage=stage, changed_state=changes))
    if kind == "whole":
        with pytest.raises(IncompleteError, match=r"lm_head\.weight: no rank holds it"):
            gather_checkpoint(tmp_path / "run", tmp_path / "out")
        return
    gather_checkpoint(tmp_path / "run", tmp_path / "out")
    saved = {name.replace(".default", ""): tensor for name, tensor in model.trained.items()}
    assert_same(load_file(tmp_path / "out" / "adapter_model.safetensors"), saved)


def test_placeholders_of_one_memory_are_no_ties(tmp_path):
    """Were all parameters of stage 3 left one empty tensor, it would say nothing of who is tied to whom."""
    model = made_model()
    empty = torch.empty(0, dtype=torch.bfloat16)
    module = dict.fromkeys((*model.trained, *model.frozen, "head.weight"), empty) | dict(model.buffers)
    write_zero(tmp_path / "run", model, Zero(changed_state={"shared_params": {}, "module": module}))
    with pytest.raises(ContradictionError, match=r"lists head\.weight, but the checkpoint contains no data for it"):
        gathered(tmp_path / "run", tmp_path / "out")


def test_buffers_of_one_storage_are_no_tie(tmp_path):
    """Modules keep a buffer under each of their names; a model without one of them does not load."""
    model = made_model()
    model.buffers = {"layers.0.table": torch.rand(3), **model.buffers}
    model.buffers["layers.1.table"] = model.buffers["layers.0.table"]
    for stage in (0, 2):
        write_zero(tmp_path / str(stage), model, Zero(stage=stage))
        assert set(model.buffers) <= set(gathered(tmp_path / str(stage), tmp_path / f"out{stage}"))


@pytest.mark.parametrize("stage", [2, 3])
def test_universal_checkpoints(tmp_path, stage):
    model = made_model()
    write_universal(tmp_path / "run", model, Zero(stage=stage))
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)


def test_a_universal_checkpoint_of_dealt_parameters_is_refused(tmp_path):
    """DeepSpeed's script puts elements of other parameters there (`test_deepspeed` of the oracle)."""
    model = made_model()
    write_universal(tmp_path / "run", model, Zero(stage=2, num_ranks=2, is_dealt=True))
    with pytest.raises(UsageError, match="round_robin_gradients") as caught:
        gathered(tmp_path / "run", tmp_path / "out")
    assert caught.value.next_step == "gather the checkpoint from which global_step2_universal was made"
    write_universal(tmp_path / "unmoved", model, Zero(stage=2, num_ranks=4, is_dealt=True))
    assert_same(gathered(tmp_path / "unmoved", tmp_path / "out"), model.expected)


def test_a_universal_checkpoint_of_two_slices_of_trained_parameters(tmp_path):
    """The script has put the slices together; only the model states are still those of slices."""
    model = MadeModel([{"a.weight": torch.rand(8, 6), "b.weight": torch.rand(6)}])
    write_universal(tmp_path / "run", model, Zero(stage=2))
    place = tmp_path / "run" / "global_step2_universal"
    state = torch.load(place / "mp_rank_00_model_states.pt")
    for rank in range(2):
        state["mp_world_size"] = 2
        state["module"]["a.weight"] = torch.zeros(4, 6)
        state["param_shapes"] = [{"a.weight": torch.Size([4, 6]), "b.weight": torch.Size([6])}]
        torch.save(state, place / f"mp_rank_{rank:02d}_model_states.pt")
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)
    (place / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match=r"mp_rank_01_model_states\.pt"):
        gather_checkpoint(tmp_path / "run", tmp_path / "again")


def test_a_padded_vocabulary_was_cut_by_the_script(tmp_path):
    model = MadeModel([{"embed.weight": torch.rand(10, 4)}])
    write_universal(tmp_path / "run", model, Zero(stage=2))
    whole = {"param": model.trained["embed.weight"][:9].clone(), "cat_dim": 0, "vocab_tensor": True}
    torch.save(whole, tmp_path / "run" / "global_step2_universal" / "zero" / "embed.weight" / "fp32.pt")
    got = gathered(tmp_path / "run", tmp_path / "out")
    assert_same(got, {"embed.weight": model.trained["embed.weight"][:9]})


# ---- what comes of it


def test_a_cast_while_copying(tmp_path):
    model = made_model()
    write_zero(tmp_path / "run", model)
    got = gathered(tmp_path / "run", tmp_path / "out", dtype="bf16", keep_fp32=["norm.weight"])
    want = {
        name: tensor if name == "norm.weight" or not tensor.is_floating_point() else tensor.bfloat16()
        for name, tensor in model.expected.items()
    }
    assert_same(got, want)


def test_ties_are_said_and_written_once(tmp_path):
    write_zero(tmp_path / "run", made_model())
    assert gather_checkpoint(tmp_path / "run", tmp_path / "out").output["tied"] == [["embed.weight", "head.weight"]]
    got = gathered(tmp_path / "run", tmp_path / "alone", exclude=["embed.weight"])
    assert torch.equal(got["head.weight"], made_model().trained["embed.weight"])


def test_a_config_that_ties_the_same_names_the_other_way_loses_neither(tmp_path):
    model = MadeModel([{"lm_head.weight": torch.rand(5, 3)}], shared={"embed_tokens.weight": "lm_head.weight"})
    write_zero(tmp_path / "run", model)
    (tmp_path / "run" / "config.json").write_text('{"tie_word_embeddings": true}')
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)


def test_parameters_without_an_optimizer_are_taken_as_stored(tmp_path):
    """Stage 1 records nothing of them; zero_to_fp32 loses them."""
    model = made_model()
    write_zero(tmp_path / "run", model, Zero(stage=1))
    report = gather_checkpoint(tmp_path / "run", tmp_path / "out")
    assert ("not-trained", "3 parameters have no fp32 weights; their stored values are used") in report.notes
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["tiny"], model.frozen["tiny"])


def test_frozen_parameters_that_stage_3_was_kept_from_cutting(tmp_path):
    model = made_model()
    write_zero(tmp_path / "run", model)
    for file in (tmp_path / "run" / "global_step2").glob("*model_states.pt"):
        state = torch.load(file)
        state["frozen_param_fragments"]["frozen.weight"] = model.frozen["frozen.weight"]
        torch.save(state, file)
    assert_same(gathered(tmp_path / "run", tmp_path / "out"), model.expected)


def test_what_no_tensor_is_is_left_out_and_said(tmp_path):
    model = made_model()
    write_zero(tmp_path / "run", model, Zero(stage=2))
    file = tmp_path / "run" / "global_step2" / "mp_rank_00_model_states.pt"
    state = torch.load(file)
    state["module"]["_extra_state"] = b"scales"
    state["buffer_names"].append("gone")
    torch.save(state, file)
    report = gather_checkpoint(tmp_path / "run", tmp_path / "out")
    assert {code for code, _ in report.notes} >= {"no-tensors", "absent-buffers"}
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), model.expected)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_of_a_class_of_its_own_is_not_left_out(tmp_path, stage):
    write_zero(tmp_path / "run", made_model(), Zero(stage=stage))
    sparse = torch.eye(3).to_sparse()
    changed(modules(tmp_path / "run"), lambda state: state["module"].update({"own": sparse, "a._extra_state": sparse}))
    assert refused(tmp_path / "run", UsageError, "own is an object of", "_rebuild_sparse_tensor").tensor == "own"
    changed(modules(tmp_path / "run"), lambda state: state["module"].pop("own"))
    gathered(tmp_path / "run", tmp_path / "out")


def test_found_from_every_folder(tmp_path):
    model = made_model()
    trainer = tmp_path / "output" / "checkpoint-2000"
    write_zero(trainer, model)
    (trainer / "zero_to_fp32.py").write_text("")
    for number, path in enumerate((trainer, trainer / "global_step2", tmp_path / "output", tmp_path)):
        out = tmp_path.parent / f"{tmp_path.name}-out-{number}"
        assert_same(gathered(path, out), model.expected)
        shutil.rmtree(out)
    write_zero(tmp_path / "output" / "checkpoint-3000", model)
    with pytest.raises(UsageError, match="several sources"):
        gather_checkpoint(tmp_path / "output", tmp_path / "out")


def test_inspect(tmp_path):
    write_zero(tmp_path / "run", made_model())
    report = inspect_source(tmp_path / "run")
    assert report.details["format"] == {
        "tag": "global_step2", "stage": "ZeRO 3", "DeepSpeed": "0.19.8", "partitions": 3, "groups": 3, "frozen": 3,
        "buffers": 3, "shared": {"head.weight": "embed.weight"},
    }  # fmt: skip
    source = report.source
    assert (source["step"], source["world_size"], source["num_tensors"]) == (2, 3, len(made_model().expected))
    assert source["num_parameters"] == sum(tensor.numel() for tensor in made_model().expected.values())
    sizes = [file.stat().st_size for file in (tmp_path / "run" / "global_step2").iterdir()]
    assert source["nbytes"] + source["skipped_nbytes"] == sum(sizes)
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "run")]).output
    assert "ZeRO 3" in shown and "head.weight: embed.weight" in shown
    (tmp_path / "run" / "global_step2" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "run")]).output
    assert "rank 1 of 3 wrote no" in shown and "exit 3" in shown


# ---- refusals

TAG = "global_step2"


def refused(source: Path, kind: type[XrankError], *words: str) -> XrankError:
    out = source.parent / "refused"
    with pytest.raises(kind) as caught:
        gather_checkpoint(source, out)
    error = caught.value
    assert type(error) is kind and not out.exists()
    text = f"{error} | {error.got} | {error.want} | {error.next_step}"
    for word in words:
        assert word in text, text
    assert error.next_step
    return error


def partition(run: Path, rank: int) -> Path:
    return run / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def modules(run: Path, rank: int | None = None) -> Path:
    return run / TAG / f"{'mp_rank_00' if rank is None else f'zero_pp_rank_{rank}_mp_rank_00'}_model_states.pt"


def saved_as(file: Path, content: bytes, rank: int) -> None:
    """Put a rank's content in another's file as if it had been saved there: as a program may that gives no name."""
    own = re.search(r"pp_rank_\d_mp", file.name)
    assert own is not None
    file.write_bytes(content.replace(f"pp_rank_{rank}_mp".encode(), own[0].encode()))


def changed(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a file of plain values holds."""
    state = torch.load(file)
    change(state)
    torch.save(state, file)


@pytest.mark.parametrize("stage", [2, 3])
def test_missing_ranks(tmp_path, stage):
    write_zero(tmp_path / "run", made_model(), Zero(stage=stage, num_ranks=4))
    partition(tmp_path / "run", 2).unlink()
    error = refused(tmp_path / "run", IncompleteError, "rank 2 of 4", "ranks 0-1, 3")
    assert (error.rank, error.file) == (2, str(partition(tmp_path / "run", 2)))
    partition(tmp_path / "run", 0).unlink()
    assert refused(tmp_path / "run", IncompleteError, "ranks 0, 2 of 4", "nodes without a shared disk").rank == 0
    for rank in (1, 3):
        partition(tmp_path / "run", rank).unlink()
    refused(tmp_path / "run", IncompleteError, "with the fp32 weights")


def test_missing_model_states(tmp_path):
    write_zero(tmp_path / "three", made_model())
    modules(tmp_path / "three", 1).unlink()
    assert refused(tmp_path / "three", IncompleteError, "rank 1 of 3").file == str(modules(tmp_path / "three", 1))
    write_zero(tmp_path / "two", made_model(), Zero(stage=2))
    modules(tmp_path / "two").unlink()
    refused(tmp_path / "two", IncompleteError, "mp_rank_00_model_states.pt")


def test_files_of_another_world(tmp_path):
    run = tmp_path / "run"
    write_zero(run, made_model())
    shutil.copy(partition(run, 0), partition(run, 3))
    assert refused(run, ContradictionError, "rank 3", "3 partitions").rank == 3
    partition(run, 3).unlink()
    shutil.copy(partition(run, 1), run / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    refused(run, ContradictionError, "both belong to rank 1")
    (run / TAG / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    write_zero(tmp_path / "other", made_model(), Zero(stage=2))
    shutil.copy(modules(tmp_path / "other"), modules(run))
    refused(run, ContradictionError, "stage 3", "to a different stage")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_steps_file_is_seen(tmp_path, stage):
    """By the iteration of the loss scaler, Adam's step (its checksum), the learning rate: each of them is enough."""
    write_zero(tmp_path / "run", made_model(0), Zero(stage=stage))
    write_zero(tmp_path / "other", made_model(1), Zero(stage=stage, step=3))
    shutil.copy(
        tmp_path / "other" / "global_step3" / partition(tmp_path, 1).name,
        partition(tmp_path / "run", 1),
    )
    refused(tmp_path / "run", ContradictionError, "not from the same save", "differs")


def test_another_steps_model_states_are_seen(tmp_path):
    write_zero(tmp_path / "run", made_model(0))
    write_zero(tmp_path / "other", made_model(1), Zero(step=3))
    shutil.copy(tmp_path / "other" / "global_step3" / modules(tmp_path, 1).name, modules(tmp_path / "run", 1))
    refused(tmp_path / "run", ContradictionError, "global_steps differs")


@pytest.mark.parametrize("stage", [2, 3])
def test_all_model_states_of_another_step_are_told(tmp_path, stage):
    """No field ties them to the optimizer, but both count steps; an optimizer may have been begun anew, never ahead."""
    run = tmp_path / "run"
    write_zero(run, made_model(0), Zero(stage=stage))
    assert "another-step" not in inspected(run)
    write_zero(tmp_path / "other", made_model(1), Zero(stage=stage, step=3))
    for file in (tmp_path / "other").glob("*/*model_states.pt"):
        shutil.copy(file, run / TAG)
    assert "are of step 3" in inspected(run) and "has not taken the 3 steps" in inspected(run)
    groups = {"state": {}, "param_groups": [{"lr": 0.1, "step": 4}]}
    key = "base_optimizer_state" if stage == 2 else "optimizer_state_dict"
    write_zero(tmp_path / "ahead", made_model(), Zero(stage=stage, changed_optimizer={key: groups}))
    refused(tmp_path / "ahead", ContradictionError, "an earlier step than the optimizer states", "4 or more")


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_beyond_every_float_is_told(tmp_path, stage):
    write_zero(tmp_path / "run", made_model(), Zero(stage=stage, changed_state={"global_steps": 1 << 2000}))
    told = inspected(tmp_path / "run")
    assert "the model states in it are of step 114,813" in told
    assert ("the optimizer has not taken the 114,813" in told) == (stage == 2)


@pytest.mark.parametrize("config", [{"train_batch_size": 16}, {"zero_optimization": {"stage": 1}}])
def test_model_states_of_another_configuration_are_seen(tmp_path, config):
    kept = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    write_zero(tmp_path / "run", made_model(), Zero(stage=2, changed_state={"ds_config": {**kept, **config}}))
    refused(tmp_path / "run", ContradictionError, "not from the same save", f"ds_config.{next(iter(config))}")


def inspected(run: Path) -> str:
    report = inspect_source(run)
    return str([report.notes, report.details["problems"]])


def test_only_the_step_tells(tmp_path):
    """The step is a tensor: its checksum tells it without a byte of it being read."""
    run = tmp_path / "run"
    write_zero(
        run, made_model(), Zero(stage=1, is_bf16_optimizer=True, changed_optimizer={"param_slice_mappings": None})
    )

    def later(state: dict[str, Any]) -> None:
        for moments in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            moments["step"] += 1

    changed(partition(run, 1), later)
    refused(run, ContradictionError, "state.0.step differs")


@pytest.mark.parametrize("way", ["zero3", "zero2", "zero2 of old"])
def test_another_ranks_file_is_seen(tmp_path, way):
    run = tmp_path / "run"
    model = MadeModel([{"a": torch.rand(9, 8)}])  # no padding, so that old files are of one size
    write_zero(run, model, replace(WAYS[way], prefix="bf16_", suffix="_optim_states.pt"))
    saved_as(partition(run, 1), partition(run, 0).read_bytes(), 0)
    error = refused(run, ContradictionError, "is a copy of rank 0's file")
    assert (error.rank, error.file) == (1, str(partition(run, 1)))


def test_exchanged_files_of_stage_2_are_seen(tmp_path):
    run = tmp_path / "run"
    write_zero(run, made_model(), Zero(stage=2, num_ranks=4))
    one, two = partition(run, 1).read_bytes(), partition(run, 2).read_bytes()
    saved_as(partition(run, 1), two, 2)
    saved_as(partition(run, 2), one, 1)
    assert refused(run, ContradictionError, "holds rank 2's partition of group 0").rank == 1


@pytest.mark.parametrize("file", [partition, modules])
def test_a_file_bears_the_name_it_was_saved_under(tmp_path, file):
    run = tmp_path / "run"
    write_zero(run, made_model())
    one, two = file(run, 1).read_bytes(), file(run, 2).read_bytes()
    file(run, 1).write_bytes(two)
    file(run, 2).write_bytes(one)
    error = refused(run, ContradictionError, "renamed or copied", f"saved as {file(run, 2).name}")
    assert (error.rank, error.file) == (1, str(file(run, 1)))


def test_exchanged_files_of_stage_3_that_bear_no_name_are_not_seen(tmp_path):
    """A swap of partitions is invisible: stage 3 does not record a partition's rank. (docs/formats.md, table.)"""
    run = tmp_path / "run"
    write_zero(run, made_model())
    one, two = partition(run, 1).read_bytes(), partition(run, 2).read_bytes()
    saved_as(partition(run, 1), two, 2)
    saved_as(partition(run, 2), one, 1)
    got = gathered(run, tmp_path / "out")
    assert not torch.equal(got["embed.weight"], made_model().trained["embed.weight"])


def test_a_copy_of_frozen_pieces_is_seen_and_ones_are_no_copy(tmp_path):
    run = tmp_path / "run"
    model = made_model()
    model.frozen = {"norm.weight": torch.ones(12).bfloat16(), "norm.bias": torch.zeros(12).bfloat16()}
    model.buffers = {}
    write_zero(run, model)
    assert_same(gathered(run, tmp_path / "out"), model.expected)
    model.frozen["frozen.weight"] = torch.rand(6, 4).bfloat16()
    write_zero(tmp_path / "other", model)
    saved_as(modules(tmp_path / "other", 2), modules(tmp_path / "other", 1).read_bytes(), 1)
    refused(tmp_path / "other", ContradictionError, "is a copy of rank 1's file")


def test_pieces_that_do_not_fit(tmp_path):
    run = tmp_path / "run"
    for stage, key in ((3, "fp32_flat_groups"), (2, "single_partition_of_fp32_groups")):
        write_zero(
            run,
            made_model(),
            Zero(
                stage=stage, changed_optimizer={"zero_stage": stage, "loss_scaler": None, "param_slice_mappings": None}
            ),
        )

        def shorter(state: dict[str, Any], key: str = key) -> None:
            state["optimizer_state_dict"][key][0] = state["optimizer_state_dict"][key][0][:-1].clone()

        changed(partition(run, 1), shorter)
        assert refused(run, ContradictionError, "do not fit the model states").rank == 1

        def square(state: dict[str, Any], key: str = key) -> None:
            state["optimizer_state_dict"][key][0] = torch.rand(2, 2)

        changed(partition(run, 1), square)
        refused(run, CorruptError, "not a row of elements")

        def half(state: dict[str, Any], key: str = key) -> None:
            state["optimizer_state_dict"][key][0] = torch.rand(30).bfloat16()

        changed(partition(run, 1), half)
        refused(run, ContradictionError, "a different type")
        changed(partition(run, 1), lambda state, key=key: state["optimizer_state_dict"][key].pop())
        refused(run, ContradictionError, "different groups than rank 0")
        shutil.rmtree(run)


@pytest.mark.parametrize(("stage", "changes", "kind", "words"), [
    (2, {"mp_world_size": 2}, UsageError, ("2 slices", "ds_to_universal")),
    (3, {"dp_world_size": 8}, ContradictionError, ("dp_world_size 8", "MiCS")),
    (2, {"module": None, "x": 1}, CorruptError, ("no module",)),
    (2, {"num_experts": [8]}, IncompleteError, ("layer_0_expert_0_mp_rank_00_model_states.pt",)),
    (2, {"num_experts": ["8"]}, CorruptError, ("num_experts",)),
    (2, {"ds_autoep_layers": [{"a": 1}]}, UsageError, ("experts of AutoEP are", "export_model")),
    (2, {"param_shapes": [{"a": "b"}]}, CorruptError, ("invalid shape",)),
    (2, {"param_shapes": [{"a": torch.Size([2])}, {"a": torch.Size([2])}]}, CorruptError, ("two groups",)),
    (2, {"param_shapes": 3}, CorruptError, ("param_shapes",)),
    (2, {"param_shapes": [{"embed.weight": torch.Size([6, 11])}]}, ContradictionError, ("embed.weight", "[6, 11]")),
    (2, {"buffer_names": 7}, CorruptError, ("buffer_names",)),
    (2, {"shared_params": {"a": 1}}, CorruptError, ("shared_params",)),
    (2, {"frozen_param_fragments": {"a": 1}}, CorruptError, ("not a tensor",)),
    (3, {"frozen_param_fragments": None}, ContradictionError, ("frozen.weight", "exclude_frozen_parameters")),
    (3, dict.fromkeys(("frozen_param_fragments", "frozen_param_shapes")), ContradictionError, ("no data for it",)),
    (3, {"buffer_names": []}, None, ()),
])  # fmt: skip
def test_model_states_that_do_not_fit(tmp_path, stage, changes, kind, words):
    write_zero(tmp_path / "run", made_model(), Zero(stage=stage, changed_state=changes))
    if kind is None:  # real tensors that no list names: stage 3 keeps parameters out of the partitions, too
        kind, words = ContradictionError, ("lists mean", "contains no data for it")
    refused(tmp_path / "run", kind, *words)


@pytest.mark.parametrize(("stage", "changes", "kind", "words"), [
    (2, {"partition_count": [3, 1]}, CorruptError, ("different numbers of partitions", "(3, 1)")),
    (2, {"partition_count": "three"}, CorruptError, ("partition_count",)),
    (2, {"partition_count": [0]}, CorruptError, ("partition_count",)),
    (2, {"single_partition_of_fp32_groups": None}, UsageError, ("no fp32 weights",)),
    (3, {"fp32_flat_groups": [1, 2]}, CorruptError, ("not tensors",)),
    (2, {"param_alignment_paddings": [[1], [2]]}, ContradictionError, ("paddings",)),
    (2, {"param_alignment_paddings": [[0, 0, 0, 0]]}, ContradictionError, ("0 paddings in group 1",)),
    (3, {"fp32_flat_groups": []}, ContradictionError, ("do not fit the model states",)),
    (2, {"param_alignment_paddings": [[0, 0, 0, -1]]}, CorruptError, ("param_alignment_paddings",)),
    (2, {"group_paddings": [1, 1], "param_slice_mappings": None}, ContradictionError, ("padding",)),
    (2, {"param_slice_mappings": [{"a": 1}]}, CorruptError, ("address",)),
    (2, {"zero_stage": "two"}, CorruptError, ("zero_stage",)),
])  # fmt: skip
def test_partitions_that_do_not_fit(tmp_path, stage, changes, kind, words):
    write_zero(tmp_path / "run", made_model(), Zero(stage=stage, changed_optimizer=changes))
    refused(tmp_path / "run", kind, *words)


def test_weights_on_nvme_are_said(tmp_path):
    write_zero(tmp_path / "run", made_model(), Zero(changed_optimizer={"fp32_flat_groups": [torch.empty(0)]}))
    (tmp_path / "run" / TAG / "offloaded_tensors" / "rank00").mkdir(parents=True)
    refused(tmp_path / "run", ContradictionError, "NVMe")


def test_quantized_frozen_weights(tmp_path):
    write_zero(tmp_path / "run", made_model())
    for rank in range(3):
        changed(
            modules(tmp_path / "run", rank),
            lambda state: state["frozen_param_fragments"].update({"frozen.weight": torch.zeros(12, dtype=torch.int8)}),
        )
    refused(tmp_path / "run", UsageError, "frozen.weight", "zero_quantized_nontrainable_weights")


def test_ranks_whose_model_states_differ(tmp_path):
    for number, (change, words) in enumerate([
        (lambda s: s["param_shapes"].pop(), "the shapes of trained"),
        (lambda s: s["frozen_param_shapes"].popitem(), "the shapes of frozen"),
        (lambda s: s["buffer_names"].pop(), "buffers"),
        (lambda s: s["module"].popitem(), "names"),
        (lambda s: s["shared_params"].update({"a": "b"}), "ties"),
        (lambda s: s["frozen_param_fragments"].update({"frozen.weight": torch.rand(5)}), "a piece of frozen.weight"),
        (lambda s: s["module"].update({"mean": torch.rand(4)}), "mean: ranks 0 and 1 disagree"),
        (lambda s: s["module"].update({"mean": torch.rand(3)}), "mean"),  # the values: seen while they are copied
    ]):  # fmt: skip
        run = tmp_path / str(number)
        write_zero(run, made_model())
        changed(modules(run, 1), change)
        refused(run, ContradictionError, words)


def test_buffers_that_differ_can_be_picked(tmp_path):
    """A BatchNorm's running mean is each rank's own: the user says which, and the difference is in the manifest."""
    write_zero(tmp_path / "run", made_model())
    changed(modules(tmp_path / "run", 1), lambda state: state["module"].update({"mean": torch.rand(3)}))
    got = gathered(tmp_path / "run", tmp_path / "out", replicas="pick")
    assert torch.equal(got["mean"], made_model().buffers["mean"])
    assert "mean" in json.dumps(json.loads((tmp_path / "out" / "xrank_manifest.json").read_text()))


@pytest.mark.parametrize(("name", "words"), [
    ("mp_rank_01_model_states.pt", ("tensor-parallel", "ds_to_universal")),
    ("zero_pp_rank_0_mp_rank_01_optim_states.pt", ("tensor-parallel", "ds_to_universal")),
    ("layer_00-model_01-model_states.pt", ("tensor-parallel", "ds_to_universal")),
    ("layer_00-rows_00-model_states.pt", ("tensor-parallel", "ds_to_universal")),
    ("layer_0_expert_0_mp_rank_01_model_states.pt", ("tensor-parallel", "ds_to_universal")),
])  # fmt: skip
def test_other_kinds_of_parallelism_are_refused_by_name(tmp_path, name, words):
    write_zero(tmp_path / "run", made_model(), Zero(stage=2))
    (tmp_path / "run" / TAG / name).write_bytes(b"")
    refused(tmp_path / "run", UsageError, name, *words)


# ---- markers and names that lead elsewhere


@pytest.mark.parametrize(("tag", "kind"), [
    ("../elsewhere", UnsafeError), ("/tmp", UnsafeError), ("..", UnsafeError), (".", UnsafeError),
    ("a/b", UnsafeError), ("a\0b", UnsafeError), ("a\nb", UnsafeError), ("", CorruptError), ("x" * 300, CorruptError),
    ("global_step9", IncompleteError),
])  # fmt: skip
def test_a_marker_that_leads_elsewhere(tmp_path, tag, kind):
    write_zero(tmp_path / "elsewhere", made_model())
    write_zero(tmp_path / "run", made_model())
    (tmp_path / "run" / "latest").write_text(tag)
    assert str(tmp_path / "run" / "latest") in str(refused(tmp_path / "run", kind))


def test_a_marker_that_is_no_text(tmp_path):
    write_zero(tmp_path / "run", made_model())
    (tmp_path / "run" / "latest").write_bytes(b"\xff\xfe")
    refused(tmp_path / "run", CorruptError, "not a tag")


def test_two_markers_are_a_choice(tmp_path):
    write_zero(tmp_path / "run", made_model())
    write_universal(tmp_path / "run", made_model(), Zero())
    refused(tmp_path / "run", UsageError, "global_step2 and global_step2_universal")
    assert_same(gathered(tmp_path / "run" / "global_step2_universal", tmp_path / "out"), made_model().expected)


def test_another_programs_latest_is_no_checkpoint(tmp_path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("logs")
    with pytest.raises(UnknownFormatError, match="has no known format"):
        gather_checkpoint(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("name", ["../../../elsewhere", "a/b", "..", ""])
def test_a_parameters_name_that_leads_elsewhere(tmp_path, name):
    write_universal(tmp_path / "run", made_model(), Zero(stage=2))
    place = tmp_path / "run" / "global_step2_universal"
    changed(
        place / "mp_rank_00_model_states.pt", lambda state: state["param_shapes"][0].update({name: torch.Size([2])})
    )
    refused(tmp_path / "run", UnsafeError, "not the name of a folder")


def test_universal_checkpoints_that_do_not_fit(tmp_path):
    write_universal(tmp_path / "run", made_model(), Zero(stage=2))
    place = tmp_path / "run" / "global_step2_universal"
    weight = place / "zero" / "up.weight" / "fp32.pt"
    content = torch.load(weight)
    torch.save({"param": content["param"].T.contiguous()}, weight)
    assert refused(tmp_path / "run", ContradictionError, "does not have the shape", "[6, 7]").tensor == "up.weight"
    torch.save({"param": [1]}, weight)
    refused(tmp_path / "run", CorruptError, "no tensor")
    shutil.copy(weight.with_name("exp_avg.pt"), weight)
    refused(tmp_path / "run", ContradictionError, "saved as 'exp_avg'")
    weight.unlink()
    assert refused(tmp_path / "run", IncompleteError, "is missing").file == str(weight)
    torch.save(content, weight)
    state = torch.load(place / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save({**state, "mp_world_size": 2}, place / f"mp_rank_{rank:02d}_model_states.pt")
    refused(tmp_path / "run", UsageError, "several slices")
