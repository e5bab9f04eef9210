"""Exchanges along one axis of a mesh, through which gradients flow.

Along a model axis all ranks hold equal activations and equal gradients of them, except between these functions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional


def enter_parallel(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return an equal tensor, of which each rank computes another part of the results: gradients are summed."""
    entered: torch.Tensor = _Exchange.apply(tensor, group, False, True)  # type: ignore[no-untyped-call]
    return entered


def sum_parts(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' addends. Its gradient is equal on all ranks, and that of each addend."""
    summed: torch.Tensor = _Exchange.apply(tensor, group, True, False)  # type: ignore[no-untyped-call]
    return summed


def sum_statistics(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' tensors. Each rank's loss depends on it: the gradients are summed, too."""
    summed: torch.Tensor = _Exchange.apply(tensor, group, True, True)  # type: ignore[no-untyped-call]
    return summed


def average_value(loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the mean of the ranks' losses, with the gradient of this rank's own."""
    size = dist.get_world_size(group)
    mean: torch.Tensor = _Exchange.apply(loss, group, True, False)  # type: ignore[no-untyped-call]
    return _Scale.apply(mean, 1 / size)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    """Sums over a group in forward, in backward, in both or in neither."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup, sums_value: bool, sums_gradient: bool
    ) -> torch.Tensor:
        ctx.group, ctx.sums_gradient = group, sums_gradient
        return _all_reduce(tensor, group) if sums_value else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        if ctx.sums_gradient:
            gradient = sum_statistics(gradient, ctx.group)
        return gradient, None, None, None


class _Scale(torch.autograd.Function):
    """Scales a value and not its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        return tensor * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def gather_last_dim(part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole of a tensor whose last dim the ranks hold in parts of these sizes."""
    whole: torch.Tensor = _Gather.apply(part, sizes, group)  # type: ignore[no-untyped-call]
    return whole


def cut_last_dim(whole: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last dim, in parts of these sizes."""
    part: torch.Tensor = _Cut.apply(whole, sizes, group)  # type: ignore[no-untyped-call]
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather(part, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return cut_last_dim(gradient, ctx.sizes, ctx.group), None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        place = dist.get_rank(group)
        return whole.narrow(-1, sum(sizes[:place]), sizes[place]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_last_dim(gradient, ctx.sizes, ctx.group), None, None


def _gather(part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    # Collectives want equal shapes: shorter parts are padded.
    padded = functional.pad(part, (0, max(sizes) - part.size(-1))).contiguous()
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([found.narrow(-1, 0, size) for found, size in zip(parts, sizes, strict=True)], -1)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    summed = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(summed, group=group)
    return summed
