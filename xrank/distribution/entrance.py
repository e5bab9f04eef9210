"""Entrances: how plain tensors enter a module whose parameters are DTensors, and leave it again.

A call from outside with plain tensors means: each is this rank's part of the batch, along dim 0. They become DTensors,
cut along the mesh's batch axis; what comes out is this rank's part again, or the whole where it is not cut by the
batch. Gradients outside are those of this rank's loss, inside those of the mean loss over all parts of the batch, so
that a mean over the local part trains as a mean over the whole batch would. Called with DTensors, a module returns
DTensors, and nothing is scaled.

Inside, plain tensors (masks, positions, buffers) are the same on every rank, and meet DTensors as replicas. A parameter
that the batch axis cuts is gathered along it where it is used, as FSDP does: DTensor would rather gather the batch.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from xrank.distribution.losses import whole_mean
from xrank.distribution.randomness import Stream, drawn_seed, dropout, let_parts_differ
from xrank.errors import ContradictionError

__all__ = ["Entrance", "entrance_of"]


class _Call(NamedTuple):
    frame: FrameType
    """The call's frame: a call that ended by Ctrl-C has no hook that ends it here."""
    mode: TorchFunctionMode
    stream: Stream | None
    is_plain: bool


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_CALLS = _Calls()
_ENTRANCES: WeakKeyDictionary[nn.Module, Entrance] = WeakKeyDictionary()


def entrance_of(module: nn.Module) -> Entrance | None:
    """Return the entrance that stands before a module."""
    return _ENTRANCES.get(module)


class Entrance:
    """Stands before every module of a model; the outermost call alone enters."""

    def __init__(self, mesh: TorchMesh, batch_axis: str) -> None:
        self._mesh = mesh
        self._axis = (mesh.mesh_dim_names or ()).index(batch_axis)
        self._num_parts = mesh.size(self._axis)
        let_parts_differ(mesh.device_type)
        self._whole = (Replicate(),) * mesh.ndim
        self._cut = tuple(Shard(0) if axis == self._axis else Replicate() for axis in range(mesh.ndim))

    def __deepcopy__(self, memo: Any) -> Entrance:
        return self  # a copied module has the same mesh

    def stand_before(self, module: nn.Module) -> None:
        """Let every call of the module from outside come in here."""
        if module not in _ENTRANCES:
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.leave, always_call=True)
            _ENTRANCES[module] = self

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Take a call's plain tensors as parts of the batch."""
        frame = _call_frame(sys._getframe(1))
        while _CALLS.open and not _is_inside(frame, _CALLS.open[-1].frame):
            _end(_CALLS.open.pop())
        if _CALLS.open:
            return None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors)
        # A call from within backward computes again what a call has computed, with the same randomness.
        is_again = torch._C._current_graph_task_id() != -1
        seed = None if is_again else self._agree([tensor for tensor in tensors if not isinstance(tensor, DTensor)])
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._taken_in, (args, kwargs))
        stream = None if seed is None else Stream(seed, self._mesh.device_type)
        call = _Call(frame, _Meeting(self._mesh, self._axis), stream, is_plain)
        call.mode.__enter__()  # type: ignore[no-untyped-call]
        _CALLS.open.append(call)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Give back parts of the batch where parts came in."""
        if not _CALLS.open or _CALLS.open[-1].frame is not _call_frame(sys._getframe(1)):
            return None
        call = _CALLS.open.pop()
        _end(call)
        return pytree.tree_map_only(DTensor, self._given_back, output) if call.is_plain else None

    def _taken_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        placements = self._cut if tensor.ndim else self._whole
        scaled = _scaled(tensor, self._num_parts) if tensor.requires_grad else tensor
        # Moved as distribute_tensor moves parameters: a loader's tensors are on the CPU.
        return DTensor.from_local(scaled.to(self._mesh.device_type), self._mesh, placements, run_check=False)

    def _given_back(self, tensor: DTensor) -> torch.Tensor:
        is_cut = tensor.ndim > 0 and tensor.placements[self._axis] == Shard(0)
        placed = tensor.redistribute(placements=self._cut if is_cut else self._whole)
        if not tensor.requires_grad:
            return placed.to_local()
        # Of what is not cut, each rank has a gradient of its own.
        local = placed if is_cut else _with_summed_gradient(placed, self._mesh, self._axis)
        return _scaled(local.to_local(), 1 / self._num_parts)

    def _agree(self, tensors: list[torch.Tensor]) -> int:
        """Return the seed of this call for all ranks.

        Parts of other shapes than the other ranks' are refused: DTensors of them would lie about their whole.
        """
        sizes = [size for tensor in tensors for size in tensor.shape]
        bounds = torch.tensor([drawn_seed(), *sizes, *(-size for size in sizes)], device=self._mesh.device_type)
        for axis in range(self._mesh.ndim):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        seed, *agreed = bounds.tolist()
        if agreed != [*sizes, *(-size for size in sizes)]:
            raise ContradictionError(
                "the ranks' parts of the batch are not of one shape",
                rank=dist.get_rank(),
                got=f"here {[tuple(tensor.shape) for tensor in tensors]}",
                want="the same shapes on all ranks",
                next_step="leave out the last, smaller batch (drop_last=True), or pad",
            )
        return int(seed)


def _end(call: _Call) -> None:
    call.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    if call.stream is not None:
        call.stream.close()


def _call_frame(frame: FrameType) -> FrameType:
    """Return the frame of Module._call_impl that a hook runs in, from a function inside it or from itself."""
    above: FrameType | None = frame
    while above is not None and above.f_code.co_name != "_call_impl":
        above = above.f_back
    return frame if above is None else above


def _is_inside(frame: FrameType | None, outer: FrameType) -> bool:
    while frame is not None:
        if frame is outer:
            return True
        frame = frame.f_back
    return False


class _Meeting(TorchFunctionMode):
    """Lets tensors meet the batch's DTensors: before autograd sees them, so that it can go back too."""

    def __init__(self, mesh: TorchMesh, batch_axis: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._axis = batch_axis
        self._whole = (Replicate(),) * mesh.ndim

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        num_dtensors = sum(isinstance(leaf, DTensor) for leaf in leaves)
        if 0 < num_dtensors < len(leaves):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._replica, (args, kwargs))
        if any(map(self._is_cut_parameter, leaves)) and not _is_about_itself(func):
            args, kwargs = pytree.tree_map_only(DTensor, self._gathered, (args, kwargs))
        if func is functional.dropout and isinstance(args[0], DTensor):
            return dropout(*args, **kwargs)
        mean = whole_mean(func, args, kwargs) if num_dtensors else None
        result = func(*args, **kwargs) if mean is None else mean
        return _reduced(result) if func is functional.embedding and isinstance(result, DTensor) else result

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, self._whole, run_check=False)

    def _is_cut_parameter(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor) or not isinstance(tensor, nn.Parameter):
            return False
        return tensor.device_mesh == self._mesh and hasattr(tensor.placements[self._axis], "dim")

    def _gathered(self, tensor: DTensor) -> DTensor:
        if not self._is_cut_parameter(tensor):
            return tensor
        others: list[Any] = list(tensor.placements)
        dim = others[self._axis].dim
        # Strided shards count the batch axis' parts, or are counted by its: alone they cut plainly.
        others = [Shard(dim) if hasattr(at, "split_factor") and at.dim == dim else at for at in others]
        others[self._axis] = Replicate()
        return tensor.redistribute(placements=others)


def _is_about_itself(func: Any) -> bool:
    """Say whether a function asks a tensor for an attribute, or changes it in place."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "__delete__") or name.endswith("_")


def _reduced(embedded: DTensor) -> DTensor:
    """Return what a table cut by its rows gave as it is summed: further on torch does so in part of the cases only."""
    summed = [Replicate() if type(at).__name__ == "_MaskPartial" else at for at in embedded.placements]
    return embedded.redistribute(placements=summed)


class _Scaled(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class _SummedGradient(torch.autograd.Function):
    """The same replicated DTensor, whose gradient is summed over the ranks along the batch axis."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, mesh: TorchMesh, axis: int) -> DTensor:
        ctx.group, ctx.mesh, ctx.placements = mesh.get_group(axis), mesh, tensor.placements
        same: DTensor = tensor.view_as(tensor)  # type: ignore[assignment]
        return same

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None]:
        summed = gradient.redistribute(placements=ctx.placements).to_local().clone()
        dist.all_reduce(summed, group=ctx.group)
        return DTensor.from_local(summed, ctx.mesh, ctx.placements, run_check=False), None, None


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    scaled: torch.Tensor = _Scaled.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


def _with_summed_gradient(tensor: DTensor, mesh: TorchMesh, axis: int) -> DTensor:
    summed: DTensor = _SummedGradient.apply(tensor, mesh, axis)  # type: ignore[no-untyped-call]
    return summed
