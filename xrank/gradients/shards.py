"""The tensors that this rank's optimizer steps: owned slices as plain Parameters; their norms, clipping and scaling.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel, Models, list_models
from xrank.gradients.faults import At
from xrank.gradients.optimizers import ATTACHED, OWNED, check_optimizer
from xrank.gradients.plan import PlannedParameter
from xrank.gradients.roles import local_of
from xrank.gradients.wire import Combination


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
    """Owned slices as Parameters, for any optimizer of torch.optim.

    Shards share the module's memory if gradients and parameters have one dtype. If gradients are wider, a shard is a
    copy in the gradients' dtype: the optimizer steps the copy, and the parameter gets its rounded values. The norm of
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
        """The models, each once."""
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
        """Return an optimizer's parameter groups with the shards in the place of the models' parameters.

        Shards of the distributed optimizer are flat. So write groups by the parameters' own names and shapes, such as
        weight decay for those of two dims or more, and map them here.

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
            elementwise: accept an optimizer that is not known to step each element of a parameter by itself.

        Raises:
            UsageError: the optimizer steps other parameters; or it mixes elements of a parameter, of which this rank
                holds a part, or is not known; or it needs a closure or sparse gradients.
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
                    "its data was replaced, and no longer shares the memory of its shard, which the optimizer steps",
                    "construct ParameterShards and the optimizer again; copy into parameters, do not replace",
                )
            shard.grad = self.slices[name].gradient()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the stepped values into the modules, and gather the parameters; on all ranks."""
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
        >>> ddp.zero_grad_buffer()
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
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
        >>> ddp.zero_grad_buffer()
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
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
            "set GradientConfig(check_for_nan_in_grad=True), which names the parameter; or error_if_nonfinite=False",
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

    Each rank checks the gradients that it steps. The result is combined over all ranks of the mesh, so that all ranks
    take a step or all skip it, and their scales stay equal. ``unscale_``, and ``step`` without it, are calls of all
    ranks, after `finalize_model_grads`. Attach the shards to the optimizer before.

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
