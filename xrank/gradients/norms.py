"""Norms of a model's gradients over all ranks, and clipping by them.

Every element of the model counts once. Replicas share what each of them holds. A copy along tp counts once, and so does
a table that several stages hold. Where no source defines whether ranks along tp hold parts or copies, equal norms are
those of copies: parts that are equal bit for bit do not occur, but for zeros, which add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.faults import At
from xrank.gradients.optimizers import ATTACHED
from xrank.gradients.shards import OwnedSlice, ParameterShards, list_owned_slices
from xrank.gradients.wire import Combination

_Models = DistributedDataParallel | Sequence[DistributedDataParallel]

_ALMOST = 1e-4
"""Relative difference up to which unequal norms may be those of copies that drifted apart."""


@torch.no_grad()
def grad_norm(models: _Models, *, norm_type: float = 2.0) -> torch.Tensor:
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
    first = models if isinstance(models, DistributedDataParallel) else models[0]
    wire, ranks = first.wire, tuple(sorted(first.plan.views.main.ranks))
    powers = torch.zeros(len(slices), dtype=torch.float64, device=wire.device)
    for index, one in enumerate(slices):
        powers[index] = _power(one.gradient(), norm_type).to(powers)
    how: Combination = "max" if math.isinf(norm_type) else "sum"
    _add_shards(slices, powers, how)
    shares = powers if how == "max" else powers / _count_copies(slices, powers)
    total = shares.max() if how == "max" and len(slices) else shares.sum()
    total = total.reshape(1)
    wire.all_reduce(total, ranks, how).wait()
    return (total[0] if how == "max" else total[0] ** (1 / norm_type)).float()


@torch.no_grad()
def clip_grad_norm(
    models: _Models, max_norm: float, *, norm_type: float = 2.0, error_if_nonfinite: bool = False
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
    for model in [models] if isinstance(models, DistributedDataParallel) else models:
        model.scale_gradients(factor)
    return norm


def _power(gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the sum of the elements' powers, or their maximum for an infinite norm."""
    if not gradient.numel():
        return gradient.new_zeros((), dtype=torch.float64)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=wide).double()
    power: torch.Tensor = norm if math.isinf(norm_type) else norm**norm_type
    return power


def _add_shards(slices: Sequence[OwnedSlice], powers: torch.Tensor, how: Combination) -> None:
    """Add up the parts of each parameter that replicas own."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(slices):
        if one.is_cut:
            shard_ranks = one.model.plan.buffers[one.planned.buffer].shard_ranks
            by_ranks.setdefault(shard_ranks, []).append(index)
    for ranks, indices in by_ranks.items():
        part = powers[indices]
        slices[0].model.wire.all_reduce(part, ranks, how).wait()
        powers[indices] = part


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
        model.wire.all_reduce(flag, tuple(sorted(model.plan.views.main.ranks)), "max").wait()
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
