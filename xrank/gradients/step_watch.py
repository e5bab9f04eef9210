"""Optimizers that would change nothing: found at their first step.

Gradients lie in ``main_grad``, so an optimizer over a wrapped module's own parameters finds none and skips them all. So
does one over shards that are not attached. Both look like training.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xrank.errors import UsageError

__all__ = ["ATTACHED", "OWNED", "watch_optimizers"]

OWNED = "xrank_owned"
"""Attribute of a shard: the slice that it is."""
ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""The shards that give each optimizer its gradients."""

_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()
_WATCH: list[Any] = []


def watch_optimizers() -> None:
    """Check every optimizer of this process at its first step, from now on."""
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    if optimizer in _SEEN or optimizer in ATTACHED:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or not parameter.numel():
                continue
            own = getattr(parameter, OWNED, None)
            if own is not None:
                raise UsageError(
                    f"{own.name}: its shard has no gradient, so this step would not change it",
                    tensor=own.name,
                    rank=own.model.plan.rank,
                    got="an optimizer that ParameterShards.attach did not get",
                    want="gradients from main_grad before each step",
                    next_step="call shards.attach(optimizer) after it is made, or give_gradients() before each step "
                    "and take_parameters() after it",
                )
            if hasattr(parameter, "main_grad"):
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} has its gradient in main_grad and none in .grad, so "
                    "this step would not change it",
                    got="an optimizer over the parameters of a wrapped module",
                    want="an optimizer over ParameterShards",
                    next_step="make it over ParameterShards(ddp).parameters(), or over map_groups(groups) of them, and "
                    "attach it",
                )
    _SEEN.add(optimizer)
