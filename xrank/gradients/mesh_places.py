"""A rank's place in Megatron's two factorings of the ranks, and the groups of ranks around it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

from xrank.gradients.faults import At
from xrank.layout import DeviceMesh, MeshViews

_HYBRID_AXES = ("dp_replicate", "dp_shard")
"""The two axes that hybrid-sharded data parallelism has instead of dp, as torchtitan and accelerate name them."""
DENSE_DATA_AXES = ("dp", *_HYBRID_AXES, "cp", "edp", "ep")
"""Axes along which ranks hold the same dense weights and read different data. A mesh may have ep next to dp, or edp and
ep instead of dp; dense weights then have replicas along these too."""
EXPERT_DATA_AXES = ("dp", *_HYBRID_AXES, "edp", "cp")
"""The same axes for experts, in the mesh that has ep."""

AXIS_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("data", "data_parallel", "ddp", "batch"), "dp"),
    **dict.fromkeys(("replicate", "replica"), "dp_replicate"),
    **dict.fromkeys(("shard", "fsdp", "dp_sharded"), "dp_shard"),
    **dict.fromkeys(("context", "context_parallel", "sp", "sequence_parallel"), "cp"),
    **dict.fromkeys(("tensor", "tensor_parallel", "model", "mp"), "tp"),
    **dict.fromkeys(("pipe", "pipeline", "pipeline_parallel", "stage"), "pp"),
    **dict.fromkeys(("expert", "expert_parallel"), "ep"),
    "efsdp": "edp",
}
"""Names of axes in frameworks' own meshes -> the name here: DeepSpeed, Lightning, torchtitan, Keras, torch's guides.
Ranks along sequence_parallel (Ulysses) hold copies of the weights, as along cp."""

_DENSE_AXES = {"pp", "tp", *DENSE_DATA_AXES}
_EXPERT_AXES = {"pp", "ep", "etp", "tp", *EXPERT_DATA_AXES}
_SEE_VIEWS = "see xrank.layout.mesh.megatron_views for Megatron's meshes"
_UNNAMED = ("a0",)
"""Names that `describe_mesh` gives a torch mesh of one axis without a name, such as FSDP2's own."""


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """The place of a rank in the meshes of dense weights and of experts."""

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
        """The mesh of experts: the view with ep, edp or etp; None if no mesh has one of them."""
        meshes = [mesh for _, mesh in self.views.others] + [self.views.main]
        return next((mesh for mesh in meshes if {"ep", "edp", "etp"} & set(mesh.axis_names)), None)

    def mesh(self, is_expert: bool) -> DeviceMesh:
        """Return the mesh of dense or expert weights. Experts without a view of their own use the dense mesh."""
        return (self.expert or self.dense) if is_expert else self.dense

    def data_axes(self, is_expert: bool) -> tuple[str, ...]:
        """Return the axes longer than 1 along which ranks hold the same weights and read different data, in order."""
        names = EXPERT_DATA_AXES if is_expert else DENSE_DATA_AXES
        mesh = self.mesh(is_expert)
        return tuple(axis for axis in mesh.axis_names if axis in names and mesh.axis_length(axis) > 1)

    def tensor_axis(self, is_expert: bool) -> str:
        """Return the axis that cuts weights: etp for experts if the mesh has it, else tp."""
        return "etp" if is_expert and "etp" in self.mesh(is_expert).axis_names else "tp"

    def stage(self) -> int:
        """Return the index of the rank along pp."""
        return self.dense.coordinate(self.rank).get("pp", 0)

    def ranks(self, axes: Iterable[str], is_expert: bool = False) -> tuple[int, ...]:
        """Return this rank and the ranks that differ from it along the axes, ascending; absent axes are ignored."""
        key = is_expert, tuple(axes)
        if key not in self._found:
            self._found[key] = tuple(sorted(ranks_along(self.mesh(is_expert), self.rank, axes)))
        return self._found[key]


def ranks_along(mesh: DeviceMesh, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
    """Return the group of `DeviceMesh.groups` that contains a rank, in the mesh's order, without making the others."""
    free = set(axes)
    places = mesh.coordinate(rank)
    # Row-major strides of the mesh: the position of a rank is the sum of its coordinates times these.
    strides = [*accumulate(reversed(mesh.shape[1:]), lambda stride, length: stride * length, initial=1)][::-1]
    first = sum(
        place * stride for (name, place), stride in zip(places.items(), strides, strict=True) if name not in free
    )
    # Start from the position with all free axes at 0, and expand one free axis after another, outermost first.
    positions = [first]
    for name, length, stride in zip(mesh.axis_names, mesh.shape, strides, strict=True):
        if name in free:
            positions = [position + step for position in positions for step in range(0, length * stride, stride)]
    return tuple(mesh.ranks[position] for position in positions)


@lru_cache(maxsize=16)
def check_shard_order(views: MeshViews) -> None:
    """Check that shards of replicas can be in the order of the mesh.

    A process group gives its shards to its ranks in ascending order. Ranks along tp and stages along pp reduce some
    shards later. They own the same shards only if replicas ascend in the mesh too. All ranks get the same result.
    """
    for mesh in (views.main, *(mesh for _, mesh in views.others)):
        if all(a < b for a, b in pairwise(mesh.ranks)):
            continue
        axes = [axis for axis in mesh.axis_names if axis in {*DENSE_DATA_AXES, *EXPERT_DATA_AXES}]
        for group in mesh.groups(*axes):
            if any(a > b for a, b in pairwise(group)):
                raise At().layout_error(
                    f"the ranks of the mesh {mesh.grid!r} descend along {', '.join(axes)}, so that shards of the "
                    "distributed optimizer would be on other ranks than the mesh defines",
                    "let ranks ascend along these axes, or set use_distributed_optimizer=False",
                    f"ranks {list(group)}",
                )


def as_mesh_views(mesh: Any, axes: Mapping[str, str] | None = None) -> MeshViews:
    """Return a mesh of xrank or torch, or both factorings, as `MeshViews` with the names of axes here."""
    views = _read_mesh(mesh)
    aliases = {**AXIS_ALIASES, **(axes or {})}
    if views.main.axis_names == _UNNAMED:
        aliases.setdefault(_UNNAMED[0], "dp")
    return MeshViews(
        _rename_axes(views.main, aliases), tuple((name, _rename_axes(one, aliases)) for name, one in views.others)
    )


def _rename_axes(mesh: DeviceMesh, aliases: Mapping[str, str]) -> DeviceMesh:
    # A name that is known here keeps its meaning, unless the caller maps it.
    names = [aliases.get(name, name) for name in mesh.axis_names]
    if tuple(names) == mesh.axis_names:
        return mesh
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        both = [axis for axis, name in zip(mesh.axis_names, names, strict=True) if name == twice]
        raise At().layout_error(
            f"two axes of the mesh {mesh.grid!r} would be {twice!r}: {' and '.join(map(repr, both))}",
            f"map one of them to another name, such as axes={{{both[1]!r}: 'dp_shard'}}",
        )
    return DeviceMesh(mesh.shape, names, mesh.ranks)


def _read_mesh(mesh: Any) -> MeshViews:
    if isinstance(mesh, MeshViews):
        return mesh
    if isinstance(mesh, DeviceMesh):
        return MeshViews(mesh)
    if not hasattr(mesh, "mesh_dim_names"):
        raise At().layout_error(
            f"the mesh is a {type(mesh).__name__}, and not a DeviceMesh of xrank or torch, or MeshViews",
            _SEE_VIEWS,
        )
    from xrank.layout.terms.tensors import describe_mesh

    return MeshViews(describe_mesh(mesh))


def _check_axes(mesh: DeviceMesh, known: set[str]) -> None:
    names = set(mesh.axis_names)
    for axis in mesh.axis_names:
        if axis not in known:
            raise At().layout_error(
                f"the mesh {mesh.grid!r} has the axis {axis!r}, along which gradients have no known meaning",
                f"map it to its kind of parallelism: axes={{{axis!r}: 'dp'}}; dp is for replicas",
                want=f"axes among {', '.join(sorted(known))}",
            )
    for one, other in (("dp", "edp"), ("tp", "etp")):
        if {one, other} <= names:
            raise At().layout_error(
                f"the mesh {mesh.grid!r} has both {one!r} and {other!r}: two factorings of the ranks are two meshes",
                _SEE_VIEWS,
            )
