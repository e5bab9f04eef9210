"""Places of gradients in a buffer, the last registered parameter first, and the buckets that cut the buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod
from typing import TypeAlias

import torch
import torch.distributed as dist

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.mesh_places import MeshPlace, check_shard_order, ranks_along
from xrank.gradients.plan import LaterReduction, Operation, PlannedBucket, PlannedBuffer, PlannedParameter, shard_bounds
from xrank.gradients.roles import ParameterRole, local_of, role_of
from xrank.layout import MeshViews
from xrank.words import join_words

_START_ALIGNMENT = 64
"""Elements: 128 bytes of 16 bits (megatron/core/distributed/param_and_grad_buffer.py), which kernels prefer."""
_END_ALIGNMENT = 128
# Both as in that file: NCCL's bandwidth is high for sizes that a large power of two divides.
_WIDE_END_ALIGNMENT = 1 << 16
_MIN_BUCKET_SIZE = 1_000_000
_MAX_BUCKET_SIZE = 25_000_000
_NUM_BUCKETS = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """The place of one bucket in its buffer."""

    start: int
    stop: int
    numel_unpadded: int
    members: tuple[int, ...]
    """Indices of its parameters in the order of registration, the last one first."""


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Places of the parameters of one buffer."""

    offsets: tuple[int, ...]
    """Offset of each parameter in elements, in the order of registration."""
    buckets: tuple[Extent, ...]

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop if self.buckets else 0

    @property
    def numel_unpadded(self) -> int:
        """Elements up to the last parameter of each bucket, summed over the buckets."""
        return sum(bucket.numel_unpadded for bucket in self.buckets)


def default_bucket_size(numel: int) -> int:
    """Return the default number of elements of a bucket: several buckets leave while the backward runs.

    Args:
        numel: number of elements exchanged between the same ranks.
    """
    return max(_MIN_BUCKET_SIZE, min(_MAX_BUCKET_SIZE, numel // _NUM_BUCKETS))


@lru_cache(maxsize=256)
def lay_out(
    numels: tuple[int, ...], is_alone: tuple[bool, ...], bucket_size: int | None, num_shards: int, is_wide: bool
) -> BufferLayout:
    """Return the places of parameters. The same arguments give the same layout on any rank.

    Args:
        numels: number of elements of each parameter, in the order of registration.
        is_alone: whether a parameter has a bucket of its own.
        bucket_size: number of elements that closes a bucket; None puts all parameters into one bucket.
        num_shards: number of equal parts of every bucket; 0 means no shards and no padding.
        is_wide: buckets also end at multiples of 65,536 elements.
    """
    # Without shards no rank needs equal parts, so padding would only be sent for nothing.
    start_alignment = _START_ALIGNMENT if num_shards else 1
    end_alignment = lcm(num_shards, _END_ALIGNMENT, _WIDE_END_ALIGNMENT if is_wide else 1) if num_shards else 1
    offsets = [0] * len(numels)
    buckets: list[Extent] = []
    members: list[int] = []
    start = end = 0

    def close() -> None:
        nonlocal start, end
        # A bucket ends where all shards are equal and aligned; the next one starts there.
        stop = _align(end, end_alignment)
        buckets.append(Extent(start, stop, end - start, tuple(members)))
        members.clear()
        start = end = stop

    # Backwards produce gradients from the last registered parameter to the first, so buckets fill in this order.
    for index in reversed(range(len(numels))):
        if is_alone[index] and members:
            close()
        offsets[index] = _align(end, start_alignment)
        end = offsets[index] + numels[index]
        members.append(index)
        if is_alone[index] or (bucket_size is not None and end - start >= bucket_size):
            close()
    if members:
        close()
    return BufferLayout(tuple(offsets), tuple(buckets))


def choose_bucket_size(config: GradientConfig, numels: Sequence[int]) -> int | None:
    """Return the number of elements that closes a bucket; None for one bucket per buffer.

    Args:
        config: contains the size, or None to derive it from the size of the model.
        numels: number of elements of each parameter that the same ranks exchange.
    """
    if not config.overlap_grad_reduce:
        return None
    return config.bucket_size or default_bucket_size(sum(numels))


def _align(index: int, alignment: int) -> int:
    return -(-index // alignment) * alignment


def plan_later_reductions(name: str, role: ParameterRole, place: MeshPlace) -> Iterator[LaterReduction]:
    """Yield the reductions of a parameter's gradient after the sum over replicas, first to last.

    Args:
        name: name of the parameter.
        role: role of the parameter.
        place: place of this rank.

    Raises:
        UsageError: the parameter is a table that this rank's stage does not hold.
    """
    stages = ranks_along(place.dense, place.rank, ("pp",)) if role.over_pp or role.tied else ()
    if role.over_pp and len(stages) > 1:
        why = f"every stage has a part of its gradient: {role.reasons['pp']}"
        yield LaterReduction("conditional", ("pp",), tuple(sorted(stages)), "sum", why)
    axis = place.tensor_axis(role.is_expert)
    along = place.ranks((axis,), role.is_expert)
    if role.over_tp is not None and len(along) > 1:
        part = "a part of its gradient" if role.over_tp == "sum" else "a gradient of its own"
        yield LaterReduction("tensor", (axis,), along, role.over_tp, f"each has {part}: {role.reasons['tp']}")
    if role.tied is None or len(stages) < 2:
        return
    # Megatron ties the first stage's embedding with the last stage's output layer.
    holding = role.stages or (0, len(stages) - 1)
    if place.stage() not in holding or max(holding) >= len(stages):
        raise UsageError(
            f"{name}: this stage is not one of those that hold the {role.tied} table",
            tensor=name,
            rank=place.rank,
            got=f"stage {place.stage()} of {len(stages)}, and stages {list(holding)} that hold it",
            want="this stage among them",
            next_step=f'name the stages that hold it: mark(parameter, tied="{role.tied}", stages=(0, ...))',
        )
    ranks = tuple(sorted(stages[stage] for stage in holding))
    why = f"stages {join_words(map(str, holding))} hold the same {role.tied} table: {role.reasons['tied']}"
    yield LaterReduction(role.tied, ("pp",), ranks, "sum", why)


Entries: TypeAlias = tuple[
    int, GradientConfig, tuple[PlannedParameter, ...], tuple[PlannedBuffer, ...], tuple[PlannedBucket, ...],
    tuple[str, ...],
]  # fmt: skip
"""Rank, config, parameters, buffers, buckets and names of frozen parameters: the fields of a plan after its views."""

_ACROSS_STAGES = ("conditional", "word", "position")


@dataclass(frozen=True, slots=True)
class _BufferKind:
    """The properties that all parameters of one buffer share."""

    is_expert: bool
    dtype: torch.dtype
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    divisor: int
    over_tp: tuple[str, ...]
    """Operation along tp that follows on the shards, if any. Such parameters have a buffer of their own: ranks along tp
    may hold different numbers of elements of other parameters, which would shift the shards of these."""


def make_entries(
    module: torch.nn.Module | Sequence[torch.nn.Module], views: MeshViews, config: GradientConfig, rank: int | None
) -> Entries:
    """Return the entries of a rank's plan; see `GradientPlan.from_module`."""
    if not isinstance(config, GradientConfig):
        raise UsageError("the config is not a GradientConfig", got=type(config).__name__, want="a GradientConfig")
    place = MeshPlace(views, _find_own_rank(views) if rank is None else rank)
    if config.use_distributed_optimizer:
        check_shard_order(views)
    names, frozen = _names_by_parameter(module)
    kinds: dict[_BufferKind, list[int]] = {}
    parameters: list[PlannedParameter] = []
    for index, (parameter, known) in enumerate(names.items()):
        role = role_of(known[0], parameter, place, config)
        planned, kind = _plan_parameter(known, parameter, role, place, config)
        parameters.append(planned)
        kinds.setdefault(kind, []).append(index)
    # The default bucket size depends on all elements that the same ranks exchange, over all of their buffers.
    numels: dict[tuple[int, ...], list[int]] = {}
    for kind, indices in kinds.items():
        numels.setdefault(kind.ranks, []).extend(parameters[index].numel for index in indices)

    buffers: list[PlannedBuffer] = []
    layouts: list[BufferLayout] = []
    for kind, indices in kinds.items():
        shard_ranks, across_ranks = split_instances(kind.ranks, place.rank, config)
        layout = lay_out(
            tuple(parameters[index].numel for index in indices),
            tuple(_is_alone(parameters[index], config) for index in indices),
            choose_bucket_size(config, numels[kind.ranks]),
            len(shard_ranks) if config.use_distributed_optimizer else 0,
            config.pad_buckets_for_high_nccl_busbw,
        )
        layouts.append(layout)
        buffers.append(
            PlannedBuffer(
                id=len(buffers),
                is_expert=kind.is_expert,
                dtype=kind.dtype,
                grad_dtype=kind.grad_dtype,
                axes=kind.axes,
                ranks=kind.ranks,
                shard_ranks=shard_ranks,
                rank=place.rank,
                across_ranks=across_ranks,
                operation=_operation(config),
                divisor=kind.divisor,
                numel=layout.numel,
                numel_unpadded=layout.numel_unpadded,
                # Ids are known once all buffers have a layout: buckets are numbered across them.
                buckets=(),
            )
        )
    buckets = _number_buckets(parameters, buffers, layouts, list(kinds.values()))
    parts = tuple(_place_parameters(parameters, buffers, buckets, layouts, list(kinds.values()), config))
    numbered = tuple(
        replace(buffer, buckets=tuple(bucket.id for bucket in buckets if bucket.buffer == buffer.id))
        for buffer in buffers
    )
    return place.rank, config, parts, numbered, tuple(buckets), frozen


def iter_parameters(
    module: torch.nn.Module | Sequence[torch.nn.Module],
) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Yield all names and parameters in the order of registration, a parameter under each of its names.

    Names in several chunks start with the chunk's number, as in a ``ModuleList``.
    """
    if isinstance(module, torch.nn.Module):
        yield from module.named_parameters(remove_duplicate=False)
        return
    for number, chunk in enumerate(module):
        yield from chunk.named_parameters(prefix=str(number), remove_duplicate=False)


def _find_own_rank(views: MeshViews) -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    if views.main.size == 1:
        return views.main.ranks[0]
    raise UsageError(
        "the rank of the plan is unknown: torch.distributed is not initialised",
        got=f"rank=None, on a mesh of {views.main.size} ranks",
        want="a rank",
        next_step="give rank=, or call torch.distributed.init_process_group before",
    )


def _names_by_parameter(
    module: torch.nn.Module | Sequence[torch.nn.Module],
) -> tuple[dict[torch.nn.Parameter, list[str]], tuple[str, ...]]:
    """Return the names of each parameter that needs a gradient, and the names of all other parameters."""
    if not isinstance(module, torch.nn.Module) and not all(isinstance(chunk, torch.nn.Module) for chunk in module):
        raise UsageError("the object to plan is not a module", got=type(module).__name__, want="a module, or chunks")
    names: dict[torch.nn.Parameter, list[str]] = {}
    frozen: list[str] = []
    for name, parameter in iter_parameters(module):
        if not parameter.requires_grad:
            frozen.append(name)
        elif isinstance(parameter, torch.nn.UninitializedParameter):
            raise UsageError(
                f"{name} has no shape yet",
                tensor=name,
                got=type(parameter).__name__,
                want="a parameter with a shape",
                next_step="run the module once before it is planned",
            )
        else:
            # A tied parameter is one object with one gradient, so it has one place under all of its names.
            names.setdefault(parameter, []).append(name)
    return names, tuple(frozen)


def _plan_parameter(
    names: Sequence[str], parameter: torch.nn.Parameter, role: ParameterRole, place: MeshPlace, config: GradientConfig
) -> tuple[PlannedParameter, _BufferKind]:
    """Return the entry of a parameter, without its place in a buffer, and the kind of its buffer."""
    name, *aliases = names
    if role.is_expert and place.expert is None:
        raise UsageError(
            f"{name}: it belongs to an expert, and no mesh has the axis ep",
            tensor=name,
            rank=place.rank,
            got=f"the mesh {place.dense.grid!r}, and {role.reasons.get('expert')}",
            want="a view with the axes edp, ep, etp",
            next_step="give both factorings: xrank.layout.mesh.megatron_views(world_size, tp=, ep=)",
        )
    local = local_of(parameter)
    grad_dtype = torch.float32 if config.grad_reduce_in_fp32 else local.dtype
    if local.dtype.is_complex and not grad_dtype.is_complex:
        raise UsageError(
            f"{name}: its gradient is complex, and grad_reduce_in_fp32 keeps real numbers",
            tensor=name,
            got=str(local.dtype),
            want="grad_reduce_in_fp32=False",
        )
    axes = tuple(axis for axis in place.data_axes(role.is_expert) if axis not in role.sharded)
    ranks = place.ranks(axes, role.is_expert)
    divisor = 1 if config.calculate_per_token_loss else _find_divisor(role, place)
    later = tuple(plan_later_reductions(name, role, place))
    planned = PlannedParameter(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(local.shape),
        dtype=local.dtype,
        grad_dtype=grad_dtype,
        axes=axes,
        ranks=ranks,
        operation=_operation(config),
        divisor=divisor,
        later=later,
        buffer=0,
        bucket=0,
        offset=0,
        owned=(0, local.numel()),
        reasons=tuple(why for why in role.reasons.values() if not any(why in one.reason for one in later)),
        tensor_ranks=place.ranks((place.tensor_axis(role.is_expert),), role.is_expert),
        is_cut_over_tp=role.is_cut_over_tp,
        placement_axes=role.placement_axes,
    )
    # Without shards the later sum covers whole gradients, and no place in a buffer matters.
    over_tp = tuple(one.operation for one in later if one.kind == "tensor" and config.use_distributed_optimizer)
    return planned, _BufferKind(role.is_expert, local.dtype, grad_dtype, axes, ranks, divisor, over_tp)


def _find_divisor(role: ParameterRole, place: MeshPlace) -> int:
    """Return the number of ranks with different data; the same for experts, since each rank saw its part of the batch.

    Axes that cut the parameter do not count: the code that cut it averages its gradient along them.
    """
    mesh = place.mesh(role.is_expert)
    cut = prod(mesh.axis_length(axis) for axis in place.data_axes(role.is_expert) if axis in role.sharded)
    return len(place.ranks(place.data_axes(False))) // cut


def _is_alone(parameter: PlannedParameter, config: GradientConfig) -> bool:
    """Return whether a parameter has a bucket of its own: all stages that hold it then cut it into the same shards."""
    return config.use_distributed_optimizer and any(later.kind in _ACROSS_STAGES for later in parameter.later)


def split_instances(
    ranks: tuple[int, ...], rank: int, config: GradientConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of this instance of the distributed optimizer, and the ranks at this place in all instances."""
    count = config.num_distributed_optimizer_instances
    if count == 1:
        return ranks, (rank,)
    if len(ranks) % count:
        raise UsageError(
            f"{len(ranks)} replicas cannot be {count} instances of the distributed optimizer",
            rank=rank,
            got=f"ranks {list(ranks)}",
            want=f"a multiple of {count}",
            next_step="choose num_distributed_optimizer_instances that divides data parallel ranks of all weights",
        )
    size = len(ranks) // count
    instance, place = divmod(ranks.index(rank), size)
    return ranks[instance * size : (instance + 1) * size], ranks[place::size]


def _number_buckets(
    parameters: Sequence[PlannedParameter],
    buffers: Sequence[PlannedBuffer],
    layouts: Sequence[BufferLayout],
    members: Sequence[Sequence[int]],
) -> list[PlannedBucket]:
    """Return the buckets of all buffers by id: in the order in which a backward fills them."""
    found = []
    for buffer, layout, indices in zip(buffers, layouts, members, strict=True):
        for extent in layout.buckets:
            held = [indices[member] for member in extent.members]
            names = tuple(parameters[index].name for index in held)
            # The backward reaches the first registered parameter last, and so fills the bucket.
            found.append(
                (-held[-1], PlannedBucket(0, buffer.id, extent.start, extent.stop, extent.numel_unpadded, names))
            )
    found.sort(key=lambda bucket: bucket[0])
    return [replace(bucket, id=number) for number, (_, bucket) in enumerate(found)]


def _place_parameters(
    parameters: Sequence[PlannedParameter],
    buffers: Sequence[PlannedBuffer],
    buckets: Sequence[PlannedBucket],
    layouts: Sequence[BufferLayout],
    members: Sequence[Sequence[int]],
    config: GradientConfig,
) -> list[PlannedParameter]:
    """Return the parameters with their places and their owned elements."""
    offsets = {
        index: (buffer, offset)
        for buffer, layout, indices in zip(buffers, layouts, members, strict=True)
        for index, offset in zip(indices, layout.offsets, strict=True)
    }
    bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
    placed = []
    for index, parameter in enumerate(parameters):
        (buffer, offset), bucket = offsets[index], bucket_of[parameter.name]
        owned = (0, parameter.numel)
        if config.use_distributed_optimizer:
            # The part of the parameter inside this rank's shard, in its own elements; empty if they do not meet.
            start, stop = shard_bounds(bucket.start, bucket.stop, len(buffer.shard_ranks), buffer.place)
            owned = (max(start - offset, 0), min(stop - offset, parameter.numel))
            owned = owned if owned[0] < owned[1] else (0, 0)
        placed.append(replace(parameter, buffer=buffer.id, bucket=bucket.id, offset=offset, owned=owned))
    return placed


def _operation(config: GradientConfig) -> Operation:
    return "average" if config.average_in_collective else "sum"
