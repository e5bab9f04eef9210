"""Parses one file of a DeepSpeed checkpoint: model states, or one rank's partition of the fp32 weights.

The keys are those of ``deepspeed/checkpoint/constants.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeAlias, TypeVar

from xrank.formats.pickles import InertRecord
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive
from xrank.readers.copies import is_telling
from xrank.readers.deepspeed.agreement import flatten_facts
from xrank.readers.deepspeed.partitions import DEALS
from xrank.readers.deepspeed.state_dicts import check_name, check_table, check_tensors
from xrank.readers.deepspeed.unread import AUTO_EXPERTS
from xrank.readers.wrapper_names import LIGHTNING_VERSION
from xrank.words import list_text

Shape: TypeAlias = tuple[int, ...]
Shapes: TypeAlias = Mapping[str, Shape]

EXPERT_NAME = re.compile(r"(?<=\.deepspeed_moe\.experts\.deepspeed_experts\.)[0-9]{1,9}(?=\.)")
"""An expert's number in a tensor's name (deepspeed/moe/experts.py)."""
_MAX_NUMEL = (1 << 62) - 1
_MAX_EXPERTS = 1 << 20
_SHARED_FACTS = (
    *("ds_version", "global_steps", "skipped_steps", "global_samples", "dp_world_size", "mp_world_size"),
    "checkpoint_parallel_dimensions",
    LIGHTNING_VERSION,
)
EXPERTS_LAST = "use_data_before_expert_parallelism"
"""The option by which ranks with the same experts follow each other."""
_CONFIG_FACTS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "bf16", "fp16", "optimizer", "scheduler"),
    EXPERTS_LAST,
)
_ALIGNMENTS, _SLICES = "param_alignment_paddings", "param_slice_mappings"
_OPTIMIZER_FACTS = (
    *("zero_stage", "partition_count", "ds_version", "clip_grad", "dynamic_loss_scale", "overflow", "loss_scaler"),
    *("base_optimizer_state_step", _ALIGNMENTS),
)


@dataclass(frozen=True, slots=True)
class ModelState:
    """Content of a ``*_model_states.pt``."""

    origin: Origin
    archive: TorchArchive
    module: Mapping[str, ArchivedTensor]
    """The state dict; in stage 3 an empty tensor stands for each tensor in the partitions."""
    num_others: int
    """Number of entries of the state dict that are not tensors."""
    buffer_names: tuple[str, ...]
    groups: tuple[Shapes, ...] | None
    """Whole shapes of the parameters in the partitions, by group, in their order; None without ZeRO."""
    frozen: Shapes
    """Whole shapes of frozen parameters."""
    fragments: Mapping[str, ArchivedTensor]
    """Tensors of the frozen parameters: in stage 3 this rank's pieces, otherwise whole."""
    shared: Mapping[str, str]
    """Alias -> the name that holds the data; only rank 0 records it."""
    facts: Mapping[str, object]
    """Values that are equal in all files of one save."""
    config_stage: int | None
    """The ZeRO stage in the configuration."""
    is_stage: bool
    """Whether it is a pipeline's stage: its layers' tensors lie in files of their own."""
    num_experts: tuple[int, ...]
    """Number of experts of each layer with experts; their tensors lie in files of their own, and are not named here."""
    moments: frozenset[tuple[Shape, int]] = frozenset()
    """Shape and checksum of a moment of each parameter, without ZeRO; stages with a tied tensor have equal ones."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Content of a ``*_optim_states.pt``, without the moments."""

    origin: Origin
    archive: TorchArchive
    stage: int | None
    """None if `BF16_Optimizer` wrote it, which does not record its stage."""
    counts: tuple[int, ...]
    """Number of partitions of each group, or one number for all."""
    flats: tuple[ArchivedTensor, ...]
    """The fp32 weights: a partition per group, or in stage 3 per sub-group."""
    is_interleaved: bool
    """Whether it is cut as in stage 3."""
    paddings: tuple[int, ...] | None
    """For each group: number of padding elements at this partition's end."""
    alignments: tuple[tuple[int, ...], ...] | None
    """For each group: number of padding elements behind each parameter."""
    slices: tuple[Mapping[str, tuple[int, int]], ...] | None
    """For each group: (start, elements) in this partition of every parameter with a part in it."""
    facts: Mapping[str, object]
    """Values that are equal in all files of one save."""


def read_model_state(path: str, rank: int | None = None) -> ModelState:
    """Return the content of a ``*_model_states.pt``, from its metadata alone.

    Raises:
        IncompleteError: the file is missing.
        UsageError: its experts are not read.
        CorruptError, UnsafeError: it is damaged, or contains code where data are needed.
    """
    archive, origin = read_archive(path, rank=rank), Origin(path, rank)
    state = check_table(archive.value, "the state", origin)
    check_name(archive, origin)
    archive = replace(archive, value=None)  # a thousand ranks' trees would fill memory
    if "module" not in state:
        raise origin.corrupt("is not a model state", got="no module", want="a dict with module")
    if state.get("ds_autoep_layers") or state.get("autoep_layers"):
        raise AUTO_EXPERTS.make_error(origin)
    # runtime/pipe/engine.py: module_state_dict returns None.
    is_stage = state["module"] is None
    module = {} if is_stage else check_table(state["module"], "module", origin)
    tensors = check_tensors(module, origin)
    num_experts = _num_experts(state.get("num_experts"), origin)
    own = {name for name in tensors if num_experts and EXPERT_NAME.search(name)}
    if own:
        raise origin.corrupt("contains experts, which lie in files of their own", got=quote(min(own)))
    buffers = state.get("buffer_names") or ()
    buffers = sorted(buffers) if isinstance(buffers, set) else buffers
    if not isinstance(buffers, (list, tuple)) or not all(isinstance(name, str) for name in buffers):
        raise origin.corrupt("buffer_names is not a list of names", got=type(buffers).__name__)
    shared = check_table(state.get("shared_params") or {}, "shared_params", origin)
    if not all(isinstance(name, str) for name in shared.values()):
        raise origin.corrupt("shared_params does not tie names to names")
    facts = flatten_facts({key: state[key] for key in _SHARED_FACTS if key in state}, archive)
    return ModelState(
        origin=origin,
        archive=archive,
        module=tensors,
        num_others=len(module) - len(tensors),
        buffer_names=tuple(name for name in buffers if not EXPERT_NAME.search(name)),
        groups=_groups(state.get("param_shapes"), origin),
        frozen=_without_experts(_shapes(state.get("frozen_param_shapes") or {}, "frozen_param_shapes", origin)),
        fragments=_without_experts(_fragments(state.get("frozen_param_fragments") or {}, origin)),
        shared={name: str(owner) for name, owner in shared.items()},
        facts={**dict(facts), **dict(_config_facts(state, archive))},
        config_stage=_config_stage(state),
        is_stage=is_stage,
        num_experts=num_experts,
        moments=frozenset(_moments(state.get("optimizer"), archive)),
    )


def _moments(optimizer: object, archive: TorchArchive) -> Iterator[tuple[Shape, int]]:
    """Yield the shape and checksum of one moment of each parameter (torch/optim), unless all of it is zero."""
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    for moments in states.values() if isinstance(states, dict) and archive.has_checksums else ():
        for key in ("exp_avg", "momentum_buffer"):
            moment = moments.get(key) if isinstance(moments, dict) else None
            if isinstance(moment, ArchivedTensor) and is_telling(archive, moment):
                yield moment.shape, archive.records[moment.key].crc32


_Value = TypeVar("_Value")


def _without_experts(named: Mapping[str, _Value]) -> dict[str, _Value]:
    return {name: value for name, value in named.items() if not EXPERT_NAME.search(name)}


def _num_experts(value: object, origin: Origin) -> tuple[int, ...]:
    # engine.py: a list with a number for each layer of experts; older versions write [0] without any.
    values = value if isinstance(value, (list, tuple)) else ()
    if not all(type(each) is int and 0 <= each <= _MAX_EXPERTS for each in values):
        raise origin.corrupt("num_experts is not a list of counts", got=ascii(value)[:200])
    return tuple(each for each in values if isinstance(each, int) and each)


def _fragments(value: object, origin: Origin) -> dict[str, ArchivedTensor]:
    found: dict[str, ArchivedTensor] = {}
    for name, fragment in check_table(value, "frozen_param_fragments", origin).items():
        if not isinstance(fragment, ArchivedTensor):
            kind = type(fragment).__name__
            raise origin.corrupt(f"{quote(name)} among frozen_param_fragments is not a tensor", got=kind)
        found[name] = fragment
    return found


def _groups(value: object, origin: Origin) -> tuple[Shapes, ...] | None:
    listed = [value] if isinstance(value, dict) else value
    if listed is None:
        return None
    shapes = tuple(_shapes(group, "param_shapes", origin) for group in _check_list(listed, "param_shapes", origin))
    names = [name for group in shapes for name in group]
    if len(set(names)) < len(names):
        raise origin.corrupt("a parameter is in two groups of param_shapes")
    return shapes


def _config_stage(state: Mapping[str, object]) -> int | None:
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    stage = zero.get("stage") if isinstance(zero, dict) else None
    return stage if type(stage) is int else None


def _shapes(value: object, what: str, origin: Origin) -> Shapes:
    table = check_table(value, what, origin)
    found: dict[str, Shape] = {}
    for name, shape in table.items():
        # A torch.Size is a tuple here (`read_archive`); some callers save lists.
        sizes = tuple(shape) if isinstance(shape, (list, tuple)) else (-1,)
        if not all(type(size) is int and size >= 0 for size in sizes) or len(sizes) > 64 or prod(sizes) > _MAX_NUMEL:
            raise origin.corrupt(f"{what} gives {quote(name)} an invalid shape", got=ascii(shape)[:200])
        found[name] = sizes
    return found


def read_partition(path: str, rank: int) -> Partition:
    """Return the content of a ``*_optim_states.pt``, from its metadata alone.

    Raises:
        IncompleteError: the file is missing.
        UsageError: it has no fp32 weights.
        CorruptError, UnsafeError: it is damaged, or contains code where data are needed.
    """
    archive, origin = read_archive(path, rank=rank), Origin(path, rank)
    state = check_table(archive.value, "the state", origin)
    check_name(archive, origin)
    archive = replace(archive, value=None)  # a thousand ranks' trees would fill memory
    optimizer = check_table(state.get("optimizer_state_dict"), "optimizer_state_dict", origin)
    is_interleaved = "fp32_flat_groups" in optimizer
    flats = optimizer.get("fp32_flat_groups" if is_interleaved else "single_partition_of_fp32_groups")
    if flats is None:
        raise origin.usage(
            "holds no fp32 weights",
            got=list_text(map(quote, optimizer), 8),
            want="fp32_flat_groups or single_partition_of_fp32_groups",
            next_step="gather a checkpoint that a ZeRO optimizer saved",
        )
    listed = _check_list(flats, "the fp32 weights", origin)
    tensors = tuple(tensor for tensor in listed if isinstance(tensor, ArchivedTensor))
    if len(tensors) != len(listed):
        raise origin.corrupt("its fp32 weights are not tensors")
    counts = optimizer.get("partition_count")
    counts = (counts,) if type(counts) is int else tuple(_check_list(counts, "partition_count", origin))
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise origin.corrupt("partition_count is not a count", got=ascii(counts)[:200])
    paddings, alignments = optimizer.get("group_paddings"), optimizer.get(_ALIGNMENTS)
    slices = optimizer.get(_SLICES)
    return Partition(
        origin=origin,
        archive=archive,
        stage=_stage_of(optimizer.get("zero_stage"), origin),
        counts=tuple(count for count in counts if isinstance(count, int)),
        flats=tensors,
        is_interleaved=is_interleaved,
        paddings=None if paddings is None else _numbers(paddings, "group_paddings", origin),
        alignments=None
        if alignments is None
        else tuple(_numbers(group, _ALIGNMENTS, origin) for group in _check_list(alignments, _ALIGNMENTS, origin)),
        slices=tuple(_slices(group, origin) for group in _check_list(slices, _SLICES, origin)) if slices else None,
        facts=dict(_partition_facts(state, optimizer, archive)),
    )


def _check_list(value: object, what: str, origin: Origin) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise origin.corrupt(f"{what} is not a list", got=type(value).__name__)
    return value


def _numbers(value: object, what: str, origin: Origin) -> tuple[int, ...]:
    listed = _check_list(value, what, origin)
    numbers = tuple(number for number in listed if type(number) is int and 0 <= number <= _MAX_NUMEL)
    if len(numbers) != len(listed):
        raise origin.corrupt(f"{what} is not a list of counts", got=ascii(listed)[:200])
    return numbers


def _stage_of(value: object, origin: Origin) -> int | None:
    match value:
        case None:
            return None
        # A member of deepspeed.runtime.zero.config.ZeroStageEnum; older versions write a number.
        case InertRecord(name="ZeroStageEnum", args=(int(stage),)) | int(stage):
            return int(stage)
    raise origin.corrupt("its zero_stage is not a stage", got=ascii(value)[:200])


def _slices(value: object, origin: Origin) -> Mapping[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for name, address in check_table(value, _SLICES, origin).items():
        # deepspeed/utils/tensor_fragment.py: fragment_address(numel, start).
        match address:
            case InertRecord(name="fragment_address", state={"numel": int(numel), "start": int(start)}):
                found[name] = (start, numel)
            case _:
                raise origin.corrupt(f"{quote(name)} has no address in the partition", got=type(address).__name__)
    return found


def _partition_facts(
    state: Mapping[str, object], optimizer: Mapping[str, object], archive: TorchArchive
) -> Iterator[tuple[str, object]]:
    yield from flatten_facts({key: optimizer[key] for key in _OPTIMIZER_FACTS if key in optimizer}, archive)
    yield from _config_facts(state, archive)
    # Adam's state has one key in stages 1 and 2 and another in stage 3.
    inner = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    per_group: object = inner
    if isinstance(inner, dict):
        per_group = inner.get("state")
        groups = inner.get("param_groups")
        if isinstance(groups, (list, tuple)):
            for number, group in enumerate(groups):
                if isinstance(group, dict):
                    kept = {key: value for key, value in group.items() if key != "params"}
                    yield from flatten_facts(kept, archive, f"param_groups.{number}")
    if isinstance(per_group, (list, tuple)):
        per_group = dict(enumerate(per_group))
    for number, moments in per_group.items() if isinstance(per_group, dict) else ():
        if isinstance(moments, dict) and "step" in moments:
            yield from flatten_facts({"step": moments["step"]}, archive, f"state.{number}")


def _config_facts(state: Mapping[str, object], archive: TorchArchive) -> Iterator[tuple[str, object]]:
    """Yield the settings of the run's configuration that both kinds of files contain."""
    config = state.get("ds_config")
    if isinstance(config, dict):
        kept = {key: config[key] for key in (*_CONFIG_FACTS, "data_types") if key in config}
        if isinstance(zero := config.get("zero_optimization"), dict):
            kept["zero_optimization"] = {key: zero[key] for key in ("stage", DEALS) if key in zero}
        yield from flatten_facts(kept, archive, "ds_config")
