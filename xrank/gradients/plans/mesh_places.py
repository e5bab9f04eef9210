"""One rank's place in Megatron's two factorings of the ranks, and the ranks around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, MeshViews

__all__ = ["DENSE_DATA_AXES", "EXPERT_DATA_AXES", "MeshPlace", "check_shard_order", "described_views", "ranks_along"]

DENSE_DATA_AXES = ("dp", "cp", "edp", "ep")
"""Axes along which ranks hold the same dense weights and see other data. Where one mesh has ep beside dp, or edp and ep
in the place of dp, dense weights have replicas along these too."""
EXPERT_DATA_AXES = ("dp", "edp", "cp")
"""The same for experts, in the mesh that has ep."""

_DENSE_AXES = {"pp", "dp", "cp", "tp", "edp", "ep"}
_EXPERT_AXES = {"pp", "edp", "dp", "cp", "ep", "etp", "tp"}


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """Where a rank stands.

    Raises:
        LayoutError: the rank is not in the mesh, or the mesh has an axis that is none of Megatron's.
    """

    views: MeshViews
    rank: int
    _found: dict[tuple[bool, tuple[str, ...]], tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        _check_axes(self.dense, _DENSE_AXES)
        if self.expert is not None:
            _check_axes(self.expert, _EXPERT_AXES)
        self.dense.coordinate(self.rank)

    @property
    def dense(self) -> DeviceMesh:
        """The mesh of dense weights."""
        return self.views.main

    @property
    def expert(self) -> DeviceMesh | None:
        """The mesh of experts: the view that has ep, edp or etp; None where no mesh has one of them."""
        meshes = [mesh for _, mesh in self.views.others] + [self.views.main]
        return next((mesh for mesh in meshes if {"ep", "edp", "etp"} & set(mesh.axis_names)), None)

    def mesh(self, is_expert: bool) -> DeviceMesh:
        """Return the mesh of a kind of weights; for experts without a view of their own, the dense one."""
        return (self.expert or self.dense) if is_expert else self.dense

    def data_axes(self, is_expert: bool) -> tuple[str, ...]:
        """Return the axes longer than 1 along which ranks hold the same and see other data, in the mesh's order."""
        names = EXPERT_DATA_AXES if is_expert else DENSE_DATA_AXES
        mesh = self.mesh(is_expert)
        return tuple(axis for axis in mesh.axis_names if axis in names and mesh.axis_length(axis) > 1)

    def tensor_axis(self, is_expert: bool) -> str:
        """Return the axis that cuts weights of a kind: etp for experts where the mesh has it, else tp."""
        return "etp" if is_expert and "etp" in self.mesh(is_expert).axis_names else "tp"

    def stage(self) -> int:
        """Return the rank's place along pp."""
        return self.dense.coordinate(self.rank).get("pp", 0)

    def ranks(self, axes: Iterable[str], is_expert: bool = False) -> tuple[int, ...]:
        """Return the ranks that differ from this one along these axes, and it, ascending; of axes that are there."""
        key = is_expert, tuple(axes)
        if key not in self._found:
            self._found[key] = tuple(sorted(ranks_along(self.mesh(is_expert), self.rank, axes)))
        return self._found[key]


def ranks_along(mesh: DeviceMesh, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
    """Return the group of `DeviceMesh.groups` that a rank is in, in the mesh's order, without making the others.

    Args:
        mesh: the mesh.
        rank: one of its ranks.
        axes: names; those that the mesh has not are passed over.
    """
    free = set(axes)
    places = mesh.coordinate(rank)
    strides = [*accumulate(reversed(mesh.shape[1:]), lambda stride, length: stride * length, initial=1)][::-1]
    first = sum(
        place * stride for (name, place), stride in zip(places.items(), strides, strict=True) if name not in free
    )
    positions = [first]
    for name, length, stride in zip(mesh.axis_names, mesh.shape, strides, strict=True):
        if name in free:
            positions = [position + step for position in positions for step in range(0, length * stride, stride)]
    return tuple(mesh.ranks[position] for position in positions)


@lru_cache(maxsize=16)
def check_shard_order(views: MeshViews) -> None:
    """Refuse meshes in which shards of replicas cannot be in the order of the mesh.

    A process group gives its shards to its ranks in ascending order. Ranks along tp and stages along pp, which reduce
    some shards later, own the same ones only if replicas ascend in the mesh, too. All ranks find the same.

    Raises:
        LayoutError: the ranks of a mesh descend along data axes.
    """
    for mesh in (views.main, *(mesh for _, mesh in views.others)):
        if all(a < b for a, b in pairwise(mesh.ranks)):
            continue
        axes = [axis for axis in mesh.axis_names if axis in {*DENSE_DATA_AXES, *EXPERT_DATA_AXES}]
        for group in mesh.groups(*axes):
            if any(a > b for a, b in pairwise(group)):
                raise LayoutError(
                    f"the ranks of the mesh {mesh.grid!r} descend along {', '.join(axes)}, so that shards of the "
                    "distributed optimizer would lie on other ranks than the mesh says",
                    got=f"ranks {list(group)}",
                    want=f"ranks {sorted(group)}",
                    next_step="let ranks ascend along these axes, or set use_distributed_optimizer=False",
                )


def described_views(mesh: Any) -> MeshViews:
    """Return a mesh of ours, torch's ``DeviceMesh``, or both factorings, as `MeshViews`."""
    if isinstance(mesh, MeshViews):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return MeshViews(mesh)
    if not hasattr(mesh, "mesh_dim_names"):
        raise LayoutError(
            "the mesh is none",
            got=type(mesh).__name__,
            want="a DeviceMesh of xrank or torch, or MeshViews",
            next_step="see xrank.layout.mesh_views.megatron_views for Megatron's meshes",
        )
    from xrank.dialects.placements import describe_mesh

    return MeshViews(describe_mesh(mesh))


def _check_axes(mesh: DeviceMesh, known: set[str]) -> None:
    names = set(mesh.axis_names)
    for axis in mesh.axis_names:
        if axis not in known:
            raise LayoutError(
                f"the mesh {mesh.grid!r} has the axis {axis!r}, which is none that gradients are known along",
                got=repr(axis),
                want=f"axes among {', '.join(sorted(known))}",
                next_step="name each axis for what is done along it; dp is for replicas",
            )
    for one, other in (("dp", "edp"), ("tp", "etp")):
        if {one, other} <= names:
            raise LayoutError(
                f"the mesh {mesh.grid!r} has both {one!r} and {other!r}",
                got=mesh.grid,
                want="one of them; two factorings of the same ranks are two meshes",
                next_step="see xrank.layout.mesh_views.megatron_views",
            )
