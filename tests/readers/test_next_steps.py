"""The advice of readers, followed mechanically: it gives one of the models that lie there, or another refusal.

Two runs of different sizes lie in one folder, as a second save into it leaves them. The user of an advice to move
files away may move any of them, so that every subset is tried. The names alone must never let a part of a model, or a
mixture of two, pass for a model.
"""

from __future__ import annotations

import ast
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import xrank
from tests.commands.made_workspaces import leave
from tests.readers.made_megatron import Run, whole_model, write_legacy
from tests.readers.made_zero import Zero, made_model, write_universal, write_zero
from tests.readers.made_zero_parts import MadePipeline, made_experts, write_experts, write_pipeline
from tests.test_error_texts import errors_made, texts, tree_of
from xrank.commands.gather import gather_checkpoint
from xrank.errors import XrankError
from xrank.layout import DeviceMesh
from xrank.readers.records import ONE_SAVE
from xrank.testing.rank_pool import RankPool
from xrank.testing.reader_contract import WholeTensor, read_model, whole

Model = Mapping[str, torch.Tensor]
READERS = Path(xrank.__file__).parent / "readers"


@dataclass
class Case:
    """A folder that is refused, and the models of which it holds files."""

    folder: Path
    models: Sequence[Mapping[str, WholeTensor]]
    options: Mapping[str, Any] = field(default_factory=dict)
    is_read: bool = False
    """Whether the whole folder is read as one of the models: the format records the files of a save."""
    unseen: Collection[str] = ()
    """Files that are taken for a model where they alone are left; no advice leads there."""
    again: Path | None = None
    """The folder of the second run alone, whose model is the last one."""

    def gather(self, out: Path, source: Path | None = None) -> XrankError | None:
        """Return the error of a gather; None after one of the models."""
        try:
            gather_checkpoint(source or self.folder, out, recipe="none", **self.options)
        except XrankError as error:
            assert not out.exists()
            return error
        found = read_model(out)
        shutil.rmtree(out)
        assert found in list(self.models), f"another model: {found}"
        return None


def model_of(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(32.0).reshape(8, 4) + 100 * seed, "b": torch.arange(8.0) + 10 * seed}


def wholes(model: Model) -> dict[str, WholeTensor]:
    return {name: whole(tensor) for name, tensor in model.items()}


def merge(winner: Path, loser: Path) -> Path:
    """Copy into a folder the entries of another one whose names it does not have."""
    for entry in loser.iterdir():
        if entry.is_dir() and (winner / entry.name).is_dir():
            merge(winner / entry.name, entry)
        elif not (winner / entry.name).exists():
            (shutil.copytree if entry.is_dir() else shutil.copy)(entry, winner / entry.name)
    return winner


# ---- runs of ranks


def save_ranks(folder: str, kind: str, seed: int) -> None:
    """Save the model of a seed, its rows cut, on every rank of a world."""
    warnings.simplefilter("ignore")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model_of(seed).items()}
    match kind:
        case "dcp":
            dcp.save(state, storage_writer=FileSystemWriter(folder))
        case "hf-shards":
            mapping = dict.fromkeys(state, 1) if seed < 3 else {"w": 1, "b": 2}
            dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, mapping, save_distributed=True))
        case _:
            torch.save(state, f"{folder}/{kind.format(rank=rank, world=world_size)}")


NAMES = {
    "verl": "model_world_size_{world}_rank_{rank}.pt",
    "accelerate-ranks": "pytorch_model_fsdp_rank{rank}.bin",
    "torch-checkpointing": "model_{rank}.pt",
    "dcp": "dcp",
    "hf-shards": "hf-shards",
}
SIZES = [(2, 4), (4, 2)]


def two_runs(pool: RankPool, room: Path, name: str, sizes: tuple[int, int], seeds: tuple[int, int] = (1, 2)) -> Case:
    """Let two worlds save into one folder; where names are equal, the first one's files stay."""
    for number, (world_size, seed) in enumerate(zip(sizes, seeds, strict=True)):
        (room / str(number)).mkdir()
        pool.run(world_size, save_ranks, str(room / str(number)), NAMES[name], seed)
    (room / "base").mkdir()
    save_file({n: torch.zeros_like(t) for n, t in model_of(0).items()}, room / "base" / "model.safetensors")
    options = {"base_model": room / "base"} if name == "hf-shards" else {}
    models = [wholes(model_of(seed)) for seed in seeds]
    folder = merge(room / "0", room / "1")
    return Case(folder, models, options, is_read=name == "dcp", again=room / "1")


# ---- runs that one process writes


def workspaces(room: Path, sizes: tuple[int, int]) -> Case:
    models, layouts = [model_of(seed) for seed in range(2)], {"w": "[a/tp, b]", "b": "[c]"}
    for number, (size, model) in enumerate(zip(sizes, models, strict=True)):
        mesh = DeviceMesh((size,), ("tp",))
        leave(room / str(number), model, layouts=layouts, mesh=mesh, run_id=f"run-{number}")
    return Case(merge(room / "0", room / "1"), [wholes(model) for model in models], again=room / "1")


def zeros(room: Path, one: Zero, other: Zero) -> Case:
    models = [made_model(seed) for seed in range(2)]
    for number, (model, how) in enumerate(zip(models, (one, other), strict=True)):
        write_zero(room / str(number), model, how)
    # Plain files of one process: frozen and shared tensors take part, buffers do not matter.
    return merge_steps(room, "global_step2", [wholes(model.expected) for model in models])


def merge_steps(room: Path, name: str, models: Sequence[Mapping[str, WholeTensor]]) -> Case:
    again = room / "1" / name
    return Case(merge(room / "0" / name, again), models, again=again)


def universal(room: Path) -> Case:
    models = [made_model(seed) for seed in range(2)]
    write_zero(room / "1", models[1], Zero(stage=2, num_ranks=2))
    write_zero(room / "0", models[0], Zero(stage=2, num_ranks=2))
    write_universal(room / "0", models[0], Zero(stage=2, num_ranks=2))
    (place,) = (path for path in (room / "0").iterdir() if (path / "zero").is_dir())
    return Case(merge(place, room / "1" / "global_step2"), [wholes(model.expected) for model in models])


def pipelines(room: Path) -> Case:
    """A pipeline of two stages, into whose folder one of three had been saved."""
    models = []
    for number, num_stages in enumerate((2, 3)):
        names = [f"{layer}.weight" for layer in range(num_stages)]
        stages = [[{name: torch.full((2, 3), 10.0 * number + layer)}] for layer, name in enumerate(names)]
        model = MadePipeline(stages, {layer: f"{layer}." for layer in range(num_stages)}, buffers=[{}] * num_stages)
        # As if the larger run had recorded the smaller one's number: else it is known by that.
        write_pipeline(room / str(number), model, Zero(stage=0, changed_state={"mp_world_size": 2}))
        models.append(model)
    return merge_steps(room, "global_step2", [wholes(model.expected) for model in models])


def experts(room: Path) -> Case:
    """A model with two experts, into whose folder one with four had been saved."""
    made = [made_experts(seed) for seed in range(2)]
    few = replace(made[0], experts=made[0].experts[:2], untrained=made[0].untrained[:2])
    write_experts(room / "0", few, Zero(stage=1, num_ranks=2, changed_state={"num_experts": [2]}))
    write_experts(room / "1", made[1], Zero(stage=1, num_ranks=2))
    return merge_steps(room, "global_step2", [wholes(few.expected), wholes(made[1].expected)])


def megatrons(room: Path, *runs: Run) -> Case:
    models = []
    for number, run in enumerate(runs):
        model = {name: tensor + number for name, tensor in whole_model(run).items()}
        models.append(wholes(model))
        write_legacy(room / str(number), run, model)
    return merge_steps(room, "iter_0000010", models)


def weights(room: Path, files: Mapping[str, Model], models: Sequence[Model], index: Sequence[str] = ()) -> Case:
    """Write weight files; `index` names those that an index lists."""
    (room / "model").mkdir()
    for name, state in files.items():
        if name.endswith(".safetensors"):
            save_file({key: tensor.clone() for key, tensor in state.items()}, room / "model" / name)
        else:
            torch.save(dict(state), room / "model" / name)
    if index:
        listed = {key: name for name in index for key in files[name]}
        stem = "pytorch_model.bin" if index[0].endswith(".bin") else "model.safetensors"
        (room / "model" / f"{stem}.index.json").write_text(repr({"weight_map": listed}).replace("'", '"'))
    return Case(room / "model", [wholes(model) for model in models])


def halves(seed: int) -> tuple[Model, Model]:
    """Return each rank's rows of a model."""
    rows = [{name: tensor.chunk(2)[rank] for name, tensor in model_of(seed).items()} for rank in range(2)]
    return rows[0], rows[1]


def parts(seed: int) -> list[Model]:
    return [{name: tensor} for name, tensor in model_of(seed).items()]


def make_weights(room: Path, name: str) -> Case:
    one, other = model_of(1), model_of(2)
    numbered = [f"{{}}-0000{k}-of-00002.{{}}" for k in (1, 2)]
    tensors = [text.format("model", "safetensors") for text in numbered]
    bins = [text.format("pytorch_model", "bin") for text in numbered]
    match name:
        case "safetensors: index and whole":
            files = {**dict(zip(tensors, parts(1), strict=True)), "model.safetensors": other}
            return weights(room, files, [one, other], tensors)
        case "bin: index and whole":
            files = {**dict(zip(bins, parts(1), strict=True)), "pytorch_model.bin": other}
            return weights(room, files, [one, other], bins)
        case "safetensors: two models":
            return weights(room, {"first.safetensors": one, "second.safetensors": other}, [one, other])
        case "bin: two models":
            return weights(room, {"pytorch_model_fsdp.bin": one, "pytorch_model_fsdp_1.bin": other}, [one, other])
        case "vllm":
            names = [f"model-rank-{rank}-part-0.safetensors" for rank in range(2)]
            return weights(room, dict(zip(names, halves(1), strict=True)), [])
        case "tensorrt-llm":
            return weights(room, dict(zip(["rank0.safetensors", "rank1.safetensors"], halves(1), strict=True)), [])
        case "meta's slices":
            whole_one = {"norm.weight": torch.rand(4), "layers.0.attention.wq.weight": torch.rand(4, 4)}
            slices = [
                {name: t if t.dim() == 1 else t[rows] for name, t in whole_one.items()} for rows in ([0, 1], [2, 3])
            ]
            return weights(room, dict(zip(["consolidated.00.pth", "consolidated.01.pth"], slices, strict=True)), [])
        case "torch_checkpointing without metadata":
            case = weights(room, dict(zip(["model_0.safetensors", "model_1.safetensors"], halves(1), strict=True)), [])
            return replace(case, unseen=["model_1.safetensors"])  # numbered as steps are, or accelerate's models
    raise AssertionError(name)


WEIGHTS = (
    "safetensors: index and whole",
    "bin: index and whole",
    "safetensors: two models",
    "bin: two models",
    "vllm",
    "tensorrt-llm",
    "meta's slices",
    "torch_checkpointing without metadata",
)
CASES: dict[str, Callable[[RankPool, Path], Case]] = {
    **{
        f"{name}, {one} and {other} ranks": lambda pool, room, name=name, sizes=(one, other): two_runs(
            pool, room, name, sizes
        )
        for name in NAMES
        for one, other in SIZES
        # Names that the smaller world leaves none of: the folder is the larger one's.
        if one < other or name in ("verl",)
    },
    "hf-shards, other files": lambda pool, room: two_runs(pool, room, "hf-shards", (2, 2), (1, 3)),
    **{
        f"workspace, {one} and {other} ranks": lambda pool, room, sizes=(one, other): workspaces(room, sizes)
        for one, other in [(2, 4), (2, 3)]
    },
    "deepspeed, stage 3": lambda pool, room: zeros(room, Zero(num_ranks=2), Zero(num_ranks=3)),
    "deepspeed, stage 2": lambda pool, room: zeros(room, Zero(stage=2, num_ranks=2), Zero(stage=2, num_ranks=3)),
    "deepspeed, stages 2 and 3": lambda pool, room: zeros(room, Zero(stage=2, num_ranks=2), Zero(num_ranks=2)),
    "deepspeed, prefixes": lambda pool, room: zeros(room, Zero(num_ranks=2), Zero(num_ranks=2, prefix="")),
    "deepspeed, pipelines": lambda pool, room: pipelines(room),
    "deepspeed, experts": lambda pool, room: experts(room),
    "deepspeed, universal": lambda pool, room: universal(room),
    "megatron-legacy, tp": lambda pool, room: megatrons(room, Run(tp=1), Run(tp=2)),
    "megatron-legacy, pp": lambda pool, room: megatrons(room, Run(tp=2, pp=1), Run(tp=2, pp=2, chunks=((1, 1),))),
    **{name: lambda pool, room, name=name: make_weights(room, name) for name in WEIGHTS},
}


MakeCase = Callable[[str], Case]


@pytest.fixture(scope="module")
def case_of(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> MakeCase:
    """Returns the case of a name, made once."""
    return cache(lambda name: CASES[name](rank_pool, tmp_path_factory.mktemp("case")))


# The records of these files were changed, so that they fit beside the other run.
UNREADABLE = ("workspace, 2 and 3 ranks", "deepspeed, pipelines")


def save_again(case: Case, name: str, tmp_path: Path) -> None:
    """Let all ranks of the second run write once more: into an empty folder, and over the files that were refused."""
    if case.again is not None:
        second = replace(case, models=case.models[-1:], folder=case.again)
        assert (second.gather(tmp_path / "out") is None) == (name not in UNREADABLE)
        folder = shutil.copytree(case.folder, tmp_path / "over")
        shutil.copytree(case.again, folder, dirs_exist_ok=True)
        replace(second, folder=folder).gather(tmp_path / "out")  # its own model, or another refusal


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_moved_away(case_of: MakeCase, tmp_path: Path, name: str) -> None:
    """Every set of files, where the advice is to move some, or where the names alone show that they are parts.

    The advice that all ranks write again is followed, too.
    """
    case = case_of(name)
    error = case.gather(tmp_path / "out")
    assert case.is_read == (error is None)
    save_again(case, name, tmp_path)
    if error is not None and ONE_SAVE in str(error.next_step):
        assert "move" not in str(error.next_step)
        return
    entries = sorted(entry.name for entry in case.folder.iterdir() if not entry.name.endswith(".json"))
    assert len(entries) <= 8
    (tmp_path / "away").mkdir()
    wrong = []
    for moved in (some for count in range(1, len(entries)) for some in combinations(entries, count)):
        for entry in moved:
            (case.folder / entry).rename(tmp_path / "away" / entry)
        try:
            case.gather(tmp_path / "out")
        except AssertionError:
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
            wrong.append(", ".join(sorted(set(entries) - set(moved))))
        finally:
            for entry in moved:
                (tmp_path / "away" / entry).rename(case.folder / entry)
    assert sorted(wrong) == sorted(case.unseen)


@pytest.fixture(scope="module")
def advice(case_of: MakeCase, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Name of a case -> the next step of its refusal."""
    out = tmp_path_factory.mktemp("advice") / "out"
    errors = {name: case_of(name).gather(out) for name in CASES}
    return {name: str(error.next_step) for name, error in errors.items() if error is not None}


def templates() -> set[str]:
    """Return the texts in the next steps of readers, {} for what is put in."""
    steps = (
        keyword.value
        for path in sorted(READERS.rglob("*.py"))
        for call in errors_made(tree_of(path))
        for keyword in call.keywords
        if keyword.arg == "next_step"
    )
    return {text for step in steps for text in texts(ast.Module([ast.Assign([], step)], []))}


def test_every_advice_to_move_files_has_a_case(advice: dict[str, str]) -> None:
    moving = [text for text in templates() if re.search(r"\bmove\b", text)]
    assert moving and [text for text in moving if not any(map(matches(text), advice.values()))] == []


def matches(template: str) -> Callable[[str], bool]:
    """Return whether a text has the words of a template, in their order."""
    pattern = ".*".join(map(re.escape, template.split("{}")))
    return lambda text: re.search(pattern, text) is not None


# ---- advice to give a path, or a format


def several_sources(pool: RankPool, room: Path) -> Case:
    one = two_runs(pool, room, "verl", (2, 2))
    (room / "run").mkdir()
    for number in range(2):
        (room / "run" / f"step_{number}").mkdir()
        pool.run(2, save_ranks, str(room / "run" / f"step_{number}"), NAMES["verl"], number + 1)
    return replace(one, folder=room / "run")


def several_models(pool: RankPool, room: Path) -> Case:
    for seed, kind in ((1, "pytorch_model_fsdp_rank{rank}.bin"), (2, "pytorch_model_fsdp_1_rank{rank}.bin")):
        pool.run(2, save_ranks, str(room), kind, seed)
    return Case(room, [wholes(model_of(seed)) for seed in (1, 2)])


def several_items(pool: RankPool, room: Path) -> Case:
    (room / "step_1").mkdir()
    for seed, item in ((1, "policy"), (2, "value"), (3, "model")):
        pool.run(2, save_ranks, str(room / "step_1"), f"{item}_{{rank}}.pt", seed)
    for rank in range(2):
        (room / "step_1" / f"model_{rank}.pt").unlink()
    content = {"metadata": {"optim": {"nested_path_to_metadata": {}, "rank_to_layout_info": {0: None, 1: None}}}}
    (room / "step_1" / "metadata.pkl").write_bytes(pickle.dumps({**content, "world_size": 2, "version": "2.0"}))
    return Case(room / "step_1", [wholes(model_of(seed)) for seed in (1, 2)])


def several_tags(pool: RankPool, room: Path) -> Case:
    models = [made_model(seed) for seed in range(2)]
    for number, model in enumerate(models):
        write_zero(room, model, Zero(num_ranks=2, step=number + 1))
    (room / "latest").unlink()
    return Case(room, [wholes(model.expected) for model in models])


def several_saves(pool: RankPool, room: Path) -> Case:
    return weights(room, {"first.pt": model_of(1), "second.pth": model_of(2)}, [model_of(1), model_of(2)])


def several_formats(pool: RankPool, room: Path) -> Case:
    for seed, name in ((1, "verl"), (2, "accelerate-ranks")):
        pool.run(2, save_ranks, str(room), NAMES[name], seed)
    return Case(room, [wholes(model_of(seed)) for seed in (1, 2)])


def trained_and_not(pool: RankPool, room: Path) -> Case:
    """A Trainer's folder of ZeRO-3, into which the base model's weights were copied."""
    trained = made_model(1)
    write_zero(room, trained, Zero(num_ranks=2))
    other = {name: tensor + 1 for name, tensor in {**trained.trained, **trained.buffers}.items()}
    save_file({name: tensor.contiguous() for name, tensor in other.items()}, room / "model.safetensors")
    return Case(room, [wholes(trained.expected), wholes(other)])


def components(pool: RankPool, room: Path) -> Case:
    """A pipeline of diffusers."""
    for seed, name in ((1, "transformer"), (2, "vae")):
        (room / "pipeline" / name).mkdir(parents=True)
        save_file(model_of(seed), room / "pipeline" / name / "diffusion_pytorch_model.safetensors")
    (room / "pipeline" / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    return Case(room / "pipeline", [wholes(model_of(seed)) for seed in (1, 2)])


def stages(pool: RankPool, room: Path) -> Case:
    """Stages of a pipeline that each saved into a folder of its own. Half a model passes, as nothing shows the rest."""
    models = [model_of(1), {f"{name}2": tensor for name, tensor in model_of(2).items()}]
    for number, model in enumerate(models):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a save without a process group
            dcp.save({"model": model}, checkpoint_id=room / "run" / f"stage_{number}", no_dist=True)
    return Case(room / "run", [*map(wholes, models), wholes(models[0]) | wholes(models[1])])


def test_stages_of_their_own_folders_are_joined_as_advised(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    case = stages(rank_pool, tmp_path / "room")
    error = case.gather(tmp_path / "out")
    assert error is not None and "put the outputs into one folder as model-00001-of-00002" in str(error.next_step)
    (tmp_path / "joined").mkdir()
    for number in range(2):
        gather_checkpoint(case.folder / f"stage_{number}", tmp_path / str(number))
        name = f"model-{number + 1:05d}-of-00002.safetensors"
        shutil.copy(tmp_path / str(number) / "model.safetensors", tmp_path / "joined" / name)
    gather_checkpoint(tmp_path / "joined", tmp_path / "out")
    assert read_model(tmp_path / "out") == case.models[2]
    (tmp_path / "joined" / "model-00002-of-00002.safetensors").unlink()
    refusal = case.gather(tmp_path / "none", tmp_path / "joined")
    assert refusal is not None and refusal.exit_code == 3 and "model-00002-of-00002" in str(refusal)


def half_models(pool: RankPool, room: Path) -> Case:
    """Parts of one model under names that show no rank: the base model, which is advised too, shows it."""
    case = weights(room, dict(zip(["first.safetensors", "second.safetensors"], halves(1), strict=True)), [])
    (room / "base").mkdir()
    save_file(model_of(0), room / "base" / "model.safetensors")
    return replace(case, options={"base_model": room / "base"})


PATHS: dict[str, tuple[Callable[[RankPool, Path], Case], int]] = {
    **{name: (CASES[name], 1) for name in WEIGHTS if "two models" in name or "whole" in name},
    "several sources": (several_sources, 2),
    "several models": (several_models, 1),
    "several items": (several_items, 1),
    "several tags": (several_tags, 2),
    "several saves": (several_saves, 1),
    "half models": (half_models, 0),
    "components": (components, 2),
}
"""A maker, and how many of the paths that its refusal names give a model."""


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_advised(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    make, num_models = PATHS[name]
    (tmp_path / "room").mkdir()
    case = make(rank_pool, tmp_path / "room")
    error = case.gather(tmp_path / "out")
    assert error is not None and re.search("give .* as the path|give the path of", str(error.next_step)), error
    # Without a path in the advice, it means those that were found.
    found = re.findall(r"/[^ ,;]+", str(error.next_step)) or re.findall(r"/[^ ,;]+", str(error.got))
    paths = [Path(path) for path in found if Path(path).exists()]
    assert paths
    assert sum(case.gather(tmp_path / "out", path) is None for path in paths) == num_models


def test_every_advice_to_give_a_certain_path_has_a_case(rank_pool: RankPool, tmp_path: Path) -> None:
    given = []
    for number, (make, _) in enumerate(PATHS.values()):
        (tmp_path / str(number)).mkdir()
        given.append(
            str(error.next_step) if (error := make(rank_pool, tmp_path / str(number)).gather(tmp_path / "out")) else ""
        )
    naming = [text for text in templates() if re.search(r"give (the path of .*\{\}|\{\} as the path)", text)]
    assert naming and [text for text in naming if not any(map(matches(text), given))] == []


def parts_of_a_save(pool: RankPool, room: Path) -> Case:
    torch.save({"model": dict(model_of(1)), "ema": dict(model_of(2))}, room / "last.ckpt")
    return Case(room / "last.ckpt", [wholes(model_of(seed)) for seed in (1, 2)])


def parts_of_dcp(pool: RankPool, room: Path) -> Case:
    warnings.simplefilter("ignore")
    models = [{f"net.{name}": tensor for name, tensor in model_of(seed).items()} for seed in (1, 2)]
    dcp.save(dict(zip(["policy", "reference"], models, strict=True)), checkpoint_id=room / "run", no_dist=True)
    return Case(room / "run", [wholes(model) for model in models])


@pytest.mark.parametrize("make", [parts_of_a_save, parts_of_dcp])
def test_a_part_that_is_advised(rank_pool: RankPool, tmp_path: Path, make: Callable[[RankPool, Path], Case]) -> None:
    """Each of the parts is one of the models, and no two are the same."""
    (tmp_path / "room").mkdir()
    case = make(rank_pool, tmp_path / "room")
    error = case.gather(tmp_path / "out")
    parts = re.findall(r'part="([\w.]+)"', str(error.next_step)) if error is not None else []
    assert len(parts) == 2, error
    for part, model in zip(sorted(parts, reverse=make is parts_of_a_save), case.models, strict=True):
        assert replace(case, models=[model], options={"part": part}).gather(tmp_path / "out") is None


def test_a_number_of_ranks_that_is_advised(rank_pool: RankPool, tmp_path: Path) -> None:
    """Only the true number gives the model, and the error advises to give it."""
    rank_pool.run(3, save_ranks, str(tmp_path), "hf-shards", 1)
    case = Case(tmp_path, [wholes(model_of(1))])
    error = case.gather(tmp_path.parent / f"{tmp_path.name}.out")
    assert error is not None and "world_size=" in str(error.next_step), error
    numbers = [n for n in range(1, 9) if replace(case, options={"world_size": n}).gather(tmp_path.parent / "o") is None]
    assert numbers == [3]


@pytest.mark.parametrize("make", [several_formats, trained_and_not])
def test_a_format_that_is_advised(rank_pool: RankPool, tmp_path: Path, make: Callable[[RankPool, Path], Case]) -> None:
    (tmp_path / "room").mkdir()
    case = make(rank_pool, tmp_path / "room")
    error = case.gather(tmp_path / "out")
    assert error is not None and "choose one" in str(error.next_step), error
    names = re.findall(r'format="([\w-]+)"', str(error.next_step)) or str(error.got).split(", ")
    assert len(names) == 2
    for name in names:
        assert replace(case, options={"format": name}).gather(tmp_path / "out") is None
