"""Parameters at their use, and their gradients: a laid out parameter becomes the plain tensor that an operation needs.

An operation gets the whole parameter, or this rank's part of it where ranks compute in parallel. Autograd does not keep
the result of a gather: it saves a note, and backward gathers again, as in FSDP (`release_saved`).

Gradients of ranks along the batch axis belong to their parts of the batch. Where the batch axis cuts the parameter, the
backward of the use averages them at once, since each rank keeps only its part of the average. Elsewhere a gradient
stays a partial average until the end of backward. Ranks may use different parameters. So they then exchange which
parameters have a gradient on any rank, and average these in the model's order, in buckets; a rank without a gradient
adds zeros. An earlier gradient is equal on all ranks, so the average of the sum is right when gradients accumulate.

Linear maps and look-ups with cut weights are computed together. Their inputs and outputs are plain and whole: outputs
of a cut are gathered, inputs of a cut are taken in parts, and partial sums are added up. Along a model axis all ranks
hold equal activations and equal gradients of them, except between the functions that carry Megatron's names here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional

from xrank.errors import UsageError

NAMES = "_xrank_names"
"""Attribute of a laid out parameter: its names in its outermost module."""

Placements = tuple[Any, ...]


def is_laid_out(tensor: object) -> bool:
    """Return whether a value is a parameter that a distribution has laid out."""
    return isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter)


def take_whole(tensor: DTensor, batch_axis: int) -> torch.Tensor:
    """Return the whole value of a DTensor as a plain tensor."""
    return take(tensor, (Replicate(),) * tensor.device_mesh.ndim, batch_axis)


def take(tensor: DTensor, placements: Placements, batch_axis: int) -> torch.Tensor:
    """Return this rank's part of a DTensor in other placements, as a plain tensor. Gradients flow back.

    All ranks of the mesh call this together. The placements do not cut along the batch axis.
    """
    local: torch.Tensor = _Take.apply(tensor, placements, batch_axis)  # type: ignore[no-untyped-call]
    if placements != tensor.placements:
        note = _Gathered(tensor, placements, tensor._version)
        local.untyped_storage()._xrank_gathered = note  # type: ignore[attr-defined]
    return local


class _Take(torch.autograd.Function):
    """Redistributes a DTensor to a plain tensor, and its gradient back."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, placements: Placements, batch_axis: int) -> torch.Tensor:
        ctx.tensor, ctx.placements, ctx.batch_axis = tensor, placements, batch_axis
        local = _redistribute(tensor, placements)
        return local.view_as(local)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        tensor, axis = ctx.tensor, ctx.batch_axis
        given, wanted = list(ctx.placements), list(tensor.placements)
        if tensor.device_mesh.size(axis) > 1:
            given[axis] = Partial("avg")
            if wanted[axis].is_replicate():
                wanted[axis] = Partial("avg")
        size: dict[str, Any] = {"shape": tensor.shape, "stride": tensor.stride()}
        found = DTensor.from_local(gradient.contiguous(), tensor.device_mesh, given, run_check=False, **size)
        return found.redistribute(placements=wanted), None, None


def _redistribute(tensor: DTensor, placements: Placements) -> torch.Tensor:
    with torch.no_grad():
        placed: DTensor = tensor.detach()  # type: ignore[assignment]
        return placed.redistribute(placements=placements).to_local()


@dataclass(frozen=True, slots=True)
class _Gathered:
    """Origin of a gathered tensor; an attribute of its storage."""

    tensor: DTensor
    placements: Placements
    version: int


@dataclass(frozen=True, slots=True)
class _Note:
    """Stands for a view of a gathered tensor among the tensors that autograd saved."""

    origin: _Gathered
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that autograd saved. With hooks, torch itself does not check its version."""

    tensor: torch.Tensor
    version: int


def release_saved() -> AbstractContextManager[None]:
    """Return a context in which autograd saves notes in place of gathered tensors."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: torch.Tensor) -> _Kept | _Note:
    if tensor.layout == torch.strided and not isinstance(tensor, DTensor):
        origin = getattr(tensor.untyped_storage(), "_xrank_gathered", None)
        if origin is not None:
            return _Note(origin, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
    # A node that keeps its own output would keep itself: such a graph, and its model, would never be freed.
    return _Kept(tensor if tensor.grad_fn is None else tensor.detach(), tensor._version)


def _unpack(saved: _Kept | _Note) -> torch.Tensor:
    if isinstance(saved, _Kept):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(saved.tensor.shape)} is at version {saved.tensor._version}; "
                f"expected version {saved.version} instead"
            )
        return saved.tensor
    origin = saved.origin
    if origin.tensor._version != origin.version:
        name = getattr(origin.tensor, NAMES, ("a parameter",))[0]
        step = "call backward before optimizer.step() and before load_state_dict()"
        raise UsageError(f"{name} was changed in place between forward and backward", tensor=name, next_step=step)
    return _redistribute(origin.tensor, origin.placements).as_strided(saved.size, saved.stride, saved.offset)


_BUCKET_NBYTES = 25_000_000
"""Bytes of gradients that one exchange averages, as in torch's DistributedDataParallel."""
_AVERAGED = "_xrank_averaged"
"""Attribute of a parameter that has an average."""


def average_gradients(parameters: Iterable[nn.Parameter], mesh: TorchMesh, axis: int) -> None:
    """Average the gradients of a model's parameters along an axis of the mesh, at the end of each backward.

    All ranks give the parameters in one order.
    """
    # Where the axis cuts a parameter, each rank has the averaged gradient of its part.
    found = [
        parameter
        for parameter in parameters
        if not hasattr(parameter, _AVERAGED)
        and (not isinstance(parameter, DTensor) or parameter.placements[axis].is_replicate())
    ]
    if found and mesh.size(axis) > 1:
        _Average(found, mesh.get_group(axis), axis)


class _Average:
    """Collects the gradients of a backward, and averages them at its end; held by the parameters' hooks."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, axis: int) -> None:
        # Weakly: Python's garbage collector cannot see hooks, so a model whose hooks led back to it would stay in
        # memory for ever, with its mesh's process groups.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._device = parameters[0].device
        self._templates = [_local_part(parameter).detach().to("meta") for parameter in parameters]
        self._group = group
        self._axis = axis
        self._used: set[int] = set()
        self._tasks: set[int] = set()
        for index, parameter in enumerate(parameters):
            setattr(parameter, _AVERAGED, True)
            is_trained = parameter.requires_grad
            parameter.requires_grad_()  # torch takes hooks only then; a frozen parameter may be trained later
            if isinstance(parameter, DTensor):
                parameter.register_hook(partial(self._prepare, index))  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(partial(self._note, index))  # type: ignore[no-untyped-call]
            parameter.requires_grad_(is_trained)

    def _prepare(self, index: int, gradient: torch.Tensor) -> None:
        """Before a partial average is added: let an earlier gradient count as one, else torch averages the new one."""
        self._queue()
        parameter = self._parameters[index]()
        if parameter is not None and parameter.grad is not None:
            parameter.grad = self._with_placement(parameter.grad, Partial("avg"))  # type: ignore[arg-type]

    def _note(self, index: int, parameter: nn.Parameter) -> None:
        self._queue()
        self._used.add(index)

    def _queue(self) -> None:
        """Average at the end of the running backward; a backward inside it has a task and an end of its own."""
        task = torch._C._current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._average, task))

    def _average(self, task: int) -> None:
        self._tasks.discard(task)
        used = torch.tensor([index in self._used for index in range(len(self._parameters))], dtype=torch.uint8)
        self._used.clear()
        used = used.to(self._device)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        with torch.no_grad():
            buckets: list[list[torch.Tensor]] = []
            nbytes = 0
            for index in used.flatten().nonzero().flatten().tolist():
                parameter, last = self._parameters[index](), buckets[-1] if buckets else []
                # A rank that did not use the parameter, or no longer has it, adds zeros.
                if parameter is None:
                    gradient = torch.zeros_like(self._templates[index], device=self._device)
                else:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    gradient = _local_part(parameter.grad)
                is_alike = bool(last) and (last[0].dtype, last[0].device) == (gradient.dtype, gradient.device)
                if is_alike and nbytes + gradient.nbytes <= _BUCKET_NBYTES:
                    last.append(gradient)
                else:
                    buckets.append([gradient])
                    nbytes = 0
                nbytes += gradient.nbytes
            for bucket in buckets:
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(flat, group=self._group)
                flat.div_(dist.get_world_size(self._group))
                for gradient, part in zip(bucket, torch.split(flat, [one.numel() for one in bucket]), strict=True):
                    gradient.copy_(part.view(gradient.shape))
            for reference in self._parameters:
                parameter = reference()
                if parameter is not None and isinstance(parameter.grad, DTensor):
                    parameter.grad = self._with_placement(parameter.grad, Replicate())

    def _with_placement(self, gradient: DTensor, placement: Any) -> DTensor:
        """Return the gradient with another placement along the batch axis; its memory stays."""
        if gradient.placements[self._axis] == placement:
            return gradient
        placements = list(gradient.placements)
        placements[self._axis] = placement
        size: dict[str, Any] = {"shape": gradient.shape, "stride": gradient.stride()}
        return DTensor.from_local(gradient._local_tensor, gradient.device_mesh, placements, run_check=False, **size)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


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
    factor = 1 / dist.get_world_size(group)
    mean: torch.Tensor = _Exchange.apply(loss, group, True, False, factor)  # type: ignore[no-untyped-call]
    return mean


class _Exchange(torch.autograd.Function):
    """Sums over a group in forward, in backward, in both or in neither; a factor scales the value alone."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        sums_value: bool,
        sums_gradient: bool,
        factor: float = 1.0,
    ) -> torch.Tensor:
        ctx.group, ctx.sums_gradient = group, sums_gradient
        if not sums_value:
            return tensor.view_as(tensor)
        summed = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=group)
        return summed if factor == 1 else summed * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        if ctx.sums_gradient:
            gradient = sum_statistics(gradient, ctx.group)
        return gradient, None, None, None, None


def gather_from_tp_region(part: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole of a tensor whose last dim the ranks hold in parts of these sizes."""
    whole: torch.Tensor = _Move.apply(part, sizes, group, True)  # type: ignore[no-untyped-call]
    return whole


def scatter_to_tp_region(whole: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part of the last dim, in parts of these sizes."""
    part: torch.Tensor = _Move.apply(whole, sizes, group, False)  # type: ignore[no-untyped-call]
    return part


class _Move(torch.autograd.Function):
    """Gathers or scatters the last dim; its gradient does the opposite."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup, gathers: bool
    ) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.gathers = sizes, group, gathers
        if not gathers:
            place = dist.get_rank(group)
            return tensor.narrow(-1, sum(sizes[:place]), sizes[place]).clone()
        # Collectives want equal shapes: shorter parts are padded.
        padded = functional.pad(tensor, (0, max(sizes) - tensor.size(-1))).contiguous()
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([found.narrow(-1, 0, size) for found, size in zip(parts, sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        move = scatter_to_tp_region if ctx.gathers else gather_from_tp_region
        return move(gradient, ctx.sizes, ctx.group), None, None, None


@dataclass(frozen=True, slots=True)
class _Cut:
    """A plain cut of one dim of a parameter along one axis."""

    dim: int
    sizes: list[int]
    """Sizes of the ranks' parts of the dim, in the order of the ranks."""
    group: dist.ProcessGroup
    placements: tuple[Any, ...]
    """Placements of the parameter, gathered along the batch axis."""


def _find_cut(weight: DTensor, batch_axis: int) -> _Cut | None:
    """Return the only cut of a parameter besides the batch axis; None for another number or kind of cuts."""
    given: list[Any] = list(weight.placements)
    batch_dim = getattr(given[batch_axis], "dim", None)
    given[batch_axis] = Replicate()
    # A _StridedShard is strided only because the batch axis cuts the same dim; without that cut it is a Shard.
    placements = tuple(Shard(at.dim) if hasattr(at, "split_factor") and at.dim == batch_dim else at for at in given)
    cut = [axis for axis, at in enumerate(placements) if not at.is_replicate()]
    if len(cut) != 1 or type(placements[cut[0]]) is not Shard:
        return None
    (axis,) = cut
    dim = placements[axis].dim
    size, count = weight.shape[dim], weight.device_mesh.size(axis)
    chunk = -(-size // count)  # as torch.chunk: the last ranks hold less, or nothing
    sizes = [max(0, min(chunk, size - place * chunk)) for place in range(count)]
    return _Cut(dim, sizes, weight.device_mesh.get_group(axis), placements)


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
        why = f"{name} cannot be sharded with {given[0]}: the result would differ from that of one process"
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
    """Normalize by the statistics of all ranks' parts of the batch, and update the running ones alike on all ranks."""
    dims = [dim for dim in range(tensor.ndim) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(tensor.ndim)]
    # Sums are in fp32 at least. The variance is computed from the differences to the mean, as torch does.
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
