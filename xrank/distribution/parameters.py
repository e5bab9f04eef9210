"""Parameters at their use, and their gradients: a laid out parameter becomes the plain tensor that an operation needs.

An operation gets the whole parameter, or this rank's part of it where ranks compute in parallel. Autograd does not keep
the result of a gather: it saves a note, and backward gathers again, as in FSDP (`release_saved`).

Gradients of ranks along the batch axis belong to their parts of the batch. Where the batch axis cuts the parameter, the
backward of the use averages them at once, since each rank keeps only its part of the average. Elsewhere a gradient
stays a partial average until the end of backward. Ranks may use different parameters. So they then exchange which
parameters have a gradient on any rank, and average these in the model's order, in buckets; a rank without a gradient
adds zeros. An earlier gradient is equal on all ranks, so the average of the sum is right when gradients accumulate.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from xrank.errors import UsageError

NAMES = "_xrank_names"
"""Attribute of a laid out parameter: its names in its outermost module."""

Placements = tuple[Any, ...]


def is_laid_out(tensor: object) -> bool:
    """Return whether a value is a parameter that a distribution has laid out."""
    return isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter)


def model_placements(parameter: DTensor, batch_axis: int) -> Placements:
    """Return the placements of a parameter after a gather along only the batch axis.

    Strided shards depend on the parts of the batch axis. Without that axis they are plain cuts.
    """
    placements: list[Any] = list(parameter.placements)
    batch_dim = getattr(placements[batch_axis], "dim", None)
    placements[batch_axis] = Replicate()
    return tuple(Shard(at.dim) if hasattr(at, "split_factor") and at.dim == batch_dim else at for at in placements)


def take_whole(tensor: DTensor, batch_axis: int) -> torch.Tensor:
    """Return the whole value of a DTensor as a plain tensor. Gradients flow back."""
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
        found = DTensor.from_local(
            gradient.contiguous(),
            tensor.device_mesh,
            given,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
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


@contextmanager
def release_saved() -> Iterator[None]:
    """Let autograd save notes in place of gathered tensors."""
    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


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

    All ranks give the parameters in one order. Parameters that the axis cuts are left out, since each rank has the
    averaged gradient of its part. So are those whose gradients an earlier call averages.
    """
    found = [
        parameter for parameter in parameters if not hasattr(parameter, _AVERAGED) and not _is_cut(parameter, axis)
    ]
    if found and mesh.size(axis) > 1:
        _Average(found, mesh.get_group(axis), axis)


def _is_cut(parameter: nn.Parameter, axis: int) -> bool:
    return isinstance(parameter, DTensor) and not parameter.placements[axis].is_replicate()


class _Average:
    """Collects the gradients of a backward, and averages them at its end.

    Each parameter's hooks hold the average, and it holds the parameters weakly: Python's garbage collector cannot see
    hooks, so a model whose hooks led back to it would stay in memory for ever, with its mesh's process groups.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, axis: int) -> None:
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
            gradients = [self._local_gradient(index) for index, is_used in enumerate(used.tolist()) if is_used]
            for bucket in _make_buckets(gradients):
                _average_bucket(bucket, self._group)
            for reference in self._parameters:
                parameter = reference()
                if parameter is not None and isinstance(parameter.grad, DTensor):
                    parameter.grad = self._with_placement(parameter.grad, Replicate())

    def _local_gradient(self, index: int) -> torch.Tensor:
        """Return this rank's gradient, or zeros if the rank did not use the parameter or no longer has it."""
        parameter = self._parameters[index]()
        if parameter is None:
            return torch.zeros_like(self._templates[index], device=self._device)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return _local_part(parameter.grad)

    def _with_placement(self, gradient: DTensor, placement: Any) -> DTensor:
        """Return the gradient with another placement along the batch axis; its memory stays."""
        if gradient.placements[self._axis] == placement:
            return gradient
        placements = list(gradient.placements)
        placements[self._axis] = placement
        return DTensor.from_local(
            gradient._local_tensor, gradient.device_mesh, placements, run_check=False,
            shape=gradient.shape, stride=gradient.stride(),
        )  # fmt: skip


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _make_buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield runs of gradients of one dtype and device, each of about `_BUCKET_NBYTES`."""
    bucket: list[torch.Tensor] = []
    nbytes = 0
    for gradient in gradients:
        is_other = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (gradient.dtype, gradient.device)
        if bucket and (is_other or nbytes + gradient.nbytes > _BUCKET_NBYTES):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(gradient)
        nbytes += gradient.nbytes
    if bucket:
        yield bucket


def _average_bucket(bucket: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
    dist.all_reduce(flat, group=group)
    flat.div_(dist.get_world_size(group))
    parts = torch.split(flat, [gradient.numel() for gradient in bucket])
    for gradient, part in zip(bucket, parts, strict=True):
        gradient.copy_(part.view(gradient.shape))
