"""Losses that are means, over DTensors: of all elements, not of each rank's.

torch 2.13 computes the gradients of some means with the local number of elements, so that over n parts of a batch they
are n times too large (torch/distributed/tensor: mse_loss_backward and others are taken for pointwise), and the mean of
a cross entropy as the mean of each rank's mean, which is another one where ranks ignore different numbers of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

__all__ = ["whole_mean"]

_PLAIN_MEANS = (
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.soft_margin_loss,
)
_CLASS_MEANS = (functional.cross_entropy, functional.nll_loss)


def whole_mean(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return such a loss of DTensors, right; None for anything else, which torch computes.

    Args:
        function: a function of torch.
        args: as a torch function mode gets them: the tensors.
        kwargs: as a torch function mode gets them: the rest, `reduction` among it.
    """
    if kwargs.get("reduction") != "mean" or len(args) != 2:
        return None
    if function in _CLASS_MEANS and not torch.is_floating_point(args[1]):
        losses = function(*args, **{**kwargs, "reduction": "none"})
        is_counted = args[1] != kwargs.get("ignore_index", -100)
        weight = kwargs.get("weight")
        if weight is None:
            counts = is_counted.to(losses.dtype)
        else:
            counts = weight[torch.where(is_counted, args[1], 0)] * is_counted
        mean: torch.Tensor = losses.sum() / counts.sum()
        return mean
    if function in _PLAIN_MEANS and (function is functional.binary_cross_entropy or kwargs.get("weight") is None):
        elements: torch.Tensor = function(*args, **{**kwargs, "reduction": "none"})
        return elements.mean()
    return None
