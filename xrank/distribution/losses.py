"""Means of losses over all elements of DTensors, not of each rank's elements.

torch 2.13 computes the gradients of some means with the local number of elements, so that over n parts of a batch they
are n times too large (torch/distributed/tensor: it treats mse_loss_backward and others as pointwise). It computes the
mean of a cross entropy as the mean of the ranks' means, which is wrong if ranks ignore different numbers of targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

__all__ = ["compute_whole_mean"]

_PLAIN_MEANS = (
    functional.mse_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.soft_margin_loss,
)
_CLASS_MEANS = (functional.cross_entropy, functional.nll_loss)


def compute_whole_mean(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the mean of a loss that torch computes wrongly for DTensors; None for any other function.

    Args:
        function: a function of torch.
        args: tensors, as in a torch function mode.
        kwargs: other arguments, as in a torch function mode, with `reduction`.
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
