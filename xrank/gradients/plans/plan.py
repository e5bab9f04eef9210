"""Gradient plans: for each parameter who holds it, what is added up, divided by what, and where it lies. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from xxhash import xxh128_hexdigest

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.plans.agreement import buffer_lines
from xrank.gradients.plans.bucket_layout import shard_of
from xrank.gradients.plans.explanation import explain_frozen, explain_parameter
from xrank.gradients.plans.mesh_places import DENSE_DATA_AXES, described_views, ranks_along
from xrank.layout import MeshViews

if TYPE_CHECKING:
    import torch

__all__ = ["GradientPlan", "LaterReduction", "Operation", "PlannedBucket", "PlannedBuffer", "PlannedParameter"]

Operation: TypeAlias = Literal["sum", "average"]


_DEFAULT = GradientConfig()


def prescale_of(operation: Operation, divisor: int, num_ranks: int) -> float:
    """Return what a gradient is multiplied by before its collective, so that the sum comes out divided."""
    return num_ranks / divisor if operation == "average" else 1.0 / divisor


@dataclass(frozen=True, slots=True)
class LaterReduction:
    """What `finalize_model_grads` does with one parameter after the replicas' gradients were added up."""

    kind: Literal["conditional", "tensor", "word", "position"]
    """In the order in which finalize works: conditional embedders along pp, copies along tp, tied tables."""
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Those that take part, this rank among them, ascending as in a process group; two or more."""
    operation: Operation
    reason: str


@dataclass(frozen=True, slots=True)
class PlannedParameter:
    """One parameter that needs a gradient. Numbers of elements are of this rank's local tensor."""

    name: str
    aliases: tuple[str, ...]
    """Other names of the same parameter in the module."""
    shape: tuple[int, ...]
    """Of this rank's local tensor."""
    dtype: torch.dtype
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    """Along which ranks hold the same and see other data, in the mesh's order; those of length 1 are left out."""
    ranks: tuple[int, ...]
    """Those ranks, this one among them, ascending as in a process group."""
    operation: Operation
    """What the collective does; what comes out is the sum over the ranks, divided by `divisor`."""
    divisor: int
    later: tuple[LaterReduction, ...]
    """In the order in which they are made."""
    buffer: int
    """The number of its buffer in the plan."""
    bucket: int
    """The id of its bucket."""
    offset: int
    """Of its first element in the buffer."""
    owned: tuple[int, int]
    """This rank's elements of it, flattened, first and one past the last: those that are right after the collective and
    that its optimizer steps. All of them without the distributed optimizer."""
    reasons: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements of the local tensor."""
        return prod(self.shape)

    @property
    def prescale(self) -> float:
        """What a gradient is multiplied by before its collective."""
        return prescale_of(self.operation, self.divisor, len(self.ranks))


@dataclass(frozen=True, slots=True)
class PlannedBucket:
    """A part of a buffer that one collective carries."""

    id: int
    """In the order in which buckets leave; counted over all buffers of the plan."""
    buffer: int
    start: int
    """In the buffer, inclusive."""
    stop: int
    """In the buffer, exclusive, with the padding at the end."""
    numel_unpadded: int
    """Up to the last parameter's last element; gaps between parameters are counted."""
    names: tuple[str, ...]
    """Of its parameters, in the order of the buffer: the last registered one first."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """One contiguous run of gradients: of one dtype, exchanged between the same ranks in the same way."""

    id: int
    is_expert: bool
    dtype: torch.dtype
    """Of the parameters."""
    grad_dtype: torch.dtype
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    """Replicas: they hold the same buffer."""
    rank: int
    """The one whose plan this is."""
    shard_ranks: tuple[int, ...]
    """Those among which a bucket is cut into shards, in the order of the shards; `ranks` unless there are several
    instances of the distributed optimizer."""
    across_ranks: tuple[int, ...]
    """Those that hold the same shard in each instance; this rank alone if there is one instance."""
    operation: Operation
    divisor: int
    numel: int
    """Elements, padding included."""
    numel_unpadded: int
    """The sum of the buckets'."""
    buckets: tuple[int, ...]
    """Ids, in the order of the buffer."""

    @property
    def prescale(self) -> float:
        """What gradients are multiplied by before the collective."""
        return prescale_of(self.operation, self.divisor, len(self.ranks))

    @property
    def place(self) -> int:
        """Which shard of each bucket is this rank's: its place in `shard_ranks`."""
        return self.shard_ranks.index(self.rank)


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """Who adds up what, for one rank. Needs no process group, can be pickled, and lays out all replicas alike."""

    views: MeshViews
    rank: int
    config: GradientConfig
    parameters: tuple[PlannedParameter, ...]
    """In the order of registration."""
    buffers: tuple[PlannedBuffer, ...]
    buckets: tuple[PlannedBucket, ...]
    """By id."""
    frozen: tuple[str, ...]
    """Parameters that need no gradient, and so no place."""
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
    ) -> GradientPlan:
        """Return the plan of one rank for its module, or its chunks of one.

        Args:
            module: this rank's module. Of several chunks, names start with the chunk's number, as in a ``ModuleList``.
            mesh: a `DeviceMesh` or torch's with axes among pp, dp, cp, tp, or `MeshViews` with a view that has edp, ep,
                etp, pp for experts.
            config: how gradients are kept and exchanged.
            rank: whose plan; this process' rank when None.

        Raises:
            LayoutError: the mesh has not the rank, or axes that mean nothing here.
            UsageError: what a parameter is said to be contradicts itself, or the mesh; or nothing says a rank.
        """
        from xrank.gradients.plans.plan_maker import make_plan

        return make_plan(module, described_views(mesh), config, rank)

    def __getitem__(self, name: str) -> PlannedParameter:
        found = self._by_name.get(name)
        if found is not None:
            return found
        if name in self.frozen:
            raise UsageError(f"{name} is frozen: it has no gradient", tensor=name, got="requires_grad=False")
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
        told = (self.views, self.rank, self.config, self.parameters, self.buffers, self.buckets, self.frozen)
        return (GradientPlan, told)

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from this one along these axes of the dense mesh, and this one, ascending.

        Axes that the mesh has not count as of length 1.
        """
        return tuple(sorted(ranks_along(self.views.main, self.rank, axes)))

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that see other data with the same dense weights, this one among them."""
        return self.ranks_along(*DENSE_DATA_AXES)

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every set of two or more ranks that a step of this rank exchanges with, each once.

        Those of all buffers and later reductions; along pp and of `data_ranks`, for numbers of tokens; of `data_ranks`
        and tp, for routers; and all ranks of the mesh, for what all must know.
        """
        sets = [ranks for buffer in self.buffers for ranks in (buffer.ranks, buffer.shard_ranks, buffer.across_ranks)]
        sets += [later.ranks for parameter in self.parameters for later in parameter.later]
        sets += [self.ranks_along("pp"), self.data_ranks, self.ranks_along("tp", *DENSE_DATA_AXES)]
        sets.append(tuple(sorted(self.views.main.ranks)))
        return tuple(dict.fromkeys(ranks for ranks in sets if len(ranks) > 1))

    def shard(self, bucket: PlannedBucket, rank: int | None = None) -> tuple[int, int]:
        """Return the part of its buffer that a rank owns of a bucket; all of the bucket without shards.

        Args:
            bucket: one of this plan's.
            rank: one of the buffer's `shard_ranks`; this plan's when None.
        """
        if not self.config.use_distributed_optimizer:
            return bucket.start, bucket.stop
        buffer = self.buffers[bucket.buffer]
        place = buffer.place if rank is None else buffer.shard_ranks.index(rank)
        return shard_of(bucket.start, bucket.stop, len(buffer.shard_ranks), place)

    def owners(self, name: str) -> tuple[int, ...]:
        """Return the ranks of `shard_ranks` that own some element of a parameter, in the order of its elements."""
        parameter = self[name]
        buffer, bucket = self.buffers[parameter.buffer], self.buckets[parameter.bucket]
        if not self.config.use_distributed_optimizer or not parameter.numel:
            return buffer.shard_ranks
        size = bucket.numel // len(buffer.shard_ranks)
        first = parameter.offset - bucket.start
        return buffer.shard_ranks[first // size : (first + parameter.numel - 1) // size + 1]

    def digest(self, buffer: PlannedBuffer) -> str:
        """Return a text of fixed length that is equal on two ranks if their layouts of the buffer are."""
        return xxh128_hexdigest("\n".join(buffer_lines(self, buffer)).encode())

    def explain(self, name: str) -> str:
        """Return in plain sentences what happens to a parameter's gradient, and why."""
        return explain_frozen(name) if name in self.frozen else explain_parameter(self, self[name])
