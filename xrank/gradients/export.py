"""Gradients and optimizer states by name, ready for a workspace: each rank's own slices, without padding.

The results go to ``NFSWorkspace.write_configs_and_weights(config, tensors, layouts=layouts)`` on every rank. Then
`xrank gather` merges the whole tensors, and `xrank reshard` cuts them for another number of replicas.

A slice of a parameter is a run of its local tensor's elements: a flat buffer of one tensor, cut at listed places,
``flat(w [8/tp, 4])/dp{10,6}``. A parameter that is whole on a rank is cut as the parameter itself, ``[8/tp, 4]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from math import prod
from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import Models
from xrank.gradients.faults import At
from xrank.gradients.optimizers import OWNED, list_states
from xrank.gradients.plan import ACROSS_STAGES
from xrank.gradients.roles import MeshPlace, local_of
from xrank.gradients.shards import OwnedSlice, list_owned_slices
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import bind, infer_shape
from xrank.layout.notation import LayoutTree, axes_of, render
from xrank.layout.tensor_layout import axis_lengths


class SliceLayouts:
    """Builds the layout map of a rank's tensors, each of which belongs to a parameter's owned slice."""

    def __init__(self, own: LayoutMap | None) -> None:
        self.layouts: LayoutMap | None = None
        """The layouts that were added."""
        self._own = own

    def add(self, key: str, name: str, one: OwnedSlice, *, is_scalar: bool = False) -> None:
        """Add the layout of a tensor of a slice's shape; or one without dims, equal on all its ranks."""
        mesh, axis = _find_mesh(one)
        if is_scalar:
            self._set(key, "[]", one, mesh, ())
            return
        layout, shape = self._find_layout(name, one, mesh)
        text = dims = render(LayoutTree(layout.dims))
        cutting = [axis for dim in layout.dims for axis in axes_of(dim)]
        if one.is_cut:
            plan, planned = one.model.plan, one.planned
            # Owners cut unequal parts at different places, so that one list of counts fails.
            if prod(shape) != planned.numel * prod(mesh.axis_length(axis) for axis in cutting):
                raise At(name, plan.rank).layout_error(
                    f"ranks along {', '.join(cutting)} hold parts of different sizes, which one layout cannot express",
                    "pad it to equal parts, or export without use_distributed_optimizer",
                    f"{list(planned.shape)} of {list(shape)} on this rank",
                )
            # Listed, because shards are equal parts of the bucket, which cut the parameter anywhere.
            shards = (
                plan.shard(plan.buckets[planned.bucket], rank) for rank in plan.buffers[planned.buffer].shard_ranks
            )
            end = planned.offset + planned.numel
            counts = ",".join(str(max(0, min(stop, end) - max(start, planned.offset))) for start, stop in shards)
            text = f"flat({key} {dims})/{axis}{{{counts}}}"
        self._set(key, text, one, mesh, cutting)

    def _set(self, key: str, text: str, one: OwnedSlice, mesh: DeviceMesh, cutting: Sequence[str]) -> None:
        plan, where = one.model.plan, []
        at = mesh.coordinate(plan.rank)
        is_expert = plan.buffers[one.planned.buffer].is_expert
        if at.get("pp") is not None and mesh.axis_length("pp") > 1:
            if any(later.kind in ACROSS_STAGES for later in one.planned.later):
                # Stages hold copies under their own names, so each stage has a layout of its own.
                mesh = mesh.submesh(pp=at["pp"])
            else:
                # The other stages have other layers, and no copy.
                where.append(f"pp={at['pp']}")
        if is_expert and "ep" not in cutting and at.get("ep") is not None and mesh.axis_length("ep") > 1:
            where.append(f"ep={at['ep']}")
        clause = f" where {', '.join(where)}" if where else ""
        if self.layouts is None:
            self.layouts = LayoutMap(mesh)
        if mesh == self.layouts.device_mesh:
            self.layouts[key] = TensorLayout.parse(text + clause)
            return
        view = "expert" if is_expert else "dense"
        if mesh.ranks == self.layouts.device_mesh.ranks and self.layouts.views.setdefault(view, mesh) == mesh:  # type: ignore[union-attr]
            self.layouts[key] = TensorLayout.parse(f"{text} in {view}{clause}")
        else:
            self.layouts[key] = TensorLayout.parse(text + clause, mesh)

    def _find_layout(self, name: str, one: OwnedSlice, mesh: DeviceMesh) -> tuple[TensorLayout, tuple[int, ...]]:
        """Return the cut of the parameter, with numbers for its sizes, and its global shape."""
        if self._own is not None and (given := self._own[name]) is not None:
            layout, sizes = TensorLayout.from_dims(given.dims), self._own.sizes
            shape = infer_shape(layout, mesh, dict.fromkeys(mesh.ranks, one.planned.shape), sizes=sizes)
            return layout.with_sizes({**sizes, **bind(layout.tree, shape, axis_lengths(mesh), sizes)}), shape
        parameter = one.model.planned_parameters[one.planned.name]
        if local_of(parameter) is not parameter:
            return _layout_from_placements(name, parameter, one)
        return _layout_from_attributes(name, parameter, one, mesh)


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
    # The merged axis takes the place of the first of them; instances come before shards, as ranks are split.
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


def _layout_from_placements(name: str, parameter: Any, one: OwnedSlice) -> tuple[TensorLayout, tuple[int, ...]]:
    """Return the cut of a DTensor. Along axes with partial sums, finalize has made all ranks equal."""
    from torch.distributed.tensor import Replicate

    from xrank.layout.terms.tensors import describe_mesh, from_placements

    own = describe_mesh(parameter.device_mesh)
    axes_by_dim = one.planned.placement_axes
    for axes, placement in zip(axes_by_dim, parameter.placements, strict=True):
        if len(axes) > 1 and not placement.is_replicate():
            raise At(name, one.model.plan.rank).layout_error(
                f"it is cut along one axis of its mesh that is {len(axes)} of the plan's: {', '.join(axes)}",
                "make the plan with the mesh of the parameters, or give layouts= with a rule for it",
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
    name: str, parameter: Any, one: OwnedSlice, mesh: DeviceMesh
) -> tuple[TensorLayout, tuple[int, ...]]:
    """Return the cut by Megatron's attributes; a parameter without them is a copy along tp."""
    plan, local = one.model.plan, one.planned.shape
    axis = MeshPlace(plan.views, plan.rank).tensor_axis(plan.buffers[one.planned.buffer].is_expert)
    length = mesh.axis_length(axis) if axis in mesh.axis_names else 1
    shape, dims = list(local), [str(n) for n in local]
    if getattr(parameter, "tensor_model_parallel", False) and length > 1:
        dim = getattr(parameter, "partition_dim", -1)
        stride = getattr(parameter, "partition_stride", 1)
        if not 0 <= dim < len(local) or local[dim] % stride:
            raise At(name, plan.rank).layout_error(
                f"it is cut along {axis}, and the dim is unknown: partition_dim={dim!r}, partition_stride={stride!r}",
                "give layouts= with a rule for it",
            )
        shape[dim] *= length
        # With a stride each rank holds a part of each of `stride` pieces, such as gate and up.
        dims[dim] = f"{stride} {shape[dim] // stride}/{axis}" if stride > 1 else f"{shape[dim]}/{axis}"
    return TensorLayout.parse(f"[{', '.join(dims)}]"), tuple(shape)


_Names = Callable[[str], str]


def export_gradients(
    models: Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    """Return this rank's gradients under the names of their parameters, and their layouts in the whole model.

    Tensors are views of ``main_grad``: write them before the next step begins.

    Args:
        models: one model, or several; then each name starts with the model's number.
        names: maps such a name to the name in the whole model, where a stage or an expert counts its own from 0.
        layouts: cuts of parameters by name in the whole model, for parameters without placements and Megatron's
            attributes. A parameter without any source is a copy along tp.

    Raises:
        GradientError: the step's gradients were not exchanged, or their memory is released.
        LayoutError: the cut of a parameter is unknown, or no layout can express it.
        UsageError: two parameters have one name.

    Example:
        >>> from xrank.gradients import export_gradients, finalize_model_grads
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> finalize_model_grads(ddp)
        []
        >>> gradients, layouts = export_gradients(ddp)
        >>> sorted(gradients)
        ['bias', 'weight']
    """
    places, found = SliceLayouts(layouts), {}
    for name, one in _name_slices(models, names).items():
        found[name] = one.gradient()
        places.add(name, name, one)
    return found, places.layouts or LayoutMap()


def export_optimizer_shards(
    optimizer: torch.optim.Optimizer, models: Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    r"""Return the parameters and states of an optimizer on this rank, and their layouts in the whole model.

    Values have the parameters' names, so that a gather that excludes ``state\..*`` writes the model; a state is
    ``state.<parameter>.<key>``, as in torch's checkpoints. Settings of parameter groups, such as rates, are omitted.
    Before the first step there are no states; the layouts have theirs already, so that `xrank reshard` can cut the
    states of another run for this one.

    Args:
        optimizer: over `ParameterShards`, or, if nothing is sharded, over the module's parameters.
        models: the models of the shards.
        names: as in `export_gradients`.
        layouts: as in `export_gradients`.

    Raises:
        LayoutError: as in `export_gradients`.
        UsageError: the optimizer steps other tensors, or a state is neither one number nor of the slice's shape.

    Example:
        >>> from xrank.gradients import ParameterShards, export_optimizer_shards
        >>> optimizer = torch.optim.SGD(ParameterShards(ddp).parameters(), lr=0.1)  # ddp: a module on one rank
        >>> tensors, layouts = export_optimizer_shards(optimizer, ddp)
        >>> sorted(tensors)
        ['bias', 'weight']
    """
    slices = _name_slices(models, names)
    places, found = SliceLayouts(layouts), {}
    for name, one, parameter, group in _find_stepped(optimizer, slices):
        found[name] = _check_shape(name, local_of(parameter).detach(), one)
        places.add(name, name, one)
        values = {key: _tensor(state) for key, state in optimizer.state.get(parameter, {}).items() if state is not None}
        shaped = {key: bool(value.ndim) for key, value in values.items()}
        for key, is_shaped in (shaped or list_states(optimizer, group)).items():
            full = f"state.{name}.{key}"
            # A parameter may have such a name itself.
            if full in slices:
                raise _make_clash_error(full)
            places.add(full, name, one, is_scalar=not is_shaped)
            if key in values:
                found[full] = _check_shape(full, values[key], one) if is_shaped else values[key]
    return found, places.layouts or LayoutMap()


@torch.no_grad()
def load_optimizer_shards(
    optimizer: torch.optim.Optimizer,
    models: Models,
    tensors: Mapping[str, torch.Tensor],
    *,
    names: _Names | None = None,
) -> None:
    """Load the results of `export_optimizer_shards`, resharded for this run's ranks; then call ``take_parameters``.

    Args:
        optimizer: over `ParameterShards`; its states are replaced.
        models: the models of the shards.
        tensors: this rank's tensors, as ``read_configs_and_weights_from_rank`` returns them.
        names: as in `export_gradients`.

    Raises:
        UsageError: a parameter is missing, or a tensor has another shape; then nothing is changed.

    Example:
        >>> from xrank.gradients import ParameterShards, load_optimizer_shards
        >>> shards = ParameterShards(ddp)  # ddp: a module on one rank, as in DistributedDataParallel
        >>> optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
        >>> load_optimizer_shards(optimizer, ddp, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> ddp.module.weight.tolist()
        [[1.0, 1.0]]
    """
    stepped = _find_stepped(optimizer, _name_slices(models, names))
    loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for name, one, parameter, _ in stepped:
        if name not in tensors:
            near = get_close_matches(name, tensors, n=1)
            raise At(name, one.model.plan.rank).usage_error(
                "the states have no values of it",
                "give the tensors of export_optimizer_shards, in this run's layouts",
                f"{near[0]}, and others" if near else f"{len(tensors)} tensors of other names",
            )
        _check_shape(name, tensors[name], one)
        prefix = f"state.{name}."
        states = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for key, value in states.items():
            # A clone, because optimizers step their states in place, and the tensors are the caller's.
            states[key] = (_check_shape(prefix + key, value, one) if value.ndim else value).clone()
        loaded[parameter] = states
    # Every tensor was checked above: from here on, changes happen.
    for name, _, parameter, _ in stepped:
        local_of(parameter).copy_(tensors[name])
        optimizer.state[parameter] = {
            # torch keeps counts of steps, which have no dims, on the CPU.
            key: value.to(local_of(parameter).device) if value.ndim else value
            for key, value in loaded[parameter].items()
        }


def _name_slices(models: Models, names: _Names | None) -> dict[str, OwnedSlice]:
    found: dict[str, OwnedSlice] = {}
    for name, one in list_owned_slices(models).items():
        new = name if names is None else names(name)
        if new in found:
            raise _make_clash_error(new)
        found[new] = one
    return found


def _find_stepped(
    optimizer: torch.optim.Optimizer, slices: Mapping[str, OwnedSlice]
) -> list[tuple[str, OwnedSlice, torch.nn.Parameter, Mapping[str, Any]]]:
    """Return name, slice, stepped tensor and parameter group of each stepped slice, in the order of the slices."""
    by_parameter = {id(one.model.planned_parameters[one.planned.name]): name for name, one in slices.items()}
    by_place = {(id(one.model), one.planned.name): name for name, one in slices.items()}
    found: dict[str, tuple[torch.nn.Parameter, Mapping[str, Any]]] = {}
    for parameter, group in ((one, its) for its in optimizer.param_groups for one in its["params"]):
        own: OwnedSlice | None = getattr(parameter, OWNED, None)
        name = by_parameter.get(id(parameter)) if own is None else by_place.get((id(own.model), own.planned.name))
        if name is None or (own is None and slices[name].is_cut):
            raise At(name).usage_error(
                f"the optimizer steps a tensor of shape {list(parameter.shape)} that is not a shard of these models",
                "construct the optimizer over ParameterShards(models).parameters(), and give their models",
            )
        found[name] = parameter, group
    return [(name, one, *found[name]) for name, one in slices.items() if name in found]


def _tensor(state: object) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        local: torch.Tensor = local_of(state)
        return local.detach()
    if isinstance(state, bool | int | float):
        return torch.tensor(state)
    raise UsageError(f"a state of the optimizer is a {type(state).__name__}", want="a tensor or a number")


def _check_shape(name: str, tensor: torch.Tensor, one: OwnedSlice) -> torch.Tensor:
    if tuple(tensor.shape) != one.shape:
        raise At(name, one.model.plan.rank).usage_error(
            f"its shape {list(tensor.shape)} is not that of this rank's slice, {list(one.shape)}",
            "use an optimizer that works by element: states that mix elements of a parameter cannot be cut",
        )
    return tensor


def _make_clash_error(name: str) -> UsageError:
    return At(name).usage_error("two tensors have this name", "let names= return different names of the whole model")
