"""DeepSpeed checkpoints for tests: cut by torch as DeepSpeed cuts, and pickled with the classes that it pickles.

The classes are put under DeepSpeed's names while a file is written and are gone when it is read. That the format is
DeepSpeed's own is what `tests/oracle/test_deepspeed.py` shows.
"""

from __future__ import annotations

import enum
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]


@dataclass
class MadeModel:
    """What was trained, and what besides."""

    groups: Sequence[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        return {name: tensor for group in self.groups for name, tensor in group.items()}

    @property
    def expected(self) -> dict[str, torch.Tensor]:
        """What a gather gives: of a tie the name that holds the data."""
        return {**self.buffers, **self.frozen, **self.trained}


def made_model(seed: int = 0) -> MadeModel:
    """Two groups, sizes that no number of ranks divides, one below the number of ranks, a scalar, and all else."""
    random = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random) + 0.5

    return MadeModel(
        [
            {"embed.weight": rand(11, 6), "up.weight": rand(7, 6), "down.weight": rand(6, 5), "gate": rand(2)},
            {"up.bias": rand(7), "norm.weight": rand(6), "scale": rand()},
        ],
        frozen={"frozen.weight": rand(5, 7).bfloat16(), "frozen.bias": rand(3).bfloat16(), "tiny": rand(1).bfloat16()},
        buffers={"mean": rand(3), "count": torch.tensor(7), "table": rand(4, 3).T},
        shared={"head.weight": "embed.weight"},
    )


# ---- the classes of deepspeed 0.19.8 that its files name


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3


class LossScaler:
    def __init__(self, iteration: int) -> None:
        self.cur_scale, self.cur_iter, self.dynamic = 65536.0, iteration, True


class fragment_address:  # noqa: N801  DeepSpeed's name
    def __init__(self, numel: int, start: int) -> None:
        self.numel, self.start = numel, start


_PLACES = {
    "deepspeed.runtime.zero.config": ZeroStageEnum,
    "deepspeed.runtime.fp16.loss_scaler": LossScaler,
    "deepspeed.utils.tensor_fragment": fragment_address,
}


@contextmanager
def deepspeed_classes() -> Iterator[None]:
    """Put the classes where a pickle looks for them, for as long as the body runs."""
    assert "deepspeed" not in sys.modules
    names = {name.rsplit(".", depth)[0] for name in _PLACES for depth in range(name.count(".") + 1)}
    modules = {name: types.ModuleType(name) for name in names}
    try:
        for name, module in modules.items():
            sys.modules[name] = module
        for name, kind in _PLACES.items():
            kind.__module__ = name
            setattr(modules[name], kind.__name__, kind)
        yield
    finally:
        for name in modules:
            del sys.modules[name]


@dataclass
class Zero:
    """How a checkpoint is written; the defaults are DeepSpeed's of today."""

    stage: int = 3
    num_ranks: int = 3
    step: int = 2
    prefix: str = "bf16_"
    suffix: str = "_optim_states.pt"
    sub_group_numel: int = 90
    """Stage 3: a sub-group is closed once it has as many elements."""
    ends: Sequence[int] | None = None
    """Stage 3: where a rank's stream is cut instead, in the midst of parameters."""
    alignment: int = 1
    """Stages 1 and 2: every parameter but the last begins at a multiple of it (``parameter_alignment``)."""
    is_dealt: bool = False
    """Stages 1 and 2: parameters are dealt to ranks in turn (``round_robin_gradients``)."""
    is_old: bool = False
    """Stages 1 and 2: with the padding, without paddings and slices (before 0.4)."""
    multiple: int = 2
    """Stages 1 and 2: a group is padded to this multiple of the ranks (1 before version 0.3.16)."""
    is_bf16_optimizer: bool = False
    """Stage 1 with bf16 and gradients summed in fp32."""
    changed_state: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the model states to put in place of what is there; None takes one out."""
    changed_optimizer: Mapping[str, Any] = field(default_factory=dict)
    """The same of the optimizer states."""


def write_zero(folder: Path, model: MadeModel, how: Zero | None = None) -> None:
    """Write a checkpoint under the tag ``global_step<step>``, and the marker that names it."""
    how = how or Zero()
    place = folder / f"global_step{how.step}"
    place.mkdir(parents=True)
    (folder / "latest").write_text(place.name)
    with deepspeed_classes():
        groups = _sub_groups(model.groups, how) if how.stage == 3 else [_dealt(group, how) for group in model.groups]
        for rank in range(how.num_ranks if how.stage == 3 else 1):
            name = f"zero_pp_rank_{rank}_mp_rank_00" if how.stage == 3 else "mp_rank_00"
            state = changed_entries(model_state(model, groups, how, rank), how.changed_state)
            torch.save(state, place / f"{name}_model_states.pt")
        for rank in range(how.num_ranks if how.stage else 0):
            whole = groups if how.stage == 3 else model.groups
            optimizer = changed_entries(optimizer_state(whole, how, rank), how.changed_optimizer)
            config = config_of(how)
            torch.save(
                {"optimizer_state_dict": optimizer, "ds_config": config, "ds_version": "0.19.8"},
                place / f"{how.prefix}zero_pp_rank_{rank}_mp_rank_00{how.suffix}",
            )


def changed_entries(state: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with other entries in place of its own; None takes one out."""
    return {key: value for key, value in {**state, **changes}.items() if key not in changes or value is not None}


def config_of(how: Zero) -> dict[str, Any]:
    """Return the configuration in both kinds of files."""
    zero = {"stage": how.stage, "round_robin_gradients": how.is_dealt}
    return {"train_batch_size": 8, "zero_optimization": zero, "bf16": {"enabled": True}}


def _sub_groups(groups: Sequence[Tensors], how: Zero) -> list[dict[str, torch.Tensor]]:
    """Cut as ``stage3.py: _create_fp16_sub_groups``: whole parameters, until there are enough elements."""
    found: list[dict[str, torch.Tensor]] = []
    for group in groups:
        found.append({})
        for name, tensor in group.items():
            if sum(each.numel() for each in found[-1].values()) >= how.sub_group_numel:
                found.append({})
            found[-1][name] = tensor
    return found


def _piece(tensor: torch.Tensor, num_ranks: int, rank: int) -> torch.Tensor:
    """Cut as ``partition_parameters.py: _partition_param``; the padding is whatever was in memory."""
    size = math.ceil(tensor.numel() / num_ranks)
    flat = torch.full((size * num_ranks,), 77.0, dtype=tensor.dtype)
    flat[: tensor.numel()] = tensor.flatten()
    return flat[rank * size : (rank + 1) * size].clone()


def model_state(model: MadeModel, groups: Sequence[Tensors], how: Zero, rank: int) -> dict[str, Any]:
    """Return a rank's model states."""
    in_module = {**model.trained, **model.frozen}
    if how.stage == 3:
        module = {name: torch.empty(0, dtype=torch.bfloat16) for name in in_module}
        fragments = {name: _piece(tensor, how.num_ranks, rank) for name, tensor in model.frozen.items()}
    else:
        module = {name: tensor.bfloat16() for name, tensor in in_module.items()}
        fragments = {name: module[name] for name in model.frozen}
    module |= {alias: module[owner] for alias, owner in model.shared.items()}
    has_zero, has_frozen = how.stage > 0, how.stage > 1
    return {
        "module": OrderedDict({**model.buffers, **module}),
        "buffer_names": list(model.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict({n: t.shape for n, t in group.items()}) for group in groups] if has_zero else None,
        "frozen_param_shapes": OrderedDict({n: t.shape for n, t in model.frozen.items()}) if has_frozen else None,
        "shared_params": (dict(model.shared) if rank == 0 else {}) if has_zero else None,
        "frozen_param_fragments": OrderedDict(fragments) if has_frozen else None,
        "lr_scheduler": None,
        "skipped_steps": 0,
        "global_steps": how.step,
        "global_samples": 8 * how.step,
        "dp_world_size": how.num_ranks,
        "mp_world_size": 1,
        "ds_config": config_of(how),
        "ds_version": "0.19.8",
    }


def optimizer_state(groups: Sequence[Tensors], how: Zero, rank: int) -> dict[str, Any]:
    """Return a rank's state of the optimizer."""
    if how.stage == 3:
        flats = [torch.cat([_piece(t, how.num_ranks, rank) for t in group.values()]) for group in groups]
        if how.ends is not None:
            stream, ends = torch.cat(flats), [0, *how.ends]
            flats = [stream[low:high].clone() for low, high in zip(ends, [*ends[1:], len(stream)], strict=True)]
        for number, flat in enumerate(flats):
            flat.ds_id = f"0_{number}"  # type: ignore[attr-defined]
        return {
            "zero_stage": ZeroStageEnum.weights,
            "loss_scaler": LossScaler(how.step),
            "dynamic_loss_scale": True,
            "overflow": False,
            "partition_count": how.num_ranks,
            "optimizer_state_dict": _adam(flats, how),
            "fp32_flat_groups": flats,
        }
    flats, paddings, slices, alignments = [], [], [], []
    for group in groups:
        flat, cut = _flattened(_dealt(group, how), how)
        size = len(flat) // how.num_ranks
        part = flat[rank * size : (rank + 1) * size].clone()
        end = max(stop for _, stop in cut.values())
        padding = min(size, max(0, (rank + 1) * size - end))
        if how.is_bf16_optimizer:
            padding = len(flat) - end if rank == how.num_ranks - 1 else 0
        has_padding = how.is_old or how.is_bf16_optimizer
        flats.append(part if has_padding else part[: size - padding])
        paddings.append(padding)
        starts = [start for start, _ in cut.values()]
        ends = [*starts[1:], end]
        alignments.append([after - stop for (_, stop), after in zip(cut.values(), ends, strict=True)])
        # DeepSpeed 0.19.8 records where dealt parameters would lie undealt, unless some are aligned.
        recorded = cut if any(alignments[-1]) else _flattened(group, how)[1]
        slices.append(OrderedDict(_addresses(recorded, rank * size, (rank + 1) * size)))
    state = {
        "clip_grad": 1.0,
        "base_optimizer_state": _adam(flats, how),
        "single_partition_of_fp32_groups": flats,
        "partition_count": [how.num_ranks] * len(groups),
        "ds_version": "0.19.8",
    }
    if not how.is_bf16_optimizer:
        state |= {"loss_scaler": LossScaler(how.step), "zero_stage": ZeroStageEnum(how.stage), "overflow": False}
        if not how.is_old:
            state["param_alignment_paddings"] = alignments
    return state if how.is_old else {**state, "group_paddings": paddings, "param_slice_mappings": slices}


def _dealt(group: Tensors, how: Zero) -> Tensors:
    """Reorder as ``stage_1_and_2.py: _round_robin_reorder``."""
    names = list(group)
    return (
        {name: group[name] for rank in range(how.num_ranks) for name in names[rank :: how.num_ranks]}
        if how.is_dealt
        else group
    )


def _addresses(cut: Mapping[str, tuple[int, int]], low: int, high: int) -> dict[str, fragment_address]:
    return {
        name: fragment_address(min(stop, high) - max(start, low), max(start - low, 0))
        for name, (start, stop) in cut.items()
        if start < high and stop > low
    }


def _flattened(group: Tensors, how: Zero) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    """Flatten as ``stage_1_and_2.py: flatten_dense_tensors_aligned``; return where each parameter lies, too."""
    pieces: list[torch.Tensor] = []
    cut: dict[str, tuple[int, int]] = {}
    position = 0
    for name, tensor in group.items():
        if pieces and position % how.alignment:
            pieces.append(torch.zeros(-position % how.alignment))
            position += len(pieces[-1])
        cut[name] = (position, position + tensor.numel())
        pieces.append(tensor.flatten())
        position += tensor.numel()
    pieces.append(torch.zeros(-position % (how.multiple * how.num_ranks)))
    return torch.cat(pieces), cut


def _adam(flats: Sequence[torch.Tensor], how: Zero) -> dict[str, Any]:
    return {
        "state": {
            number: {"step": torch.tensor(float(how.step)), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
            for number, flat in enumerate(flats)
        },
        "param_groups": param_groups(len(flats), how),
    }


def param_groups(count: int, how: Zero) -> list[dict[str, Any]]:
    """Return the options of a group for each flat tensor."""
    return [
        {"lr": 0.01 / how.step, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1 * n, "params": [n]}
        for n in range(count)
    ]


def write_universal(folder: Path, model: MadeModel, how: Zero) -> None:
    """Write what ``ds_to_universal.py`` makes of a checkpoint: every parameter whole, the model states as they were."""
    place = folder / f"global_step{how.step}_universal"
    place.mkdir(parents=True)
    (folder / "latest_universal").write_text(place.name)
    groups = _sub_groups(model.groups, how) if how.stage == 3 else [_dealt(group, how) for group in model.groups]
    for rank in range(how.num_ranks if how.stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00" if how.stage == 3 else "mp_rank_00"
        torch.save(model_state(model, groups, how, rank), place / f"{name}_model_states.pt")
    entries = model.trained
    if how.stage < 3:
        # The script also rounds to fp32 what no optimizer has.
        rounded = {**model.buffers, **model.frozen, **{a: entries[o].bfloat16() for a, o in model.shared.items()}}
        entries |= {name: tensor.float() for name, tensor in rounded.items()}
    step = torch.tensor(float(how.step))
    for name, tensor in entries.items():
        (place / "zero" / name).mkdir(parents=True)
        for kind, value in (("fp32", tensor), ("exp_avg", tensor * 0.1), ("exp_avg_sq", tensor * tensor)):
            content = value.flatten() if how.stage == 3 else {"param": value.clone(), "cat_dim": 0}
            torch.save(content, place / "zero" / name / f"{kind}.pt")
        if how.stage < 3 and name in model.trained:
            torch.save(step, place / "zero" / name / "step.pt")
    options = param_groups(len(groups), how)
    moments = {"state": {n: {"step": step, "exp_avg": step, "exp_avg_sq": step} for n in range(len(groups))}}
    inner = {"optimizer_state_dict": {**moments, "param_groups": options}} if how.stage == 3 else {}
    with deepspeed_classes():
        saved = {**inner, "zero_stage": ZeroStageEnum(how.stage), "param_groups": options}
        torch.save(saved, place / "zero" / "optimizer_state.pt")
