"""The gradient plan of a rank: for each parameter its replicas, its reductions and its place in a buffer.

Pure data, made from a module, a mesh and a rank. Needs no processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from math import lcm, prod
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.faults import At
from xrank.gradients.roles import (
    DENSE_DATA_AXES,
    MeshPlace,
    ParameterRole,
    as_mesh_views,
    check_shard_order,
    local_of,
    ranks_along,
    role_of,
)
from xrank.layout import MeshViews
from xrank.words import join_words, ranks_text

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


@lru_cache(maxsize=256)
def lay_out(
    numels: tuple[int, ...], is_alone: tuple[bool, ...], bucket_size: int | None, num_shards: int, is_wide: bool
) -> tuple[tuple[int, ...], tuple[Extent, ...]]:
    """Return the offset of each parameter, in elements, and the buckets; equal on all ranks for equal arguments."""
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
    return tuple(offsets), tuple(buckets)


def choose_bucket_size(config: GradientConfig, numels: Sequence[int]) -> int | None:
    """Return the number of elements that closes a bucket; None for one bucket per buffer."""
    if not config.overlap_grad_reduce:
        return None
    return config.bucket_size or max(_MIN_BUCKET_SIZE, min(_MAX_BUCKET_SIZE, sum(numels) // _NUM_BUCKETS))


def _align(index: int, alignment: int) -> int:
    return -(-index // alignment) * alignment


def shard_bounds(start: int, stop: int, num_shards: int, place: int) -> tuple[int, int]:
    """Return the bounds of one shard of a bucket."""
    size = (stop - start) // num_shards
    return start + place * size, start + (place + 1) * size


Modules: TypeAlias = torch.nn.Module | Sequence[torch.nn.Module]
Operation: TypeAlias = Literal["sum", "average"]
LaterKind: TypeAlias = Literal["conditional", "tensor", "word", "position"]
LATER_KINDS: tuple[LaterKind, ...] = ("conditional", "tensor", "word", "position")
"""In the order of finalize: conditional embedders along pp, copies along tp, tied tables."""
ACROSS_STAGES = ("conditional", "word", "position")


@dataclass(frozen=True, slots=True)
class LaterReduction:
    """A reduction of one parameter's gradient by `finalize_model_grads`, after the sum over replicas."""

    kind: LaterKind
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Ranks that take part, this rank among them, ascending as in a process group; two or more."""
    operation: Operation
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """A parameter that needs a gradient. All numbers of elements count this rank's local tensor."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same parameter in the module."""
    shape: tuple[int, ...]
    """Shape of this rank's local tensor."""
    dtype: torch.dtype
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    """Axes longer than 1 along which ranks hold the same parameter and read different data, in the mesh's order."""
    ranks: tuple[int, ...]
    """The ranks along these axes, this rank among them, ascending as in a process group."""
    operation: Operation
    """Operation of the collective. With the buffer's `prescale`, the result is the ranks' sum, divided by `divisor`."""
    divisor: int
    later: tuple[LaterReduction, ...]
    """Later reductions, in the order of execution."""
    buffer: int
    bucket: int
    offset: int
    """Offset of its first element in the buffer, in elements."""
    owned: tuple[int, int]
    """This rank's range of its flattened elements, stop exclusive: the elements that are right after the collective and
    that this rank's optimizer steps. All elements without the distributed optimizer."""
    reasons: tuple[str, ...]
    tensor_ranks: tuple[int, ...] = ()
    """This rank and the ranks that differ from it along tp, or etp of experts, ascending."""
    is_cut_over_tp: bool | None = None
    """Whether these hold different parts of the parameter, or copies; None if no source defines it."""
    placement_axes: tuple[tuple[str, ...], ...] = ()
    """Axes of the plan that each placement of the parameter is along; empty for a plain tensor."""

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)


def list_later(parameters: Iterable[PlannedParameter]) -> list[tuple[PlannedParameter, LaterReduction]]:
    """Return all later reductions in one order on all ranks: by kind, since stages register tables in other orders."""
    pairs = [(parameter, later) for parameter in parameters for later in parameter.later]
    return sorted(pairs, key=lambda pair: LATER_KINDS.index(pair[1].kind))


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A part of a buffer that one collective exchanges."""

    id: int
    """Position in the order in which buckets leave, over all buffers of the plan."""
    buffer: int
    start: int
    """First element in the buffer."""
    stop: int
    """One past the last element in the buffer, padding included."""
    numel_unpadded: int
    """Elements up to the end of the last parameter, gaps between parameters included."""
    names: tuple[str, ...]
    """Names of its parameters in the order of the buffer: the last registered one first."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A contiguous run of gradients of one dtype that the same ranks exchange in the same way."""

    id: int
    is_expert: bool
    dtype: torch.dtype
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Replicas: ranks that hold the same buffer."""
    rank: int
    shard_ranks: tuple[int, ...]
    """Ranks that own the shards of a bucket, in the order of the shards; `ranks` unless there are several instances of
    the distributed optimizer."""
    across_ranks: tuple[int, ...]
    """Ranks that hold the same shard in each instance; only this rank if there is one instance."""
    operation: Operation
    divisor: int
    numel: int
    """Elements, padding included."""
    buckets: tuple[int, ...]
    """Ids of the buckets, in the order of the buffer."""

    @property
    def prescale(self) -> float:
        """Factor of the gradients before the collective, after which the result is the sum over `divisor`."""
        return len(self.ranks) / self.divisor if self.operation == "average" else 1.0 / self.divisor

    @property
    def place(self) -> int:
        """Index of this rank's shard in each bucket: its place in `shard_ranks`."""
        return self.shard_ranks.index(self.rank)


def _explain_replicas(parameter: PlannedParameter, buffer: PlannedBuffer, config: GradientConfig) -> str:
    shape = f"[{', '.join(map(str, parameter.shape))}]"
    kept = str(parameter.dtype).removeprefix("torch.")
    if parameter.grad_dtype != parameter.dtype:
        kept += f", its gradient {str(parameter.grad_dtype).removeprefix('torch.')}"
    kind = "an expert's parameter" if buffer.is_expert else "a parameter"
    if len(parameter.ranks) == 1:
        added = f"Rank {buffer.rank} holds the only copy, so its gradient is not added up with others"
    else:
        along = join_words(parameter.axes)
        added = f"Its gradients on {ranks_text(parameter.ranks)}, replicas along {along}, are added up"
    if config.calculate_per_token_loss:
        divided = "; finalize_model_grads divides by the number of tokens"
    elif parameter.divisor == 1:
        divided = ""
    elif parameter.divisor == len(parameter.ranks):
        divided = f" and divided by {parameter.divisor}"
    else:
        word = "but" if len(parameter.ranks) == 1 else "and"
        divided = f" {word} divided by {parameter.divisor}, the number of ranks that see different data"
    return f"{parameter.name} is {kind} of shape {shape} in {kept}. {added}{divided}."


def _list_elements(start: int, stop: int) -> str:
    if stop - start < 2:
        return f"element {start}" if stop > start else "no element"
    return f"elements {start} to {stop - 1}"


_DEFAULT = GradientConfig()


@dataclass(frozen=True)
class GradientPlan:
    """The plan of all gradient reductions of one rank. Replicas get equal layouts; no process group is needed.

    Example:
        >>> import torch
        >>> from xrank.gradients import GradientPlan
        >>> from xrank.layout import DeviceMesh
        >>> plan = GradientPlan.from_module(torch.nn.Linear(4, 2), DeviceMesh((2,), ("dp",)), rank=0)
        >>> plan["weight"].ranks, plan["weight"].divisor
        ((0, 1), 2)
    """

    views: MeshViews
    rank: int
    config: GradientConfig
    parameters: tuple[PlannedParameter, ...]
    """In the order of registration."""
    buffers: tuple[PlannedBuffer, ...]
    buckets: tuple[PlannedBucket, ...]
    """Ordered by id."""
    frozen: tuple[str, ...]
    """Names of parameters that need no gradient, and so no place."""

    @cached_property
    def _by_name(self) -> Mapping[str, PlannedParameter]:
        return {name: parameter for parameter in self.parameters for name in (parameter.name, *parameter.aliases)}

    @classmethod
    def from_module(
        cls,
        module: Modules,
        mesh: Any,
        config: GradientConfig = _DEFAULT,
        rank: int | None = None,
        *,
        axes: Mapping[str, str] | None = None,
    ) -> GradientPlan:
        """Return the plan of one rank for its module, or for its chunks of a module.

        Args:
            module: this rank's module. Names in several chunks start with the chunk's number, as in a ``ModuleList``.
            mesh: a `DeviceMesh` or torch's with axes among pp, dp, cp, tp, or `MeshViews` with a view that has edp, ep,
                etp, pp for experts. Frameworks' own names are known too (`roles.AXIS_ALIASES`): data, fsdp,
                replicate and shard of hybrid sharding, tensor, model; an unnamed torch mesh of one axis is dp.
            config: storage and exchange of gradients.
            rank: rank of the plan; this process' rank when None.
            axes: names of the mesh's axes -> names here, for further names: ``{"nodes": "dp_replicate"}``.

        Raises:
            LayoutError: the mesh does not contain the rank, or has an unknown axis.
            UsageError: the role of a parameter contradicts itself or the mesh; or the rank is unknown.
        """
        return _make_plan(module, as_mesh_views(mesh, axes), config, rank)

    def __getitem__(self, name: str) -> PlannedParameter:
        found = self._by_name.get(name)
        if found is not None:
            return found
        if name in self.frozen:
            raise At(name).usage_error("it is frozen: it has no gradient", "unfreeze it before the plan is made")
        near = get_close_matches(name, self._by_name, n=3)
        known = f"such as {', '.join(near)}" if near else f"one of its {len(self.parameters)} parameters"
        raise UsageError(f"the plan has no parameter {name!r}", tensor=name, rank=self.rank, want=known)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def all_ranks(self) -> tuple[int, ...]:
        """All ranks of the mesh, ascending."""
        return tuple(sorted(self.views.main.ranks))

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return this rank and the ranks that differ from it along axes of the dense mesh, ascending.

        Axes that the mesh does not have count as of length 1.
        """
        return tuple(sorted(ranks_along(self.views.main, self.rank, axes)))

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """Ranks that read different data with the same dense weights, this rank among them."""
        return self.ranks_along(*DENSE_DATA_AXES)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every set of two or more ranks that a step of this rank exchanges with, each once.

        These are the ranks of buffers and of later reductions; the ranks along pp and `data_ranks`, for token counts;
        `data_ranks` and tp, for routers; the ranks along tp, for norms; and all ranks of the mesh, for faults.
        """
        sets = [ranks for buffer in self.buffers for ranks in (buffer.ranks, buffer.shard_ranks, buffer.across_ranks)]
        sets += [later.ranks for parameter in self.parameters for later in parameter.later]
        sets += [parameter.tensor_ranks for parameter in self.parameters]
        sets += [self.ranks_along("pp"), self.data_ranks, self.ranks_along("tp", *DENSE_DATA_AXES)]
        sets.append(self.all_ranks)
        return tuple(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))

    def shard(self, bucket: PlannedBucket, rank: int | None = None) -> tuple[int, int]:
        """Return the bounds in the buffer of a rank's shard of a bucket; without shards, of the whole bucket.

        `rank` is one of the buffer's `shard_ranks`; None: the plan's rank.
        """
        if not self.config.use_distributed_optimizer:
            return bucket.start, bucket.stop
        buffer = self.buffers[bucket.buffer]
        place = buffer.place if rank is None else buffer.shard_ranks.index(rank)
        return shard_bounds(bucket.start, bucket.stop, len(buffer.shard_ranks), place)

    def owners(self, name: str) -> tuple[int, ...]:
        """Return the ranks of `shard_ranks` that own elements of a parameter, in the order of its elements."""
        parameter = self[name]
        buffer, bucket = self.buffers[parameter.buffer], self.buckets[parameter.bucket]
        if not self.config.use_distributed_optimizer or not parameter.numel:
            return buffer.shard_ranks
        # `lay_out` padded the bucket to equal shards.
        size = bucket.numel // len(buffer.shard_ranks)
        first = parameter.offset - bucket.start
        return buffer.shard_ranks[first // size : (first + parameter.numel - 1) // size + 1]

    def explain(self, name: str) -> str:
        """Explain in plain sentences how a parameter's gradient is reduced, and why."""
        if name in self.frozen:
            return f"{name} is frozen: it has no gradient, no place in a buffer, and is never exchanged."
        parameter = self[name]
        buffer = self.buffers[parameter.buffer]
        sentences = [_explain_replicas(parameter, buffer, self.config)]
        for later in parameter.later:
            verb = "summed" if later.operation == "sum" else "averaged"
            ranks, axes = ranks_text(later.ranks), join_words(later.axes)
            sentences.append(f"Later it is {verb} over {ranks} along {axes}, because {later.reason}.")
        sentences.append(self._explain_place(parameter))
        if parameter.reasons:
            sentences.append(f"This is known because {join_words(parameter.reasons)}.")
        if parameter.aliases:
            sentences.append(f"It is also called {join_words(parameter.aliases)}.")
        return " ".join(sentences)

    def _explain_place(self, parameter: PlannedParameter) -> str:
        at = _list_elements(parameter.offset, parameter.offset + parameter.numel)
        where = f"It is in bucket {parameter.bucket} of {len(self.buckets)}, {at} of buffer {parameter.buffer}"
        if not self.config.use_distributed_optimizer:
            return f"{where}."
        (start, stop), owners = parameter.owned, self.owners(parameter.name)
        if (start, stop) == (0, parameter.numel):
            return f"{where}, and rank {self.rank} owns all of it."
        if len(owners) == 1:
            return f"{where}, and rank {owners[0]} owns all of it."
        mine = f"{_list_elements(start, stop)} of it" if stop > start else "none of it"
        return f"{where}. {ranks_text(owners).capitalize()} own shards of it: rank {self.rank} owns {mine}."


def plan_later_reductions(name: str, role: ParameterRole, place: MeshPlace) -> Iterator[LaterReduction]:
    """Yield the reductions of a parameter's gradient after the sum over replicas, first to last."""
    stages = ranks_along(place.dense, place.rank, ("pp",)) if role.over_pp or role.tied else ()
    if role.over_pp and len(stages) > 1:
        why = f"every stage has a part of its gradient: {role.reasons['pp']}"
        yield LaterReduction("conditional", ("pp",), tuple(sorted(stages)), "sum", why)
    axis = place.tensor_axis(role.is_expert)
    along = place.ranks((axis,), role.is_expert)
    if role.over_tp is not None and len(along) > 1:
        part = "a part of its gradient" if role.over_tp == "sum" else "its own gradient"
        yield LaterReduction("tensor", (axis,), along, role.over_tp, f"each has {part}: {role.reasons['tp']}")
    if role.tied is None or len(stages) < 2:
        return
    # Megatron ties the first stage's embedding with the last stage's output layer.
    holding = role.stages or (0, len(stages) - 1)
    if place.stage() not in holding or max(holding) >= len(stages):
        raise At(name, place.rank).usage_error(
            f"this stage is not one of those that hold the {role.tied} table",
            f'name the stages that hold it: mark(parameter, tied="{role.tied}", stages=(0, ...))',
            f"stage {place.stage()} of {len(stages)}, and stages {list(holding)} that hold it",
        )
    ranks = tuple(sorted(stages[stage] for stage in holding))
    why = f"stages {join_words(map(str, holding))} hold the same {role.tied} table: {role.reasons['tied']}"
    yield LaterReduction(role.tied, ("pp",), ranks, "sum", why)


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


def _make_plan(module: Modules, views: MeshViews, config: GradientConfig, rank: int | None) -> GradientPlan:
    if not isinstance(config, GradientConfig):
        raise UsageError("the config is not a GradientConfig", got=type(config).__name__, want="a GradientConfig")
    if rank is None and dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    elif rank is None and views.main.size == 1:
        rank = views.main.ranks[0]
    elif rank is None:
        raise At().usage_error(
            f"the rank of the plan on a mesh of {views.main.size} ranks is unknown: torch.distributed is not "
            "initialized",
            "give rank=, or call torch.distributed.init_process_group before",
        )
    place = MeshPlace(views, rank)
    if config.use_distributed_optimizer:
        check_shard_order(views)
    if not isinstance(module, torch.nn.Module) and not all(isinstance(chunk, torch.nn.Module) for chunk in module):
        raise UsageError("the object to plan is not a module", got=type(module).__name__, want="a module, or chunks")
    names: dict[torch.nn.Parameter, list[str]] = {}
    frozen: list[str] = []
    for name, parameter in iter_parameters(module):
        if not parameter.requires_grad:
            frozen.append(name)
        elif isinstance(parameter, torch.nn.UninitializedParameter):
            raise At(name).usage_error("it has no shape yet", "run the module once before it is planned")
        else:
            # A tied parameter is one object with one gradient, so it has one place under all of its names.
            names.setdefault(parameter, []).append(name)
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

    operation: Operation = "average" if config.average_in_collective else "sum"
    buffers: list[PlannedBuffer] = []
    unnumbered: list[tuple[int, PlannedBucket]] = []
    for kind, indices in kinds.items():
        shard_ranks, across_ranks = split_instances(kind.ranks, place.rank, config)
        offsets, extents = lay_out(
            tuple(parameters[index].numel for index in indices),
            # All stages that hold a parameter cut its bucket into the same shards, so it has one of its own.
            tuple(
                config.use_distributed_optimizer
                and any(later.kind in ACROSS_STAGES for later in parameters[index].later)
                for index in indices
            ),
            choose_bucket_size(config, numels[kind.ranks]),
            len(shard_ranks) if config.use_distributed_optimizer else 0,
            config.pad_buckets_for_high_nccl_busbw,
        )
        number = len(buffers)
        for index, offset in zip(indices, offsets, strict=True):
            parameters[index] = replace(parameters[index], buffer=number, offset=offset)
        for extent in extents:
            held = [indices[member] for member in extent.members]
            among = tuple(parameters[index].name for index in held)
            bucket = PlannedBucket(0, number, extent.start, extent.stop, extent.numel_unpadded, among)
            # The backward reaches the first registered parameter last, and so fills the bucket.
            unnumbered.append((-held[-1], bucket))
        buffers.append(
            PlannedBuffer(
                id=number,
                is_expert=kind.is_expert,
                dtype=kind.dtype,
                grad_dtype=kind.grad_dtype,
                axes=kind.axes,
                ranks=kind.ranks,
                shard_ranks=shard_ranks,
                rank=place.rank,
                across_ranks=across_ranks,
                operation=operation,
                divisor=kind.divisor,
                numel=extents[-1].stop,
                buckets=(),
            )
        )
    # Numbered across all buffers, in the order in which a backward fills the buckets.
    unnumbered.sort(key=lambda pair: pair[0])
    buckets = tuple(replace(bucket, id=number) for number, (_, bucket) in enumerate(unnumbered))
    placed: dict[str, PlannedParameter] = {planned.name: planned for planned in parameters}
    for bucket in buckets:
        for name in bucket.names:
            planned, owned = placed[name], (0, placed[name].numel)
            if config.use_distributed_optimizer:
                # The part of it inside this rank's shard, in its own elements; empty if they do not meet.
                buffer = buffers[bucket.buffer]
                start, stop = shard_bounds(bucket.start, bucket.stop, len(buffer.shard_ranks), buffer.place)
                owned = max(start - planned.offset, 0), min(stop - planned.offset, planned.numel)
                owned = owned if owned[0] < owned[1] else (0, 0)
            placed[name] = replace(planned, bucket=bucket.id, owned=owned)
    numbered = tuple(
        replace(buffer, buckets=tuple(bucket.id for bucket in buckets if bucket.buffer == buffer.id))
        for buffer in buffers
    )
    return GradientPlan(views, place.rank, config, tuple(placed.values()), numbered, buckets, tuple(frozen))


def iter_parameters(module: Modules) -> Iterable[tuple[str, torch.nn.Parameter]]:
    """Yield all names and parameters in the order of registration, a parameter under each of its names."""
    if isinstance(module, torch.nn.Module):
        yield from module.named_parameters(remove_duplicate=False)
        return
    for number, chunk in enumerate(module):
        # As in a ModuleList.
        yield from chunk.named_parameters(prefix=str(number), remove_duplicate=False)


def _plan_parameter(
    names: Sequence[str], parameter: torch.nn.Parameter, role: ParameterRole, place: MeshPlace, config: GradientConfig
) -> tuple[PlannedParameter, _BufferKind]:
    """Return the entry of a parameter, without its place in a buffer, and the kind of its buffer."""
    name, *aliases = names
    if role.is_expert and place.expert is None:
        raise At(name, place.rank).usage_error(
            f"it belongs to an expert, since {role.reasons.get('expert')}, and the mesh {place.dense.grid!r} has no ep",
            "give both meshes, dense and expert: xrank.layout.mesh.megatron_views(world_size, tp=, ep=)",
        )
    local = local_of(parameter)
    grad_dtype = torch.float32 if config.grad_reduce_in_fp32 else local.dtype
    if local.dtype.is_complex and not grad_dtype.is_complex:
        raise At(name).usage_error(
            f"its gradient is {local.dtype}, and grad_reduce_in_fp32 keeps real numbers",
            "set grad_reduce_in_fp32=False",
        )
    axes = tuple(axis for axis in place.data_axes(role.is_expert) if axis not in role.sharded)
    ranks = place.ranks(axes, role.is_expert)
    divisor = 1
    if not config.calculate_per_token_loss:
        # The ranks with different data; the same for experts, since each rank saw its part of the batch. Axes that cut
        # the parameter do not count: the code that cut it averages its gradient along them.
        mesh = place.mesh(role.is_expert)
        cut = prod(mesh.axis_length(axis) for axis in place.data_axes(role.is_expert) if axis in role.sharded)
        divisor = len(place.ranks(place.data_axes(False))) // cut
    later = tuple(plan_later_reductions(name, role, place))
    planned = PlannedParameter(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(local.shape),
        dtype=local.dtype,
        grad_dtype=grad_dtype,
        axes=axes,
        ranks=ranks,
        operation="average" if config.average_in_collective else "sum",
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


def split_instances(
    ranks: tuple[int, ...], rank: int, config: GradientConfig
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of this instance of the distributed optimizer, and the ranks at this place in all instances."""
    count = config.num_distributed_optimizer_instances
    if count == 1:
        return ranks, (rank,)
    if len(ranks) % count:
        raise At(rank=rank).usage_error(
            f"{len(ranks)} replicas, ranks {list(ranks)}, cannot be {count} instances of the distributed optimizer",
            "choose num_distributed_optimizer_instances that divides data parallel ranks of all weights",
        )
    size = len(ranks) // count
    instance, place = divmod(ranks.index(rank), size)
    return ranks[instance * size : (instance + 1) * size], ranks[place::size]
