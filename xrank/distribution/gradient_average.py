"""Averages of gradients along the batch axis, at the end of each backward.

Ranks may use different parameters. So they first exchange which parameters have a gradient on any rank. Then they
average these in the model's order, in buckets; a rank without a gradient adds zeros. An earlier gradient is equal on
all ranks, so the average of the sum is right when gradients accumulate.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

_BUCKET_NBYTES = 25_000_000
"""Bytes of gradients that one exchange averages, as in torch's DistributedDataParallel."""
_AVERAGED = "_xrank_averaged"
"""Attribute of a parameter that has an average."""


def average_gradients(parameters: Iterable[nn.Parameter], mesh: TorchMesh, axis: int) -> None:
    """Average the gradients of a model's parameters along an axis of the mesh, at the end of each backward.

    Parameters that the axis cuts are left out, since each rank has the averaged gradient of its part. So are those of
    which an earlier call averages the gradients.

    Args:
        parameters: the parameters, in the same order on all ranks.
        mesh: the mesh.
        axis: index of the batch axis.
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
