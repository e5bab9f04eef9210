"""Lay out a training state as another framework loads it: torch DCP, torchtitan, accelerate, or DeepSpeed universal."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.engine.companions import CompanionFile
from xrank.engine.torch_files import Item, bare_file, lay_out_archive_file, lay_out_items, view
from xrank.errors import LayoutError, option
from xrank.formats.dcp_writing import SavedPiece, SavedValue, metadata_pickle
from xrank.formats.pickle_writing import size_value, write_pickle
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.output_files import OutputFile, OutputTensor, TensorPart
from xrank.layout.stored_model import StoredShard
from xrank.layout.tensor_layout import TensorLayout
from xrank.layout.training_state import MASTER, TrainingState
from xrank.readers.placement import Claim
from xrank.recipes.reshard_plan import new_parts
from xrank.storage.regular_file import Origin
from xrank.words import list_text, plural

StateTarget: TypeAlias = Literal["dcp", "torchtitan", "accelerate", "deepspeed-universal"]
Note: TypeAlias = tuple[str, str]
Path: TypeAlias = tuple[str | int, ...]

_BLOCK_NBYTES = 1 << 28
"""A rank that loads a part of a tensor reads all of an item: larger tensors become several items, of whole rows."""
_FILE_NBYTES = 5_000_000_000
_TORCH_DEFAULTS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
"""Options of torch's Adam and AdamW (torch/optim/adam.py) that other frameworks lack; dcp.load misses them."""
_OF_DEEPSPEED = frozenset(("ds_config", "skipped_steps", "global_samples", "universal_checkpoint_info"))
_DEEPSPEED = "0.19.8"
"""Version whose universal checkpoints are written, for sources of other frameworks."""


class Grid(Struct, frozen=True):
    """The ranks that a DCP checkpoint is cut for; any others can load it, too."""

    find_claim: Callable[[str, int], Claim]
    """Returns the cut of a parameter, by its name and number of dims."""

    @classmethod
    def of_axes(cls, dp: int, tp: int) -> Grid:
        """Return the grid that cuts the first dim over `dp` ranks, as FSDP2 does, and the second over `tp`."""
        mesh = DeviceMesh((dp, tp), ("dp", "tp"))

        def find_claim(name: str, num_dims: int) -> Claim:
            cuts = ["/~dp", "/~tp", *[""] * num_dims][:num_dims]
            text = ", ".join(f"d{i}{cut}" for i, cut in enumerate(cuts))
            return Claim(TensorLayout.parse(f"[{text}]", mesh), mesh)

        return cls(find_claim)


class TargetFiles(Struct):
    """The files of a target."""

    files: list[OutputFile] = field(default_factory=list)
    companions: list[CompanionFile] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


class _Saved(Struct, frozen=True):
    """A tensor of a state dict."""

    path: Path
    """Keys that lead to it."""
    tensor: StoredShard | float
    """The tensor, or the value of one of a single element."""
    parameter: str | None = None
    """Parameter that it is cut as; None: it is not cut."""


def lay_out_target(
    state: TrainingState, target: StateTarget, *, grid: Grid | None = None, tag: str | None = None
) -> TargetFiles:
    """Return the files of a target; each tensor of the state is in them once.

    Raises:
        UsageError: the target has no place for a part of the state.
        LayoutError: a cut of the grid is not a box.
    """
    made = TargetFiles()
    made.notes += _describe_losses(state, target)
    if target == "deepspeed-universal":
        _lay_out_universal(state, tag or f"global_step{find_step(state)}", made)
        _add_trainer_files(state, made)
        return made
    is_flat = target == "torchtitan"
    model = [_Saved((name,) if is_flat else ("model", name), shard, name) for name, shard in _list_model(state)]
    tensors, values = _list_optimizer(state, is_flat=is_flat)
    if target == "accelerate":
        made.files += _lay_out_dcp("pytorch_model_fsdp_0/", model, {}, grid)
        made.files += _lay_out_dcp("optimizer_0/", tensors, values, grid)
        _add_trainer_files(state, made)
        return made
    tensors += (_Saved(tuple(s.name.split(".")), s) for s in state.stored.shards if s.name in state.others)
    others = {key: value for key, value in state.values.items() if key not in _OF_DEEPSPEED}
    rest = _flatten((), _own_values(state) if is_flat else others)
    values |= {path: value for path, value in rest.items() if ".".join(map(str, path)) not in state.others}
    made.files += _lay_out_dcp("", [*model, *tensors], values, grid)
    return made


# ---- the content of a state


def find_step(state: TrainingState) -> int:
    """Return the number of steps of a training: the one that the source records, or the optimizer's."""
    recorded = state.values.get("global_steps")
    return recorded if isinstance(recorded, int) else int(max(state.steps.values(), default=0))


def _list_model(state: TrainingState) -> Iterator[tuple[str, StoredShard]]:
    """Yield each tensor of the model and the one that is written for it: the master of a parameter that has one."""
    shards = {shard.name: shard for shard in state.stored.shards}
    own = {name for kinds in state.states.values() for name in kinds.values()} | {*state.others}
    names = [name for name in shards if name not in own]
    for name in dict.fromkeys((*names, *(name for name, kinds in state.states.items() if MASTER in kinds))):
        kept = state.stored.aliases.get(name, name)
        yield name, shards[state.states.get(kept, {}).get(MASTER) or name]


def _moments(state: TrainingState) -> Iterator[tuple[str, str, StoredShard]]:
    shards = {shard.name: shard for shard in state.stored.shards}
    for name, kinds in state.states.items():
        yield from ((name, kind, shards[tensor]) for kind, tensor in kinds.items() if kind != MASTER)


def _group_options(state: TrainingState) -> list[dict[str, Any]]:
    found = []
    for group in state.groups:
        options = {**_TORCH_DEFAULTS, "decoupled_weight_decay": state.optimizer == "AdamW", **group.options}
        options.setdefault("weight_decay", 0.0)
        options.pop("param_names", None)
        options["betas"] = tuple(options["betas"])
        found.append(options)
    return found


def _list_optimizer(state: TrainingState, *, is_flat: bool) -> tuple[list[_Saved], dict[Path, Any]]:
    """Return the optimizer's tensors and steps, and its groups, under the keys of ``get_state_dict``."""

    def key(*parts: str) -> Path:
        return ("optimizer", ".".join(("state", *parts))) if is_flat else ("optimizer", "state", *parts)

    tensors = [_Saved(key(name, "step"), step) for name, step in state.steps.items()]
    tensors += (_Saved(key(name, kind), shard, name) for name, kind, shard in _moments(state))
    values: dict[Path, Any] = {}
    for number, (group, options) in enumerate(zip(state.groups, _group_options(state), strict=True)):
        # A scheduler adds it, and dcp.load then wants it.
        options.setdefault("initial_lr", options["lr"])
        for name, value in options.items():
            if is_flat:
                values |= {("optimizer", f"param_groups.{own}.{name}"): value for own in group.parameters}
            else:
                values["optimizer", "param_groups", number, name] = value
        if not is_flat:
            # The second is wanted where an optimizer was made of named parameters.
            values |= {("optimizer", "param_groups", number, k): [*group.parameters] for k in ("params", "param_names")}
    return tensors, values


def _own_values(state: TrainingState) -> dict[str, Any]:
    """Return the values that torchtitan keeps beside model and optimizer."""
    own, step = {key: value for key, value in state.values.items() if key not in _OF_DEEPSPEED}, find_step(state)
    scheduler = own.get("lr_scheduler")
    last = (
        scheduler.get("last_epoch", scheduler.get("last_batch_iteration")) if isinstance(scheduler, Mapping) else step
    )
    return {"train_state": {"step": step, "ntokens_seen": 0}, **own, "lr_scheduler": {"last_epoch": last}}


def _flatten(path: Path, value: Any) -> dict[Path, Any]:
    """Return the leaves as DCP's planner takes them apart (torch/distributed/checkpoint/_traverse.py)."""
    if isinstance(value, Mapping):
        return {key: one for name, inner in value.items() for key, one in _flatten((*path, str(name)), inner).items()}
    if isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        return {key: one for i, inner in enumerate(value) for key, one in _flatten((*path, i), inner).items()}
    return {path: value}


def _describe_losses(state: TrainingState, target: StateTarget) -> Iterator[Note]:
    is_universal = target == "deepspeed-universal"
    grouped = {name for group in state.groups for name in group.parameters}
    names = {name for name, _ in _list_model(state)}
    unstepped = sorted(grouped - state.states.keys())
    if unstepped:
        text = f"{list_text(unstepped)}: never updated, so no optimizer state is written for them"
        yield "never-stepped", text + ("" if is_universal else "; torch loads it with StateDictOptions(strict=False)")
    others = sorted(names - grouped - state.stored.aliases.keys())
    if others:
        text = f"{list_text(others)}: no optimizer trains them; they are written with the model"
        if is_universal:
            text += ", and DeepSpeed does not load them from a universal checkpoint: load them before training"
        yield "not-trained", text
    shards = {shard.name: shard for shard in state.stored.shards}
    trained = {name: shards[name].dtype for name in state.states if name in shards}
    narrow = sorted({kind for kind in trained.values() if kind != "F32"})
    has_masters = any(MASTER in kinds for kinds in state.states.values())
    if has_masters and not is_universal:
        text = (
            "the parameters are written as their fp32 masters; a model of another dtype rounds them, and the moments,"
        )
        yield "masters", f"{text} while it loads: load fp32 parameters to resume exactly"
    elif narrow and not has_masters:
        text = f"the source trains {list_text(narrow)} parameters, which have no fp32 masters"
        yield "masters", f"{text}; their values become the masters" if is_universal else text
    if is_universal and len({repr(options) for options in _group_options(state)}) > 1:
        text = "its groups have different options, and ZeRO-3 gives all parameters those of the first group"
        yield "groups", f"{text}; stages 1 and 2 keep them"
    if any("initial_lr" not in group.options for group in state.groups) and not is_universal:
        yield (
            "initial-lr",
            "the source does not record initial_lr: the current lr is written, which only new schedulers use",
        )
    if target == "torchtitan":
        counted = "" if "train_state" in state.values else ", and train_state.ntokens_seen begins at 0"
        yield (
            "data-loader",
            f"no data loader position is written{counted}: set checkpoint.exclude_from_loading to dataloader",
        )
    if (foreign := sorted(_OF_DEEPSPEED & state.values.keys())) and not is_universal:
        yield "left-out", f"left out: {list_text(foreign)} (of DeepSpeed's engine)"
    for one in state.left_out:
        if one.path is None or target not in ("accelerate", "deepspeed-universal"):
            yield "left-out", f"left out: {one.name} ({one.why})"


# ---- torch DCP


class _Piece(Struct, frozen=True):
    path: Path
    rank: int
    offsets: tuple[int, ...]
    item: Item


def _lay_out_dcp(
    folder: str,
    tensors: Sequence[_Saved],
    values: Mapping[Path, Any],
    grid: Grid | None,
) -> list[OutputFile]:
    """Return the files of a DCP folder, ``.metadata`` last."""
    pieces = [_Piece(path, 0, (), Item(value)) for path, value in values.items()]
    kinds: dict[Path, tuple[str, tuple[int, ...]]] = {}
    for one in tensors:
        path, tensor = one.path, one.tensor
        if isinstance(tensor, StoredShard):
            kinds[path] = tensor.dtype, tensor.shape
            pieces += _cut(path, tensor, one.parameter, grid)
        else:
            kinds[path] = "F32", ()
            pieces.append(_Piece(path, 0, (), Item(view("F32", ()), content=struct.pack("<f", tensor))))
    groups: dict[int, list[list[_Piece]]] = {}
    filled: dict[int, int] = {}
    for piece in pieces:
        nbytes = piece.item.tensor.nbytes if piece.item.tensor is not None else 0
        lists = groups.setdefault(piece.rank, [[]])
        if lists[-1] and filled[piece.rank] + nbytes > _FILE_NBYTES:
            lists.append([])
            filled[piece.rank] = 0
        filled[piece.rank] = filled.get(piece.rank, 0) + nbytes
        lists[-1].append(piece)
    files, places = [], dict[Path, list[SavedPiece]]()
    numbered = ((rank, number, own) for rank, lists in sorted(groups.items()) for number, own in enumerate(lists))
    for rank, number, own in numbered:
        name = f"__{rank}_{number}.distcp"
        file, placed = lay_out_items(folder + name, [piece.item for piece in own])
        files.append(file)
        for piece, place in zip(own, placed, strict=True):
            sizes = piece.item.value.shape if piece.path in kinds else ()
            box = SavedPiece(name, *place, piece.offsets, sizes)
            places.setdefault(piece.path, []).append(box)
    saved = [SavedValue(path, tuple(found), *kinds.get(path, ())) for path, found in places.items()]
    return [*files, bare_file(f"{folder}.metadata", metadata_pickle(saved))]


def _cut(path: Path, shard: StoredShard, parameter: str | None, grid: Grid | None) -> Iterator[_Piece]:
    """Yield the boxes of a tensor."""
    name, shape = shard.name, shard.shape
    whole = OutputTensor(name, shard.dtype, shape)
    if grid is None or parameter is None:
        row = whole.nbytes // shape[0] if shape and shape[0] else 1
        step = max(1, _BLOCK_NBYTES // max(row, 1))
        if whole.nbytes <= _BLOCK_NBYTES or not shape:
            yield _Piece(path, 0, (0,) * len(shape), Item(view(shard.dtype, shape), whole))
            return
        for start in range(0, shape[0], step):
            sizes = (min(step, shape[0] - start), *shape[1:])
            nests = (_box(shape, (start, *[0] * (len(shape) - 1)), sizes),)
            part = OutputTensor(name, shard.dtype, sizes, part=TensorPart(shape, nests, nests))
            yield _Piece(path, 0, (start, *[0] * (len(shape) - 1)), Item(view(shard.dtype, sizes), part))
        return
    seen = set()
    for rank, new in new_parts(parameter, grid.find_claim(parameter, len(shape)), shape).items():
        if not new.part.nests:
            continue
        strides, address = row_major(shape), new.part.nests[0].y
        offsets = tuple(address // stride % size for stride, size in zip(strides, shape, strict=True))
        if new.part.nests != (_box(shape, offsets, new.shape),):
            problem = f"{parameter}: the layout gives rank {rank} a part that is not a single box; DCP cannot store it"
            got, want = f"{plural(len(new.part.nests), 'piece')}", "consecutive indices of each dim"
            other = "change the layout: DCP can load any layout on any ranks"
            raise LayoutError(problem, tensor=parameter, rank=rank, got=got, want=want, next_step=other)
        if offsets not in seen:
            seen.add(offsets)
            item = Item(view(shard.dtype, new.shape), OutputTensor(name, shard.dtype, new.shape, part=new.part))
            yield _Piece(path, rank, offsets, item)


def _box(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Nest:
    outer, inner = row_major(shape), row_major(sizes)
    start = sum(offset * stride for offset, stride in zip(offsets, outer, strict=True))
    return canonical(Nest(0, start, tuple(zip(sizes, inner, outer, strict=True))))


def _add_trainer_files(state: TrainingState, made: TargetFiles) -> None:
    """Add the files that accelerate and transformers' Trainer keep beside model and optimizer."""
    made.companions += (
        CompanionFile(one.path.rpartition("/")[2], one.path) for one in state.left_out if one.path is not None
    )
    copied = {companion.name for companion in made.companions}
    scheduler = state.values.get("lr_scheduler")
    if scheduler is not None and not copied.intersection(("scheduler.pt", "scheduler.bin")):
        # accelerate looks for the first, transformers for the second.
        made.files += (_value_file(name, Item(scheduler)) for name in ("scheduler.bin", "scheduler.pt"))


# ---- DeepSpeed universal


def _lay_out_universal(state: TrainingState, tag: str, made: TargetFiles) -> None:
    """Add the files of deepspeed/checkpoint/ds_to_universal.py, for ZeRO of all stages."""
    extra = sorted({kind for kinds in state.states.values() for kind in kinds} - {MASTER, "exp_avg", "exp_avg_sq"})
    if extra:
        problem, other = f"keeps {list_text(extra)}, which a universal checkpoint cannot contain", option("to", "dcp")
        raise Origin(state.stored.path).usage(problem, list_text(extra), "exp_avg and exp_avg_sq", f"use {other}")
    trained, model = set(chain(*(group.parameters for group in state.groups))), dict(_list_model(state))
    # FusedAdam and CPUAdam, whose groups have this option, count steps in numbers, torch's classes in tensors.
    is_number = all("bias_correction" in group.options for group in state.groups)
    moments: dict[str, dict[str, StoredShard]] = {}
    for name, kind, shard in _moments(state):
        moments.setdefault(name, {})[kind] = shard
    for name in (name for name in model if name in trained):
        for kind, shard in {"fp32": model[name], **moments.get(name, {})}.items():
            item = Item({"param": view("F32", shard.shape)}, OutputTensor(shard.name, "F32", shard.shape))
            made.files.append(_value_file(f"{tag}/zero/{name}/{kind}.pt", item))
        if name in state.steps:
            made.files.append(
                _value_file(f"{tag}/zero/{name}/step.pt", _step_item(state.steps[name], is_number=is_number))
            )
    groups = [options | {"params": [number]} for number, options in enumerate(_group_options(state))]
    version = state.values.get("ds_version", _DEEPSPEED)
    step = _step_item(state.steps[next(iter(state.steps))] if state.steps else 0.0, is_number=is_number)
    # Stages 1 and 2 read param_groups, stage 3 reads optimizer_state_dict (deepspeed/runtime/zero/stage3.py).
    optimizer = {
        "ds_version": version,
        "param_groups": groups,
        "optimizer_state_dict": {"state": {0: {"step": step.value}}, "param_groups": groups},
    }
    made.files.append(_value_file(f"{tag}/zero/optimizer_state.pt", replace(step, value=optimizer)))
    count = find_step(state)
    shapes = [{name: size_value(model[name].shape) for name in group.parameters} for group in state.groups]
    aliases = state.stored.aliases
    rest = {name: shard for name, shard in model.items() if name not in trained and name not in aliases}
    views = {name: view(shard.dtype, shard.shape, str(key)) for key, (name, shard) in enumerate(rest.items())}
    values = {
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": count,
        "ds_config": {},
        **state.values,
        "module": views,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": shapes,
        "shared_params": dict(aliases),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": version,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }
    tensors = [OutputTensor(shard.name, shard.dtype, shard.shape) for shard in rest.values()]
    # Stage 3 looks for the second name (deepspeed/runtime/engine.py: _get_ckpt_name).
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        made.files.append(lay_out_archive_file(f"{tag}/{name}_model_states.pt", write_pickle(values), tensors))
    made.files.append(bare_file("latest_universal", tag.encode()))


def _step_item(step: float, *, is_number: bool) -> Item:
    return Item(int(step)) if is_number else Item(view("F32", ()), content=struct.pack("<f", step))


def _value_file(name: str, item: Item) -> OutputFile:
    return lay_out_items(name, [item])[0]
