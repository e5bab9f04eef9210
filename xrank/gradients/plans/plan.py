"""The gradient plan of a rank: for each parameter its replicas, its reductions and its place in a buffer. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError
from xrank.gradients.config import GradientConfig
from xrank.gradients.mesh_places import DENSE_DATA_AXES, as_mesh_views, ranks_along
from xrank.gradients.plans.explanation import explain_frozen, explain_parameter
from xrank.gradients.plans.plan_entries import PlannedBucket, PlannedBuffer, PlannedParameter, shard_bounds
from xrank.layout import MeshViews

if TYPE_CHECKING:
    import torch

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
        from xrank.gradients.plans.plan_maker import make_entries  # imports torch

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
