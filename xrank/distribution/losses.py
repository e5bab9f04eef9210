"""Losses inside a model: means over the whole batch, from each rank's part of it.

The gradients are those of a loss whose mean over the ranks is the loss of the whole batch. Parts have equal shapes, so
that is each rank's own mean, except where ranks ignore different numbers of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from xrank.distribution.axis_exchange import average_value

_COUNTED: dict[Any, int] = {functional.cross_entropy: 1, functional.nll_loss: 1}
"""Losses that ignore some targets, and the position of the targets among their arguments."""
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    _COUNTED[functional.linear_cross_entropy] = 2
_LOSSES = frozenset(
    function
    for name, function in vars(functional).items()
    if name.endswith(("_loss", "entropy", "_with_logits", "kl_div")) and callable(function)
)


def is_loss(function: Callable[..., Any]) -> bool:
    """Return whether a function is one of torch's losses."""
    return function in _LOSSES


def compute_loss(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute a loss of plain tensors; a mean is that of all ranks' parts. A sum is that of this rank's part.

    Args:
        function: one of torch's losses.
        args: its tensors.
        kwargs: its other arguments, with `reduction`.
        group: the ranks along the batch axis.
    """
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        loss: torch.Tensor = function(*args, **kwargs)
        return loss
    targets = args[_COUNTED[function]] if function in _COUNTED else None
    if targets is None or torch.is_floating_point(targets):
        loss = function(*args, **kwargs)
        return loss if loss.ndim else average_value(loss, group)
    losses = function(*args, **{**kwargs, "reduction": "none"})
    is_counted = targets != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight")
    if weight is None:
        count = is_counted.sum(dtype=losses.dtype)
    else:
        count = (weight[torch.where(is_counted, targets, 0)] * is_counted).sum()
    dist.all_reduce(count, group=group)
    return average_value(losses.sum() / (count / dist.get_world_size(group)), group)
