"""The tensors that this rank's optimizer steps: owned slices as Parameters; norms, clipping, scaling and export.

One step, on all ranks alike::

    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.named_parameters(), lr=1e-3)
    shards.attach(optimizer)
    ...
    finalize_model_grads([ddp])
    optimizer.step()  # before it the shards get their gradients, after it all ranks get the parameters

In a norm, every element of the model counts once. Replicas share what each of them holds. A copy along tp counts once,
and so does a table that several stages hold. Where no source defines whether ranks along tp hold parts or copies, equal
norms are those of copies: parts that are equal bit for bit do not occur, but for zeros, which add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel, Models, list_models
from xrank.gradients.faults import At
from xrank.gradients.optimizers import ATTACHED, OWNED, check_optimizer, list_states
from xrank.gradients.plan import ACROSS_STAGES, PlannedParameter
from xrank.gradients.roles import MeshPlace, local_of
from xrank.gradients.wire import Combination
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.local_part import bind, infer_shape
from xrank.layout.notation import LayoutTree, axes_of, render
from xrank.layout.tensor_layout import axis_lengths
from xrank.layout.terms.tensors import describe_mesh, from_placements
from xrank.words import nearest_text


@dataclass(frozen=True, slots=True, eq=False)
class OwnedSlice:
    """This rank's part of one parameter: the elements that are right after the exchange and that it steps."""

    name: str
    """Name in the plan; with several models, the model's number before it."""
    model: DistributedDataParallel
    planned: PlannedParameter

    @property
    def is_cut(self) -> bool:
        """Whether replicas own other elements. Then all tensors here are flat; else they have the local shape."""
        model = self.model
        return model.config.use_distributed_optimizer and len(model.plan.buffers[self.planned.buffer].shard_ranks) > 1

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements of the parameter: replicas, or ranks along tp or another axis."""
        parameter = self.model.planned_parameters[self.planned.name]
        placements = zip(getattr(parameter, "placements", ()), self.planned.placement_axes, strict=True)
        is_placed = any(axes and not placement.is_replicate() for placement, axes in placements)
        return self.is_cut or bool(self.planned.is_cut_over_tp) or is_placed

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        start, stop = self.planned.owned
        return (stop - start,) if self.is_cut else self.planned.shape

    def take_from(self, local: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the local shape; a view."""
        return local.view(-1)[slice(*self.planned.owned)] if self.is_cut else local

    def values(self) -> torch.Tensor:
        """Return this part of the parameter; a view."""
        return self.take_from(local_of(self.model.planned_parameters[self.planned.name]).detach())

    def gradient(self) -> torch.Tensor:
        """Return this part of the gradient; a view."""
        if not self.model.sync.is_finished or self.model.later_is_due:
            raise At(self.name, self.model.plan.rank).error(
                "its gradient was not exchanged yet since zero_grad_buffer",
                "call finalize_model_grads on all ranks first",
            )
        return self.take_from(self.model.main_grad(self.planned.name))


def list_owned_slices(models: Models) -> Mapping[str, OwnedSlice]:
    """Return this rank's part of every parameter that has a gradient, in the order of the plans; parts may be empty."""
    several, found = list_models(models), {}
    for number, model in enumerate(several):
        for planned in model.plan.parameters:
            name = planned.name if len(several) == 1 else f"{number}.{planned.name}"
            found[name] = OwnedSlice(name, model, planned)
    return found


class ParameterShards:
    """This rank's slices of the parameters, as Parameters for any optimizer of torch.optim.

    Shards share the module's memory if gradients and parameters have one dtype. If gradients are wider, a shard is a
    copy in the gradients' dtype: the optimizer updates the copy, and the parameter gets its rounded values. The norm of
    one rank's shards is not the norm of the model: see `grad_norm` and `clip_grad_norm`.

    Args:
        models: one model, or several.

    Example:
        >>> from xrank.gradients import ParameterShards
        >>> shards = ParameterShards(ddp)  # ddp: a module on one rank, as in DistributedDataParallel
        >>> [name for name, _ in shards.named_parameters()]
        ['weight', 'bias']
    """

    def __init__(self, models: Models) -> None:
        self.slices = list_owned_slices(models)
        """Slices by name, in the order of the shards."""
        self.models = tuple(dict.fromkeys(one.model for one in self.slices.values()))
        # Without a conversion `to` returns the parameter's own memory.
        self._shards = {
            name: torch.nn.Parameter(one.values().to(one.planned.grad_dtype)) for name, one in self.slices.items()
        }
        for name, shard in self._shards.items():
            setattr(shard, OWNED, self.slices[name])
        for model in self.models:
            model.value_listeners.append(self.refresh)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the shards with the names of their parameters; also empty ones, so that all ranks have equal names."""
        return iter(self._shards.items())

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the shards."""
        return iter(self._shards.values())

    def map_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Return an optimizer's parameter groups with the shards instead of the models' parameters.

        Shards of the distributed optimizer are flat. So make the groups from the parameters' own names and shapes, such
        as weight decay for two dims or more, and map them here.

        Args:
            groups: parameters, or dicts with ``params``, as an optimizer takes them.

        Raises:
            UsageError: a parameter does not belong to the models, or needs no gradient.

        Example:
            >>> from xrank.gradients import ParameterShards
            >>> decayed = [p for p in ddp.module.parameters() if p.ndim > 1]  # ddp: a module on one rank
            >>> groups = ParameterShards(ddp).map_groups([{"params": decayed, "weight_decay": 0.1}])
            >>> [len(group["params"]) for group in groups]
            [1]
        """
        found = {
            id(one.model.planned_parameters[one.planned.name]): self._shards[name] for name, one in self.slices.items()
        }
        listed = list(groups)
        are_groups = all(isinstance(group, dict) for group in listed)
        made: list[dict[str, Any]] = [dict(group) for group in listed] if are_groups else [{"params": listed}]
        for group in made:
            given = group["params"]
            mapped = []
            for entry in [given] if isinstance(given, torch.Tensor) else given:
                name, parameter = entry if isinstance(entry, tuple) else (None, entry)
                shard = found.get(id(parameter))
                if shard is None:
                    raise At(name).usage_error(
                        f"a parameter of shape {list(parameter.shape)} in a group is not one that these models train",
                        "leave frozen parameters out of the groups, and wrap the module that the groups name",
                    )
                mapped.append(shard if name is None else (name, shard))
            group["params"] = mapped
        return made

    def attach(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> None:
        """Make an optimizer call `give_gradients` before each of its steps, and `take_parameters` after it.

        Args:
            optimizer: an optimizer over these shards.
            elementwise: accept an optimizer even if it is not known to update each element independently.

        Raises:
            UsageError: the optimizer has different parameters; it mixes the elements of a sharded parameter, or is
                unknown; or it needs a closure or sparse gradients.
        """
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        slices = [one for name, one in self.slices.items() if id(self._shards[name]) in stepped]
        check_optimizer(optimizer, slices, is_elementwise=elementwise)
        own = {id(shard) for shard in self._shards.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"]):
                raise At().usage_error(
                    f"the {type(optimizer).__name__} steps parameters that are not shards of these models",
                    "construct the optimizer over shards.parameters() or shards.named_parameters()",
                )
        ATTACHED[optimizer] = self
        optimizer.register_step_pre_hook(self._run_before_step)
        optimizer.register_step_post_hook(lambda *_: self.take_parameters())

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Give each shard its ``.grad``, a view of ``main_grad``, for readers before the step such as clipping.

        Raises:
            GradientError: this step's gradients were not exchanged, or their memory is released; or a parameter has
                left its buffer, so that its steps would be lost.
        """
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            # A replaced .data leaves the shard with the old memory, and the step would change nothing.
            if values.dtype == shard.dtype and values.numel() and values.data_ptr() != shard.data_ptr():
                raise At(name, self.slices[name].model.plan.rank).error(
                    "its data was replaced, so the optimizer would update the old memory of its shard",
                    "construct ParameterShards and the optimizer again; copy into parameters instead of replacing "
                    "their data",
                )
            shard.grad = self.slices[name].gradient()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the updated values into the modules, and gather the parameters; on all ranks."""
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            # Shards of the module's dtype share its memory, so that only wider copies are written back.
            if values.dtype != shard.dtype:
                values.copy_(shard)
        for model in self.models:
            model.start_param_sync()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the modules' values into shards that are copies.

        `DistributedDataParallel.load_state_dict` and `broadcast_params` call this. Call it yourself after loading a
        checkpoint into a bare module.
        """
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            if values.dtype != shard.dtype:
                shard.copy_(values)

    def _run_before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        if any(one is not None for one in (*arguments[1:], options.get("closure"))):
            raise At().usage_error(
                "a closure runs a backward inside the optimizer's step, and its gradients would not be exchanged",
                "run the backward and finalize_model_grads before step() without a closure",
            )
        self.give_gradients()


_ALMOST = 1e-4
"""Relative difference up to which unequal norms may be those of copies that drifted apart."""


@torch.no_grad()
def grad_norm(models: Models, *, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of the model, after `finalize_model_grads`; the same on all ranks.

    All ranks of the mesh call this together. It is the norm that one process with the whole model would compute,
    whatever the cuts, shards, copies and ties.

    Args:
        models: one model, or the chunks of a virtual pipeline.
        norm_type: 2, infinity, or another positive number.

    Returns:
        A float32 tensor without dims.

    Raises:
        GradientError: the step's gradients are not final; or ranks along tp may hold parts or copies of a parameter,
            which no mark and no placement defines, and their norms are almost equal.
        UsageError: norm_type is not positive.

    Example:
        >>> from xrank.gradients import finalize_model_grads, grad_norm
        >>> ddp.zero_grad_buffer()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> finalize_model_grads(ddp)
        []
        >>> round(float(grad_norm(ddp)), 4)
        1.7321
    """
    if not norm_type > 0:
        raise UsageError("norm_type is not a positive number", got=repr(norm_type), want="2, math.inf, or above 0")
    slices = list(list_owned_slices(models).values())
    first = list_models(models)[0]
    wire, ranks = first.wire, first.plan.all_ranks
    # The sum of the elements' powers of each slice, or their maximum for an infinite norm.
    powers = torch.zeros(len(slices), dtype=torch.float64, device=wire.device)
    how: Combination = "max" if math.isinf(norm_type) else "sum"
    cut: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(slices):
        gradient = one.gradient()
        if gradient.numel():
            wide = torch.promote_types(gradient.dtype, torch.float32)
            norm = torch.linalg.vector_norm(gradient, norm_type, dtype=wide).double()
            powers[index] = (norm if how == "max" else norm**norm_type).to(powers)
        if one.is_cut:
            shard_ranks = one.model.plan.buffers[one.planned.buffer].shard_ranks
            cut.setdefault(shard_ranks, []).append(index)
    for among, indices in cut.items():
        part = powers[indices]
        slices[0].model.wire.all_reduce(part, among, how).wait()
        powers[indices] = part
    shares = powers if how == "max" else powers / _count_copies(slices, powers)
    total = shares.max() if how == "max" and len(slices) else shares.sum()
    total = total.reshape(1)
    wire.all_reduce(total, ranks, how).wait()
    return (total[0] if how == "max" else total[0] ** (1 / norm_type)).float()


@torch.no_grad()
def clip_grad_norm(
    models: Models, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients of the model so that their norm is at most ``max_norm``, and return the norm from before.

    Call it on all ranks between `finalize_model_grads` and the optimizer's step. The factor is that of
    ``torch.nn.utils.clip_grad_norm_``: ``max_norm / (norm + 1e-6)``, at most 1.

    Args:
        models: as in `grad_norm`.
        max_norm: the largest norm.
        norm_type: as in `grad_norm`.
        error_if_nonfinite: whether a norm that is NaN or infinite is an error.

    Raises:
        GradientError: as in `grad_norm`, and the norm is not finite where that is an error.

    Example:
        >>> from xrank.gradients import clip_grad_norm, finalize_model_grads, grad_norm
        >>> ddp.zero_grad_buffer()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> finalize_model_grads(ddp)
        []
        >>> norm = clip_grad_norm(ddp, max_norm=1.0)
        >>> round(float(grad_norm(ddp)), 4)
        1.0
    """
    norm = grad_norm(models, norm_type=norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise At().error(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped",
            "set GradientConfig(check_for_nan_in_grad=True), which names the parameter, or error_if_nonfinite=False",
        )
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for model in list_models(models):
        model.scale_gradients(factor)
    return norm


def _count_copies(slices: Sequence[OwnedSlice], powers: torch.Tensor) -> torch.Tensor:
    """Return for each parameter the number of ranks that hold this rank's local tensor."""
    copies = torch.ones_like(powers)
    unclear: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(slices):
        planned = one.planned
        copies[index] *= len(planned.ranks)
        for later in planned.later:
            if later.kind != "tensor":
                copies[index] *= len(later.ranks)
        if planned.is_cut_over_tp is False:
            copies[index] *= len(planned.tensor_ranks)
        elif planned.is_cut_over_tp is None and len(planned.tensor_ranks) > 1:
            unclear.setdefault(planned.tensor_ranks, []).append(index)
    for ranks, indices in unclear.items():
        bounds = torch.cat([powers[indices], -powers[indices]])
        slices[0].model.wire.all_reduce(bounds, ranks, "max").wait()
        high, low = bounds[: len(indices)], -bounds[len(indices) :]
        for index, top, bottom in zip(indices, high.tolist(), low.tolist(), strict=True):
            if top == bottom:
                copies[index] *= len(ranks)
            elif math.isfinite(top) and top - bottom <= _ALMOST * top:  # else the norm is not finite in any case
                one = slices[index]
                raise At(one.name, one.model.plan.rank).error(
                    f"it is unknown whether ranks {list(ranks)} hold parts or copies of it",
                    'mark it: mark(parameter, over_tp="sum") or "average" for copies; set '
                    "parameter.tensor_model_parallel = True for parts",
                    f"norms that are almost equal: their squares are {bottom:.9g} to {top:.9g}",
                )
    return copies


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` for optimizers over `ParameterShards`; the same arguments and methods.

    Each rank checks the gradients that it uses. The result is combined over all ranks of the mesh, so that all ranks
    take a step or all skip it, and their scales stay equal. ``unscale_``, and ``step`` without it, are calls of all
    ranks, after `finalize_model_grads`. Attach the shards to the optimizer first.

    Raises:
        UsageError: the optimizer has no attached shards.

    Example:
        >>> from xrank.gradients import GradScaler
        >>> GradScaler("cpu", init_scale=1024.0).get_scale()
        1024.0
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and find on all ranks whether any rank has an infinity or NaN."""
        shards = _shards_of(optimizer)
        shards.give_gradients()
        super().unscale_(optimizer)
        if self.is_enabled():
            self._combine(optimizer, shards)

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        # Fused optimizers scale by themselves: `step` calls this in place of `unscale_`.
        shards = _shards_of(optimizer)
        shards.give_gradients()
        super()._check_inf_per_device(optimizer)
        return self._combine(optimizer, shards)

    def _combine(self, optimizer: torch.optim.Optimizer, shards: ParameterShards) -> dict[Any, torch.Tensor]:
        found: dict[Any, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        model = shards.models[0]
        flag = torch.zeros(1, device=model.wire.device)
        for value in found.values():
            flag += value.to(flag.device)
        model.wire.all_reduce(flag, model.plan.all_ranks, "max").wait()
        if not found:
            found[model.wire.device] = torch.zeros((), device=model.wire.device)
        for value in found.values():
            value.copy_((flag[0] > 0).to(value))
        return found


def _shards_of(optimizer: torch.optim.Optimizer) -> ParameterShards:
    shards: ParameterShards | None = ATTACHED.get(optimizer)
    if shards is None:
        raise At().usage_error(
            "the scaler cannot see the gradients of all ranks: the optimizer has no attached shards",
            "call ParameterShards(models).attach(optimizer) first",
        )
    return shards


class _SliceLayouts:
    """Builds the layout map of a rank's tensors, each of which belongs to a parameter's owned slice.

    A slice of a parameter is a run of its local tensor's elements: a flat buffer of one tensor, cut at listed places,
    ``flat(w [8/tp, 4])/dp{10,6}``. A parameter that is whole on a rank is cut as the parameter itself, ``[8/tp, 4]``.
    """

    def __init__(self, own: LayoutMap | None) -> None:
        self.layouts: LayoutMap | None = None
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

    own = describe_mesh(parameter.device_mesh)
    axes_by_dim = one.planned.placement_axes
    for axes, placement in zip(axes_by_dim, parameter.placements, strict=True):
        if len(axes) > 1 and not placement.is_replicate():
            raise At(name, one.model.plan.rank).layout_error(
                f"it is split along an axis of its mesh that corresponds to {len(axes)} axes of the plan's: "
                f"{', '.join(axes)}",
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
                f"it is split along {axis}, and the dim is unknown: partition_dim={dim!r}, partition_stride={stride!r}",
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
        names: maps such a name to the name in the whole model, if stages or experts count from 0.
        layouts: layouts of parameters by name in the whole model, for parameters without placements and Megatron's
            attributes. A parameter without any source is a copy along tp.

    Raises:
        GradientError: the step's gradients were not exchanged, or their memory is released.
        LayoutError: the layout of a parameter is unknown, or cannot be expressed.
        UsageError: two parameters have one name.

    Example:
        >>> from xrank.gradients import export_gradients, finalize_model_grads
        >>> ddp.zero_grad_buffer()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp(torch.ones(1, 2)).sum().backward()
        >>> finalize_model_grads(ddp)
        []
        >>> gradients, layouts = export_gradients(ddp)
        >>> sorted(gradients)
        ['bias', 'weight']
    """
    places, found = _SliceLayouts(layouts), {}
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
        UsageError: the optimizer has other tensors, or a state is neither a number nor has the slice's shape.

    Example:
        >>> from xrank.gradients import ParameterShards, export_optimizer_shards
        >>> optimizer = torch.optim.SGD(ParameterShards(ddp).parameters(), lr=0.1)  # ddp: a module on one rank
        >>> tensors, layouts = export_optimizer_shards(optimizer, ddp)
        >>> sorted(tensors)
        ['bias', 'weight']
    """
    slices = _name_slices(models, names)
    places, found = _SliceLayouts(layouts), {}
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
        UsageError: a parameter is missing, or a tensor has a different shape; then nothing is changed.

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
            near = nearest_text(name, tensors)
            raise At(name, one.model.plan.rank).usage_error(
                "the states have no values of it",
                "give the tensors of export_optimizer_shards, in this run's layouts",
                f"{near}, and others" if near else f"{len(tensors)} tensors of other names",
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
            "use an optimizer that works by element: states that mix elements of a parameter cannot be sharded",
        )
    return tensor


def _make_clash_error(name: str) -> UsageError:
    return At(name).usage_error("two tensors have this name", "return different names of the whole model from names=")
