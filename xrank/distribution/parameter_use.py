"""Parameters at their use: a laid out parameter becomes the plain tensor that an operation needs.

An operation gets the whole parameter, or this rank's part of it where ranks compute in parallel. Autograd does not keep
the result of a gather: it saves a note, and backward gathers again, as in FSDP (`release_saved`).

Gradients of ranks along the batch axis belong to their parts of the batch. Where the batch axis cuts the parameter, the
backward of the use averages them at once, since each rank keeps only its part of the average. Elsewhere a gradient
stays a partial average until the end of backward (`xrank.distribution.gradient_average`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from xrank.errors import UsageError

NAMES = "_xrank_names"
"""Attribute of a laid out parameter: its names in its outermost module."""

Placements = tuple[Any, ...]


def is_laid_out(tensor: object) -> bool:
    """Return whether a value is a parameter that a distribution has laid out."""
    return isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter)


def model_placements(parameter: DTensor, batch_axis: int) -> Placements:
    """Return the placements of a parameter after a gather along the batch axis alone.

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
        raise UsageError(
            f"{name} was changed in place between forward and backward",
            tensor=name,
            next_step="call backward before optimizer.step() and before load_state_dict()",
        )
    return _redistribute(origin.tensor, origin.placements).as_strided(saved.size, saved.stride, saved.offset)
