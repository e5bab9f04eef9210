"""Optimizers that cannot step shards, found when they are made; and those that would change nothing, at a first step.

Gradients lie in ``main_grad``, so an optimizer over a wrapped module's own parameters finds none and skips them all. So
does one over shards that are not attached. Both look like training.
"""

from __future__ import annotations

from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xrank.errors import UsageError
from xrank.gradients.optimizer_kinds import check_class

OWNED = "xrank_owned"
"""Attribute of a shard: the slice that it is."""
ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""The shards that give each optimizer its gradients."""

_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()
_WATCH: list[Any] = []


def watch_optimizers() -> None:
    """Check every optimizer of this process when it is made, and at its first step, from now on."""
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_check))
        _watch_constructors()


def _watch_constructors() -> None:
    """Check the class of each optimizer that gets shards, before its constructor looks at their shapes.

    Muon's raises an error of its own about a flat tensor without a name. torch has no hook there; every constructor
    calls `add_param_group`.
    """
    add_param_group = torch.optim.Optimizer.add_param_group

    @wraps(add_param_group)
    def add_checked(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params")
        entries = given if isinstance(given, list | tuple) else [given]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        slices = [getattr(tensor, OWNED) for tensor in tensors if hasattr(tensor, OWNED)]
        if slices:
            check_class(self, slices)
        add_param_group(self, param_group)

    torch.optim.Optimizer.add_param_group = add_checked  # type: ignore[method-assign]


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
