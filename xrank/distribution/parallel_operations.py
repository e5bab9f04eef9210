"""Operations that ranks compute together, each its part: linear maps and look-ups whose weights are cut.

Inputs and outputs are plain and whole: outputs of a cut are gathered, inputs of a cut are taken in parts, and partial
sums are added up. Other operations that use a cut parameter get the whole parameter (`xrank.distribution.parameters`).
Along a model axis all ranks hold equal activations and equal gradients of them, except between the functions that carry
Megatron's names here. Gradients flow through all exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from xrank.distribution.parameters import NAMES, is_laid_out, model_placements, take, take_whole
from xrank.errors import UsageError


def copy_to_tp_region(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Identity forward, all-reduce backward (Megatron's f): each rank computes a part of the results."""
    entered: torch.Tensor = _Exchange.apply(tensor, group, False, True)  # type: ignore[no-untyped-call]
    return entered


def reduce_from_tp_region(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce forward, identity backward (Megatron's g): the sum of the ranks' partial sums."""
    summed: torch.Tensor = _Exchange.apply(tensor, group, True, False)  # type: ignore[no-untyped-call]
    return summed


def sum_statistics(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of the ranks' tensors. Each rank's loss depends on it: the gradients are summed, too."""
    summed: torch.Tensor = _Exchange.apply(tensor, group, True, True)  # type: ignore[no-untyped-call]
    return summed


def average_loss(loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
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


def gather_from_tp_region(part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole of a tensor whose last dim the ranks hold in parts of these sizes."""
    whole: torch.Tensor = _Gather.apply(part, sizes, group)  # type: ignore[no-untyped-call]
    return whole


def scatter_to_tp_region(whole: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last dim, in parts of these sizes."""
    part: torch.Tensor = _Scatter.apply(whole, sizes, group)  # type: ignore[no-untyped-call]
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gather(part, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return scatter_to_tp_region(gradient, ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
        ctx.sizes, ctx.group = sizes, group
        place = dist.get_rank(group)
        return whole.narrow(-1, sum(sizes[:place]), sizes[place]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gather_from_tp_region(gradient, ctx.sizes, ctx.group), None, None


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


@dataclass(frozen=True, slots=True)
class _Cut:
    """A plain cut of one dim of a parameter along one axis."""

    axis: int
    """Index of the axis in the mesh."""
    dim: int
    """Dim that the axis cuts."""
    sizes: list[int]
    """Sizes of the ranks' parts of the dim, in the order of the ranks."""
    group: dist.ProcessGroup
    """The ranks along the axis."""
    placements: tuple[Any, ...]
    """Placements of the parameter, gathered along the batch axis."""


def _find_cut(weight: DTensor, batch_axis: int) -> _Cut | None:
    """Return the only cut of a parameter besides the batch axis; None for another number or kind of cuts."""
    placements = model_placements(weight, batch_axis)
    cut = [axis for axis, at in enumerate(placements) if not at.is_replicate()]
    if len(cut) != 1 or type(placements[cut[0]]) is not Shard:
        return None
    (axis,) = cut
    dim = placements[axis].dim
    size, count = weight.shape[dim], weight.device_mesh.size(axis)
    chunk = -(-size // count)  # as torch.chunk: the last ranks hold less, or nothing
    sizes = [max(0, min(chunk, size - place * chunk)) for place in range(count)]
    return _Cut(axis, dim, sizes, weight.device_mesh.get_group(axis), placements)


def linear(batch_axis: int, tensor: torch.Tensor, weight: Any, bias: Any = None) -> torch.Tensor:
    """Compute ``functional.linear`` of a whole input with a laid out weight."""
    cut = _find_cut(weight, batch_axis)
    if cut is None:
        return functional.linear(tensor, take_whole(weight, batch_axis), _take_if_laid_out(bias, batch_axis))
    local = take(weight, cut.placements, batch_axis)
    if cut.dim == 0:
        part = functional.linear(copy_to_tp_region(tensor, cut.group), local)
        output = gather_from_tp_region(part, cut.sizes, cut.group)
    else:
        output = reduce_from_tp_region(
            functional.linear(scatter_to_tp_region(tensor, cut.sizes, cut.group), local), cut.group
        )
    return output if bias is None else output + _take_if_laid_out(bias, batch_axis).to(output.dtype)


def embedding(
    batch_axis: int, indices: torch.Tensor, weight: Any, padding_idx: int | None = None, **options: Any
) -> torch.Tensor:
    """Look up rows of a laid out table."""
    given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if options.get(name)]
    if given:
        name = getattr(weight, NAMES, ("a table",))[0]
        why = f"{name} cannot be laid out with {given[0]}: the result would not be that of one process"
        raise UsageError(why, tensor=name, next_step=f"make the embedding without {given[0]}")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    cut = _find_cut(weight, batch_axis)
    if cut is None:
        return functional.embedding(indices, take_whole(weight, batch_axis), padding_idx)
    local = take(weight, cut.placements, batch_axis)
    if cut.dim == 1:
        return gather_from_tp_region(functional.embedding(indices, local, padding_idx), cut.sizes, cut.group)
    place = dist.get_rank(cut.group)
    first, size = sum(cut.sizes[:place]), cut.sizes[place]
    is_here = (indices >= first) & (indices < first + size)
    if size == 0:
        rows = local.new_zeros(*indices.shape, local.shape[1]) + local.sum()  # keeps the gradient's path
    else:
        padding = None if padding_idx is None or not first <= padding_idx < first + size else padding_idx - first
        rows = functional.embedding(torch.where(is_here, indices - first, 0), local, padding)
        rows = rows * is_here.unsqueeze(-1)
    return reduce_from_tp_region(rows, cut.group)


def _take_if_laid_out(tensor: Any, batch_axis: int) -> Any:
    return take_whole(tensor, batch_axis) if is_laid_out(tensor) else tensor


def batch_norm(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalize by the statistics of all ranks' parts of the batch, and update the running ones alike on all ranks.

    Sums are in fp32 at least. The variance is computed from the differences to the mean, as torch does.
    """
    dims = [dim for dim in range(tensor.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(tensor.ndim)]
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    count = wide.numel() // wide.shape[1] * dist.get_world_size(group)
    if count <= 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tensor.size()}")
    mean = sum_statistics(wide.sum(dims), group) / count
    centered = wide - mean.view(shape)
    variance = sum_statistics(centered.square().sum(dims), group) / count
    normalized = centered * (variance + eps).rsqrt().view(shape)
    with torch.no_grad():
        if running_mean is not None:
            running_mean.lerp_(mean.detach().to(running_mean.dtype), momentum)
        if running_var is not None:
            unbiased = variance.detach() * (count / (count - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    if weight is not None:
        normalized = normalized * weight.view(shape)
    if bias is not None:
        normalized = normalized + bias.view(shape)
    return normalized.to(tensor.dtype)
