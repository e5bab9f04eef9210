"""What one file of a DeepSpeed checkpoint says: its model states, or one rank's partition of the fp32 weights.

The keys are those of ``deepspeed/checkpoint/constants.py``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias

from xrank.errors import ContradictionError, UnsafeError
from xrank.formats.inert_record import InertRecord
from xrank.formats.regular_file import Origin, shown
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.deepspeed.folder import owner_of
from xrank.readers.deepspeed.partitions import DEALS
from xrank.readers.deepspeed.unread import EXPERTS, STAGES
from xrank.words import list_text

__all__ = ["ModelState", "Partition", "Shape", "Shapes", "read_model_state", "read_partition"]

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

_MAX_NUMEL = (1 << 62) - 1
_SHARED_FACTS = ("ds_version", "global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size")
_CONFIG_FACTS = ("train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16", "optimizer", "scheduler")
_OPTIMIZER_FACTS = (
    *("zero_stage", "partition_count", "ds_version", "clip_grad", "dynamic_loss_scale", "overflow", "loss_scaler"),
    *("base_optimizer_state_step", "param_alignment_paddings"),
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """A ``*_model_states.pt``."""

    origin: Origin
    archive: TorchArchive
    module: Mapping[str, ArchivedTensor]
    """The state dict; in stage 3 a tensor of no elements stands for what lies in partitions."""
    num_others: int
    """Entries of the state dict that are no tensors."""
    buffer_names: tuple[str, ...]
    groups: tuple[Shapes, ...] | None
    """Whole shapes of what the partitions hold, group by group, in their order; None without ZeRO."""
    frozen: Shapes
    """Whole shapes of parameters that are not trained."""
    fragments: Mapping[str, ArchivedTensor]
    """Of those: this rank's piece in stage 3, the whole before."""
    shared: Mapping[str, str]
    """Alias -> the name that holds the data; only rank 0 knows."""
    facts: Mapping[str, object]
    """What is the same in the files of one moment of one run."""
    config_stage: int | None
    """The stage in the configuration."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A ``*_optim_states.pt``, less what no gather needs."""

    origin: Origin
    archive: TorchArchive
    stage: int | None
    """None: written by `BF16_Optimizer`, which does not say."""
    counts: tuple[int, ...]
    """Partitions of each group, or one number for all."""
    flats: tuple[ArchivedTensor, ...]
    """The fp32 weights: a partition of each group, or in stage 3 of each sub-group."""
    is_interleaved: bool
    """Cut as stage 3 cuts."""
    paddings: tuple[int, ...] | None
    """Of each group: elements at this partition's end that stand for nothing."""
    alignments: tuple[tuple[int, ...], ...] | None
    """Of each group: elements of padding behind each parameter."""
    slices: tuple[Mapping[str, tuple[int, int]], ...] | None
    """Of each group: (start, elements) in this partition of every parameter that it has a part of."""
    facts: Mapping[str, object]
    """What is the same in the files of one moment of one run."""


def read_model_state(path: str, rank: int | None = None) -> ModelState:
    """Return what a ``*_model_states.pt`` says, by its metadata alone.

    Raises:
        IncompleteError: there is no such file.
        UsageError: it is a pipeline's or has experts, which are not read.
        CorruptError, UnsafeError: it is damaged, or more than data where data are needed.
    """
    archive, origin = read_archive(path, rank=rank), Origin(path, rank)
    state = _table(archive.value, "the state", origin)
    _check_name(archive, origin)
    archive = replace(archive, value=None)  # a thousand ranks' trees would fill memory
    if "module" not in state:
        raise origin.corrupt("is no model state", got="no module", want="a dict with module")
    if state["module"] is None:
        raise STAGES.refused(origin, "no module: its layers lie in files of their own")
    if state.get("ds_autoep_layers") or state.get("autoep_layers") or _is_positive(state.get("num_experts")):
        raise EXPERTS.refused(origin)
    module = _table(state["module"], "module", origin)
    tensors = {name: value for name, value in module.items() if isinstance(value, ArchivedTensor)}
    for name, value in module.items():
        # A parameter of a class of its own (quantised, sparse) would be missing from the model.
        if isinstance(value, InertRecord) and not name.endswith("_extra_state"):
            raise _needs_code(name, value, origin)
    fragments = _table(state.get("frozen_param_fragments") or {}, "frozen_param_fragments", origin)
    for name, value in fragments.items():
        if not isinstance(value, ArchivedTensor):
            raise origin.corrupt(f"{shown(name)} among frozen_param_fragments is no tensor", got=type(value).__name__)
    shared = _table(state.get("shared_params") or {}, "shared_params", origin)
    groups = state.get("param_shapes")
    listed = [groups] if isinstance(groups, dict) else groups
    if listed is not None and not isinstance(listed, (list, tuple)):
        raise origin.corrupt("param_shapes is no list", got=type(listed).__name__)
    buffers = state.get("buffer_names") or ()
    if not isinstance(buffers, (list, tuple, set)) or not all(isinstance(name, str) for name in buffers):
        raise origin.corrupt("buffer_names is no list of names", got=type(buffers).__name__)
    if not all(isinstance(name, str) for name in shared.values()):
        raise origin.corrupt("shared_params does not tie names to names")
    shapes = None if listed is None else tuple(_shapes(group, "param_shapes", origin) for group in listed)
    names = [name for group in shapes or () for name in group]
    if len(set(names)) < len(names):
        raise origin.corrupt("a parameter is in two groups of param_shapes")
    zero = state.get("ds_config")
    zero = zero.get("zero_optimization") if isinstance(zero, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return ModelState(
        origin,
        archive,
        tensors,
        len(module) - len(tensors),
        tuple(sorted(buffers) if isinstance(buffers, set) else buffers),
        shapes,
        _shapes(state.get("frozen_param_shapes") or {}, "frozen_param_shapes", origin),
        {name: value for name, value in fragments.items() if isinstance(value, ArchivedTensor)},
        {name: str(owner) for name, owner in shared.items()},
        {
            **dict(_facts({key: state[key] for key in _SHARED_FACTS if key in state}, archive)),
            **dict(_config_facts(state, archive)),
        },
        stage if type(stage) is int else None,
    )


def _check_name(archive: TorchArchive, origin: Origin) -> None:
    """Check that a file is not another rank's: torch writes the name it was saved under into the archive."""
    own, saved = owner_of(os.path.basename(origin.path)), owner_of(f"{archive.name}.pt")
    if own is not None and saved is not None and own != saved:
        raise ContradictionError(
            origin.named("is another file, renamed or copied"),
            rank=origin.rank,
            file=origin.path,
            got=f"what was saved as {archive.name}.pt",
            want=f"what was saved as {os.path.basename(origin.path)}",
            next_step="copy both files again from where they were saved",
        )


def _needs_code(name: str, value: InertRecord, origin: Origin) -> UnsafeError:
    error = origin.unsafe(f"{shown(name)[1:-1]} is no plain tensor, but what only code can make", got=repr(value))
    error.about(tensor=name)
    return error


def _is_positive(value: object) -> bool:
    # engine.py: num_experts is a list, [0] or [1] where there are none.
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(type(each) is int and each > 1 for each in values)


def _table(value: object, what: str, origin: Origin) -> dict[str, object]:
    if isinstance(value, InertRecord):
        raise origin.unsafe(f"{what} is an object that only running code can make", got=repr(value))
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise origin.corrupt(f"{what} is no dict of names", got=type(value).__name__)
    return value


def _shapes(value: object, what: str, origin: Origin) -> Shapes:
    table = _table(value, what, origin)
    found: dict[str, Shape] = {}
    for name, shape in table.items():
        # A torch.Size is a tuple here (`read_archive`); some callers pass lists.
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (-1,)
        if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 64 or prod(sizes) > _MAX_NUMEL:
            raise origin.corrupt(f"{what} gives {shown(name)} no shape", got=ascii(shape)[:200])
        found[name] = sizes
    return found


def read_partition(path: str, rank: int) -> Partition:
    """Return what a ``*_optim_states.pt`` says, by its metadata alone.

    Raises:
        IncompleteError: there is no such file.
        UsageError: it has no fp32 weights.
        CorruptError, UnsafeError: it is damaged, or more than data where data are needed.
    """
    archive, origin = read_archive(path, rank=rank), Origin(path, rank)
    state = _table(archive.value, "the state", origin)
    _check_name(archive, origin)
    archive = replace(archive, value=None)  # a thousand ranks' trees would fill memory
    optimizer = _table(state.get("optimizer_state_dict"), "optimizer_state_dict", origin)
    is_interleaved = "fp32_flat_groups" in optimizer
    flats = optimizer.get("fp32_flat_groups" if is_interleaved else "single_partition_of_fp32_groups")
    if flats is None:
        raise origin.usage(
            "holds no fp32 weights",
            got=list_text(map(shown, optimizer), 8),
            want="fp32_flat_groups or single_partition_of_fp32_groups",
            next_step="gather a checkpoint that an optimizer of ZeRO saved",
        )
    tensors = tuple(
        tensor for tensor in _listed(flats, "the fp32 weights", origin) if isinstance(tensor, ArchivedTensor)
    )
    if len(tensors) != len(_listed(flats, "the fp32 weights", origin)):
        raise origin.corrupt("its fp32 weights are no tensors")
    counts = optimizer.get("partition_count")
    counts = (counts,) if type(counts) is int else tuple(_listed(counts, "partition_count", origin))
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise origin.corrupt("partition_count is no count", got=ascii(counts)[:200])
    paddings, alignments = optimizer.get("group_paddings"), optimizer.get("param_alignment_paddings")
    slices = optimizer.get("param_slice_mappings")
    return Partition(
        origin,
        archive,
        _stage_of(optimizer.get("zero_stage"), origin),
        tuple(count for count in counts if isinstance(count, int)),
        tensors,
        is_interleaved,
        None if paddings is None else _numbers(paddings, "group_paddings", origin),
        None
        if alignments is None
        else tuple(
            _numbers(group, "param_alignment_paddings", origin)
            for group in _listed(alignments, "param_alignment_paddings", origin)
        ),
        None
        if not slices
        else tuple(_slices(group, origin) for group in _listed(slices, "param_slice_mappings", origin)),
        dict(_partition_facts(state, optimizer, archive)),
    )


def _listed(value: object, what: str, origin: Origin) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise origin.corrupt(f"{what} is no list", got=type(value).__name__)
    return value


def _numbers(value: object, what: str, origin: Origin) -> tuple[int, ...]:
    listed = _listed(value, what, origin)
    numbers = tuple(number for number in listed if type(number) is int and 0 <= number <= _MAX_NUMEL)
    if len(numbers) != len(listed):
        raise origin.corrupt(f"{what} is no list of counts", got=ascii(listed)[:200])
    return numbers


def _stage_of(value: object, origin: Origin) -> int | None:
    match value:
        case None:
            return None
        # A member of deepspeed.runtime.zero.config.ZeroStageEnum; older versions write its number.
        case InertRecord(name="ZeroStageEnum", args=(int(stage),)) | int(stage):
            return int(stage)
    raise origin.corrupt("its zero_stage is no stage", got=ascii(value)[:200])


def _slices(value: object, origin: Origin) -> Mapping[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, address in _table(value, "param_slice_mappings", origin).items():
        # deepspeed/utils/tensor_fragment.py: fragment_address(numel, start).
        match address:
            case InertRecord(name="fragment_address", state={"numel": int(numel), "start": int(start)}):
                found[name] = (start, numel)
            case _:
                raise origin.corrupt(f"{shown(name)} has no address in the partition", got=type(address).__name__)
    return found


def _partition_facts(
    state: Mapping[str, object], optimizer: Mapping[str, object], archive: TorchArchive
) -> Iterator[tuple[str, object]]:
    yield from _facts({key: optimizer[key] for key in _OPTIMIZER_FACTS if key in optimizer}, archive)
    yield from _config_facts(state, archive)
    # Adam's state: under one key in stages 1 and 2, under another in stage 3.
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    per_group: object = inner
    if isinstance(inner, dict):
        per_group = inner.get("state")
        groups = inner.get("param_groups")
        if isinstance(groups, (list, tuple)):
            for number, group in enumerate(groups):
                if isinstance(group, dict):
                    kept = {key: value for key, value in group.items() if key != "params"}
                    yield from _facts(kept, archive, f"param_groups.{number}")
    steps = (
        per_group.items()
        if isinstance(per_group, dict)
        else enumerate(per_group or ())
        if isinstance(per_group, (list, tuple))
        else ()
    )
    for number, moments in steps:
        if isinstance(moments, dict) and "step" in moments:
            yield from _facts({"step": moments["step"]}, archive, f"state.{number}")


def _config_facts(state: Mapping[str, object], archive: TorchArchive) -> Iterator[tuple[str, object]]:
    """Yield what of the run's configuration stands in both kinds of files."""
    config = state.get("ds_config")
    if isinstance(config, dict):
        kept = {key: config[key] for key in (*_CONFIG_FACTS, "data_types") if key in config}
        if isinstance(zero := config.get("zero_optimization"), dict):
            kept["zero_optimization"] = {key: zero[key] for key in ("stage", DEALS) if key in zero}
        yield from _facts(kept, archive, "ds_config")


def _facts(value: object, archive: TorchArchive, path: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield (path, value) of the numbers and texts of a tree; of single elements (a step) their checksums."""
    if depth > 6:
        return
    if value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, ArchivedTensor):
        record = archive.records[value.key]
        if value.shape == () and record.nbytes <= 16 and archive.has_checksums:
            yield path, f"{value.dtype} of CRC {record.crc32:08x}"
    elif isinstance(value, InertRecord):
        if isinstance(value.state, dict):
            yield from _facts(value.state, archive, path, depth + 1)
        elif value.args:
            yield from _facts(value.args, archive, path, depth + 1)
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _facts(part, archive, f"{path}.{key}" if path else str(key), depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from _facts(part, archive, f"{path}.{number}", depth + 1)
