"""Entries of a gradient plan: parameters, buckets, buffers and later reductions. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from xrank.errors import GradientError, UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.mesh_places import DENSE_DATA_AXES, as_mesh_views, ranks_along
from xrank.layout import MeshViews
from xrank.words import join_words, ranks_text

if TYPE_CHECKING:
    import torch


Operation: TypeAlias = Literal["sum", "average"]
LaterKind: TypeAlias = Literal["conditional", "tensor", "word", "position"]
LATER_KINDS: tuple[LaterKind, ...] = ("conditional", "tensor", "word", "position")
"""In the order of finalize: conditional embedders along pp, copies along tp, tied tables."""


def _compute_prescale(operation: Operation, divisor: int, num_ranks: int) -> float:
    """Return the factor of a gradient before its collective, after which the result is the sum over `divisor`."""
    return num_ranks / divisor if operation == "average" else 1.0 / divisor


def shard_bounds(start: int, stop: int, num_shards: int, place: int) -> tuple[int, int]:
    """Return the bounds of one shard of a bucket."""
    size = (stop - start) // num_shards
    return start + place * size, start + (place + 1) * size


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
    """Operation of the collective. With `prescale`, the result is the sum over the ranks, divided by `divisor`."""
    divisor: int
    later: tuple[LaterReduction, ...]
    """Later reductions, in the order of execution."""
    buffer: int
    """Number of its buffer in the plan."""
    bucket: int
    """Id of its bucket."""
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

    @property
    def prescale(self) -> float:
        """Factor of the gradient before its collective."""
        return _compute_prescale(self.operation, self.divisor, len(self.ranks))


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
    """Dtype of the parameters."""
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Replicas: ranks that hold the same buffer."""
    rank: int
    """The rank of the plan."""
    shard_ranks: tuple[int, ...]
    """Ranks that own the shards of a bucket, in the order of the shards; `ranks` unless there are several instances of
    the distributed optimizer."""
    across_ranks: tuple[int, ...]
    """Ranks that hold the same shard in each instance; this rank alone if there is one instance."""
    operation: Operation
    divisor: int
    numel: int
    """Elements, padding included."""
    numel_unpadded: int
    """Sum of `numel_unpadded` of the buckets."""
    buckets: tuple[int, ...]
    """Ids of the buckets, in the order of the buffer."""

    @property
    def prescale(self) -> float:
        """Factor of the gradients before the collective."""
        return _compute_prescale(self.operation, self.divisor, len(self.ranks))

    @property
    def place(self) -> int:
        """Index of this rank's shard in each bucket: its place in `shard_ranks`."""
        return self.shard_ranks.index(self.rank)


def explain_frozen(name: str) -> str:
    """Return the sentence for a parameter without a gradient."""
    return f"{name} is frozen: it has no gradient, no place in a buffer, and is never exchanged."


def explain_parameter(
    parameter: PlannedParameter,
    buffer: PlannedBuffer,
    config: GradientConfig,
    num_buckets: int,
    owners: Sequence[int],
) -> str:
    """Return plain sentences on the exchanges of a parameter's gradient on the plan's rank, with their reasons.

    Args:
        parameter: the parameter.
        buffer: its buffer.
        config: the plan's.
        num_buckets: number of buckets in the plan.
        owners: ranks that own elements of the parameter.
    """
    sentences = [
        _explain_replicas(parameter, buffer, config),
        *map(_explain_later, parameter.later),
        _explain_place(parameter, buffer, config, num_buckets, owners),
    ]
    if parameter.reasons:
        sentences.append(f"This is known because {join_words(parameter.reasons)}.")
    if parameter.aliases:
        sentences.append(f"It is also called {join_words(parameter.aliases)}.")
    return " ".join(sentences)


def _explain_replicas(parameter: PlannedParameter, buffer: PlannedBuffer, config: GradientConfig) -> str:
    shape = f"[{', '.join(map(str, parameter.shape))}]"
    kept = _dtype(parameter.dtype)
    if parameter.grad_dtype != parameter.dtype:
        kept += f", its gradient {_dtype(parameter.grad_dtype)}"
    kind = "an expert's parameter" if buffer.is_expert else "a parameter"
    start = f"{parameter.name} is {kind} of shape {shape} in {kept}."
    if len(parameter.ranks) == 1:
        added = f"Rank {buffer.rank} holds the only copy, so its gradient is not added up with others"
    else:
        along = join_words(parameter.axes)
        added = f"Its gradients on {ranks_text(parameter.ranks)}, replicas along {along}, are added up"
    return f"{start} {added}{_explain_divisor(parameter, config)}."


def _explain_divisor(parameter: PlannedParameter, config: GradientConfig) -> str:
    if config.calculate_per_token_loss:
        return "; finalize_model_grads divides by the number of tokens"
    if parameter.divisor == 1:
        return ""
    if parameter.divisor == len(parameter.ranks):
        return f" and divided by {parameter.divisor}"
    word = "but" if len(parameter.ranks) == 1 else "and"
    return f" {word} divided by {parameter.divisor}, the number of ranks that see different data"


def _explain_later(later: LaterReduction) -> str:
    verb = "summed" if later.operation == "sum" else "averaged"
    ranks, axes = ranks_text(later.ranks), join_words(later.axes)
    return f"Later it is {verb} over {ranks} along {axes}, because {later.reason}."


def _explain_place(
    parameter: PlannedParameter, buffer: PlannedBuffer, config: GradientConfig, num_buckets: int, owners: Sequence[int]
) -> str:
    at = _list_elements(parameter.offset, parameter.offset + parameter.numel)
    where = f"It lies in bucket {parameter.bucket} of {num_buckets}, {at} of buffer {parameter.buffer}"
    if not config.use_distributed_optimizer:
        return f"{where}."
    start, stop = parameter.owned
    if (start, stop) == (0, parameter.numel):
        return f"{where}, and rank {buffer.rank} owns all of it."
    if len(owners) == 1:
        return f"{where}, and rank {owners[0]} owns all of it."
    mine = f"{_list_elements(start, stop)} of it" if stop > start else "none of it"
    return f"{where}. {ranks_text(owners).capitalize()} own shards of it: rank {buffer.rank} owns {mine}."


def _list_elements(start: int, stop: int) -> str:
    if stop - start < 2:
        return f"element {start}" if stop > start else "no element"
    return f"elements {start} to {stop - 1}"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


_DEFAULT = GradientConfig()


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """The exchanges of all gradients of one rank. Replicas get equal layouts; no process group is needed.

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
    _by_name: Mapping[str, PlannedParameter] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known = {name: parameter for parameter in self.parameters for name in (parameter.name, *parameter.aliases)}
        object.__setattr__(self, "_by_name", known)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module | Sequence[torch.nn.Module],
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
                etp, pp for experts. Frameworks' own names are known too (`mesh_places.AXIS_ALIASES`): data, fsdp,
                replicate and shard of hybrid sharding, tensor, model; an unnamed torch mesh of one axis is dp.
            config: storage and exchange of gradients.
            rank: rank of the plan; this process' rank when None.
            axes: names of the mesh's axes -> names here, for further names: ``{"nodes": "dp_replicate"}``.

        Raises:
            LayoutError: the mesh does not contain the rank, or has an unknown axis.
            UsageError: the role of a parameter contradicts itself or the mesh; or the rank is unknown.
        """
        from xrank.gradients.plan_maker import make_entries  # imports torch

        views = as_mesh_views(mesh, axes)
        return cls(views, *make_entries(module, views, config, rank))

    def __getitem__(self, name: str) -> PlannedParameter:
        found = self._by_name.get(name)
        if found is not None:
            return found
        if name in self.frozen:
            raise UsageError(
                f"{name} is frozen: it has no gradient",
                tensor=name,
                got="requires_grad=False",
                next_step="ask for a parameter that requires a gradient, or unfreeze it before the plan is made",
            )
        near = get_close_matches(name, self._by_name, n=3)
        raise UsageError(
            f"the plan has no parameter {name!r}",
            tensor=name,
            rank=self.rank,
            got=repr(name),
            want=f"such as {', '.join(near)}" if near else f"one of its {len(self.parameters)} parameters",
        )

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __reduce__(self) -> tuple[Any, ...]:
        # __post_init__ builds the index by name again.
        arguments = (self.views, self.rank, self.config, self.parameters, self.buffers, self.buckets, self.frozen)
        return (GradientPlan, arguments)

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
        sets.append(tuple(sorted(self.views.main.ranks)))
        return tuple(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))

    def shard(self, bucket: PlannedBucket, rank: int | None = None) -> tuple[int, int]:
        """Return the bounds in the buffer of a rank's shard of a bucket; without shards, of the whole bucket.

        Args:
            bucket: a bucket of this plan.
            rank: one of the buffer's `shard_ranks`; the plan's rank when None.
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
        """Return plain sentences on the exchanges of a parameter's gradient, with their reasons."""
        if name in self.frozen:
            return explain_frozen(name)
        parameter = self[name]
        buffer = self.buffers[parameter.buffer]
        return explain_parameter(parameter, buffer, self.config, len(self.buckets), self.owners(name))


def buffer_lines(plan: GradientPlan, buffer: PlannedBuffer) -> list[str]:
    """Return the lines that must be equal on all replicas of a buffer, parameters first: a difference names one."""
    names = [name for bucket_id in buffer.buckets for name in plan.buckets[bucket_id].names]
    how = f"{buffer.operation}, divided by {buffer.divisor}, among ranks {list(buffer.ranks)}"
    lines = [f"{name} of shape {plan[name].shape}" for name in names]
    lines.append(f"a buffer of {buffer.numel} elements of {buffer.grad_dtype} for {buffer.dtype}: {how}")
    for bucket_id in buffer.buckets:
        bucket = plan.buckets[bucket_id]
        lines.append(f"a bucket of elements {bucket.start} to {bucket.stop}, {bucket.numel_unpadded} of them used")
        lines += (f"{name} at element {plan[name].offset}" for name in bucket.names)
    return lines


def agreement_lines(plan: GradientPlan) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the lines that must be equal among each set of ranks that this rank exchanges gradients with.

    The lines hold configs, buffers and the owned elements of each parameter that is reduced later, so that ranks along
    tp, or the stages that share a table, exchange equal parts. They omit a table's name: each stage has its own.
    """
    lines: dict[tuple[int, ...], list[str]] = {}
    for buffer in plan.buffers:
        # A buffer on one rank is not exchanged, so nothing has to agree.
        if len(buffer.ranks) > 1:
            lines.setdefault(buffer.ranks, [str(plan.config)]).extend(buffer_lines(plan, buffer))
    for parameter, later in list_later(plan.parameters):
        name = parameter.name if later.kind == "tensor" else f"a {later.kind} parameter"
        elements = _describe_elements(parameter)
        lines.setdefault(later.ranks, []).append(f"{name}, {later.operation} over {later.axes}: {elements}")
    return {ranks: tuple(found) for ranks, found in lines.items()}


def check_lines(lines: Mapping[int, Sequence[str]]) -> None:
    """Compare the lines of one set of ranks.

    Args:
        lines: by rank.

    Raises:
        GradientError: two ranks differ; it shows the first different line of both.
    """
    first, *others = sorted(lines)
    for other in others:
        mine, theirs = [*lines[first]], [*lines[other]]
        if mine == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), None)
        # One is the beginning of the other: the first line that is missing is the difference.
        at = min(len(mine), len(theirs)) if at is None else at
        raise GradientError(
            f"ranks {first} and {other} do not lay out the same gradients",
            rank=other,
            got=f"on rank {other}: {theirs[at] if at < len(theirs) else 'nothing more'}",
            want=f"as on rank {first}: {mine[at] if at < len(mine) else 'nothing more'}",
            next_step="make the same module with the same marks and GradientConfig on all of them",
        )


def _describe_elements(parameter: PlannedParameter) -> str:
    start, stop = parameter.owned
    return f"elements {start} to {stop} of shape {parameter.shape} in {parameter.grad_dtype}"
