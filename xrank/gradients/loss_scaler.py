"""Loss scaling for gradients that ranks hold in parts: an infinity on one rank skips the step on all."""

from __future__ import annotations

from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.sharding.shards import ParameterShards, find_shards


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
    shards = find_shards(optimizer)
    if shards is None:
        raise UsageError(
            "the scaler cannot see the gradients of all ranks: the optimizer has no attached shards",
            got=type(optimizer).__name__,
            want="an optimizer over ParameterShards",
            next_step="call ParameterShards(models).attach(optimizer) first",
        )
    return shards
