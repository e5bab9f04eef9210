"""Places of owned slices in the whole model, as layouts that a state records and `xrank gather` reads.

A slice of a parameter is a run of its local tensor's elements: a flat buffer of one tensor, cut at listed places,
``flat(w [8/tp, 4])/dp{10,6}``. A parameter that is whole on a rank is cut as the parameter itself, ``[8/tp, 4]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from xrank.errors import LayoutError
from xrank.gradients.mesh_places import MeshPlace
from xrank.gradients.roles import local_of
from xrank.gradients.sharding.shards import OwnedSlice
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.binding import bind
from xrank.layout.local_part import infer_shape
from xrank.layout.notation import LayoutTree, axes_of, render
from xrank.layout.tensor_layout import axis_lengths

_CROSS_STAGE = ("conditional", "word", "position")


class SliceLayouts:
    """Builds the layout map of a rank's tensors, each of which belongs to a parameter's owned slice.

    Args:
        own: cuts of parameters by name in the whole model, for parameters without placements and Megatron's attributes.
    """

    def __init__(self, own: LayoutMap | None) -> None:
        self._map: LayoutMap | None = None
        self._own = own

    def finish(self) -> LayoutMap:
        """Return the layouts that were added."""
        return LayoutMap() if self._map is None else self._map

    def add(self, key: str, name: str, one: OwnedSlice) -> None:
        """Add the layout of a tensor of a slice's shape.

        Args:
            key: name of the tensor.
            name: name of the parameter in the whole model.
            one: the slice.

        Raises:
            LayoutError: the cut of the parameter is unknown, or ranks along its cut hold parts of different sizes, so
                that no single layout contains the places of their slices.
        """
        mesh, axis = _find_mesh(one)
        layout, shape = self._find_layout(name, one, mesh)
        dims = render(LayoutTree(layout.dims))
        text = dims
        if one.is_cut:
            _check_equal(name, one, layout, shape, mesh)
            # Listed, because shards are equal parts of the bucket, which cut the parameter anywhere.
            counts = ",".join(map(str, _count_owned(one)))
            text = f"flat({key} {dims})/{axis}{{{counts}}}"
        self._set(key, text, one, mesh, {axis for dim in layout.dims for axis in axes_of(dim)})

    def add_scalar(self, key: str, one: OwnedSlice) -> None:
        """Add a tensor without dims, equal on all ranks that hold a slice's parameter."""
        self._set(key, "[]", one, _find_mesh(one)[0], set())

    def _set(self, key: str, text: str, one: OwnedSlice, mesh: DeviceMesh, cutting: set[str]) -> None:
        plan, where = one.model.plan, []
        at = mesh.coordinate(plan.rank)
        is_expert = plan.buffers[one.planned.buffer].is_expert
        if at.get("pp") is not None and mesh.axis_length("pp") > 1:
            if any(later.kind in _CROSS_STAGE for later in one.planned.later):
                # Stages hold copies under their own names, so each stage has a layout of its own.
                mesh = mesh.submesh(pp=at["pp"])
            else:
                # The other stages have other layers, and no copy.
                where.append(f"pp={at['pp']}")
        if is_expert and "ep" not in cutting and at.get("ep") is not None and mesh.axis_length("ep") > 1:
            where.append(f"ep={at['ep']}")
        clause = f" where {', '.join(where)}" if where else ""
        if self._map is None:
            self._map = LayoutMap(mesh)
        if mesh == self._map.device_mesh:
            self._map[key] = TensorLayout.parse(text + clause)
            return
        view = "expert" if is_expert else "dense"
        if mesh.ranks == self._map.device_mesh.ranks and self._map.views.setdefault(view, mesh) == mesh:  # type: ignore[union-attr]
            self._map[key] = TensorLayout.parse(f"{text} in {view}{clause}")
        else:
            self._map[key] = TensorLayout.parse(text + clause, mesh)

    def _find_layout(self, name: str, one: OwnedSlice, mesh: DeviceMesh) -> tuple[TensorLayout, tuple[int, ...]]:
        """Return the cut of the parameter, with numbers for its sizes, and its global shape."""
        given = None if self._own is None else self._own[name]
        parameter = one.model.planned_parameters[one.planned.name]
        local = one.planned.shape
        if given is not None:
            assert self._own is not None
            layout, sizes = TensorLayout.from_dims(given.dims), self._own.sizes
            shape = infer_shape(layout, mesh, dict.fromkeys(mesh.ranks, local), sizes=sizes)
            return layout.with_sizes({**sizes, **bind(layout.tree, shape, axis_lengths(mesh), sizes)}), shape
        if local_of(parameter) is not parameter:
            return _layout_from_placements(name, parameter, one)
        return _layout_from_attributes(name, parameter, local, one, mesh)


def _find_mesh(one: OwnedSlice) -> tuple[DeviceMesh, str]:
    """Return the mesh of a slice, and its axis along which replicas own other slices."""
    plan = one.model.plan
    buffer = plan.buffers[one.planned.buffer]
    mesh = MeshPlace(plan.views, plan.rank).mesh(buffer.is_expert)
    merged = buffer.axes
    num_shards = len(buffer.shard_ranks)
    num_instances = len(buffer.ranks) // num_shards
    if not one.is_cut or (len(merged) == 1 and num_instances == 1):
        return mesh, merged[0] if merged else ""
    # Shards follow each other in the order of ranks over several axes at once: the mesh needs one axis for them.
    # The merged axis stands where the first of them stood; instances come before shards, as ranks are split.
    others = [axis for axis in mesh.axis_names if axis not in merged]
    first = mesh.axis_names.index(merged[0])
    before = [axis for axis in others if mesh.axis_names.index(axis) < first]
    after = others[len(before) :]
    ranks = mesh.transpose(*before, *merged, *after).ranks
    axis = "_".join(merged)
    new = [("instance", num_instances), (axis, num_shards)] if num_instances > 1 else [(axis, num_shards)]
    if num_instances > 1 and len(merged) == 1:
        new[1] = (axis := f"{axis}_shard", num_shards)
    grid = [(a, mesh.axis_length(a)) for a in before] + new + [(a, mesh.axis_length(a)) for a in after]
    return DeviceMesh([length for _, length in grid], [name for name, _ in grid], ranks), axis


def _count_owned(one: OwnedSlice) -> list[int]:
    """Return the number of the parameter's elements that each shard rank owns, in the order of the shards."""
    plan, planned = one.model.plan, one.planned
    bucket = plan.buckets[planned.bucket]
    found = []
    for rank in plan.buffers[planned.buffer].shard_ranks:
        start, stop = plan.shard(bucket, rank)
        found.append(max(0, min(stop, planned.offset + planned.numel) - max(start, planned.offset)))
    return found


def _layout_from_placements(name: str, parameter: Any, one: OwnedSlice) -> tuple[TensorLayout, tuple[int, ...]]:
    """Return the cut of a DTensor. Along axes with addends, finalize has made all ranks equal."""
    from torch.distributed.tensor import Replicate

    from xrank.dialects.placements import describe_mesh, from_placements

    own = describe_mesh(parameter.device_mesh)
    axes_by_dim = one.planned.placement_axes
    for axes, placement in zip(axes_by_dim, parameter.placements, strict=True):
        if len(axes) > 1 and not placement.is_replicate():
            raise LayoutError(
                f"{name}: it is cut along one axis of its mesh that is {len(axes)} of the plan's",
                tensor=name,
                rank=one.model.plan.rank,
                got=f"{placement} along {', '.join(axes)}",
                want="a mesh with the axes of the parameters",
                next_step="make the plan with the mesh of the parameters, or give layouts= with a rule for it",
            )
    # The plan's names; axes that cut nothing keep their own.
    names = [axes[0] if len(axes) == 1 else f"{axis}_" for axis, axes in zip(own.axis_names, axes_by_dim, strict=True)]
    own = DeviceMesh(own.shape, names, own.ranks)
    placements = [
        Replicate() if placement.is_partial() or length == 1 else placement
        for placement, length in zip(parameter.placements, own.shape, strict=True)
    ]
    shape = tuple(parameter.shape)
    layout = TensorLayout.from_dims(from_placements(own, placements, len(shape)).dims)
    return layout.with_sizes(bind(layout.tree, shape, axis_lengths(own), {})), shape


def _layout_from_attributes(
    name: str, parameter: Any, local: tuple[int, ...], one: OwnedSlice, mesh: DeviceMesh
) -> tuple[TensorLayout, tuple[int, ...]]:
    """Return the cut by Megatron's attributes; a parameter without them is a copy along tp."""
    plan = one.model.plan
    axis = MeshPlace(plan.views, plan.rank).tensor_axis(plan.buffers[one.planned.buffer].is_expert)
    length = mesh.axis_length(axis) if axis in mesh.axis_names else 1
    shape, dims = list(local), [str(n) for n in local]
    if getattr(parameter, "tensor_model_parallel", False) and length > 1:
        dim = getattr(parameter, "partition_dim", -1)
        stride = getattr(parameter, "partition_stride", 1)
        if not 0 <= dim < len(local) or local[dim] % stride:
            raise LayoutError(
                f"{name}: it is cut along {axis}, and the dim is unknown",
                tensor=name,
                rank=plan.rank,
                got=f"partition_dim={dim!r}, partition_stride={stride!r}",
                want=f"one of {len(local)} dims",
                next_step="give layouts= with a rule for it",
            )
        shape[dim] *= length
        # With a stride each rank holds a part of each of `stride` pieces, such as gate and up.
        dims[dim] = f"{stride} {shape[dim] // stride}/{axis}" if stride > 1 else f"{shape[dim]}/{axis}"
    return TensorLayout.parse(f"[{', '.join(dims)}]"), tuple(shape)


def _check_equal(name: str, one: OwnedSlice, layout: TensorLayout, shape: Sequence[int], mesh: DeviceMesh) -> None:
    """Check that parts are equal: owners cut unequal parts at different places, so that one list of counts fails."""
    cutting = [axis for dim in layout.dims for axis in axes_of(dim)]
    if prod(shape) != one.planned.numel * prod(mesh.axis_length(axis) for axis in cutting):
        raise LayoutError(
            f"{name}: ranks along {', '.join(cutting)} hold parts of other sizes, which one layout cannot express",
            tensor=name,
            rank=one.model.plan.rank,
            got=f"{list(one.planned.shape)} of {list(shape)} on this rank",
            want="equal parts",
            next_step="pad it to equal parts, or export without use_distributed_optimizer",
        )
