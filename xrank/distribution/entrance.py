"""Entrances: the way of plain tensors into a module whose parameters are DTensors, and out of it.

In a call from outside with plain tensors, each tensor is this rank's part of the batch, along dim 0. They become
DTensors, cut along the mesh's batch axis. The output is this rank's part again, or whole if the batch does not cut it.
Gradients outside are those of this rank's loss; gradients inside are those of the mean loss over all parts. So a mean
over the local part trains as a mean over the whole batch would. A call with DTensors returns DTensors, unscaled.

Inside, plain tensors (masks, positions, buffers) are equal on all ranks, and become replicas when they meet DTensors. A
parameter that the batch axis cuts is gathered along it at its use, as in FSDP: DTensor would gather the batch instead.
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

from xrank.distribution.losses import compute_whole_mean
from xrank.distribution.randomness import Stream, draw_seed, dropout, let_parts_differ
from xrank.errors import ContradictionError

__all__ = ["Entrance", "entrance_of"]


class _Call(NamedTuple):
    frame: FrameType
    """Frame of the call: after Ctrl-C, no hook ends the call here."""
    mode: TorchFunctionMode
    stream: Stream | None
    is_plain: bool


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_CALLS = _Calls()
_ENTRANCES: WeakKeyDictionary[nn.Module, Entrance] = WeakKeyDictionary()


def entrance_of(module: nn.Module) -> Entrance | None:
    """Return the entrance of a module."""
    return _ENTRANCES.get(module)


class Entrance:
    """Converts the tensors of calls to any module of a model; only the outermost call is converted."""

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
        """Make every call of the module from outside enter here."""
        if module not in _ENTRANCES:
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.leave, always_call=True)
            _ENTRANCES[module] = self

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Convert a call's plain tensors, which are parts of the batch, to DTensors."""
        frame = _call_frame(sys._getframe(1))
        # Calls that ended by an exception have left no hook: close those that are not around this frame.
        while _CALLS.open and not _is_inside(frame, _CALLS.open[-1].frame):
            _end(_CALLS.open.pop())
        if _CALLS.open:
            return None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_plain = not any(isinstance(tensor, DTensor) for tensor in tensors)
        # A call inside a backward recomputes an earlier call, with the same randomness.
        is_again = torch._C._current_graph_task_id() != -1
        seed = None if is_again else self._agree([tensor for tensor in tensors if not isinstance(tensor, DTensor)])
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._convert_input, (args, kwargs))
        stream = None if seed is None else Stream(seed, self._mesh.device_type)
        call = _Call(frame, _MixedTensorMode(self._mesh, self._axis), stream, is_plain)
        call.mode.__enter__()  # type: ignore[no-untyped-call]
        _CALLS.open.append(call)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return parts of the batch if the call got plain tensors."""
        if not _CALLS.open or _CALLS.open[-1].frame is not _call_frame(sys._getframe(1)):
            return None
        call = _CALLS.open.pop()
        _end(call)
        return pytree.tree_map_only(DTensor, self._convert_output, output) if call.is_plain else None

    def _convert_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        placements = self._cut if tensor.ndim else self._whole
        scaled = _scale_gradient(tensor, self._num_parts) if tensor.requires_grad else tensor
        # Moved to the mesh's device, as distribute_tensor moves parameters: a loader's tensors are on the CPU.
        return DTensor.from_local(scaled.to(self._mesh.device_type), self._mesh, placements, run_check=False)

    def _convert_output(self, tensor: DTensor) -> torch.Tensor:
        is_cut = tensor.ndim > 0 and tensor.placements[self._axis] == Shard(0)
        placed = tensor.redistribute(placements=self._cut if is_cut else self._whole)
        if not tensor.requires_grad:
            return placed.to_local()
        # Without a cut, each rank has a different gradient: they are summed.
        local = placed if is_cut else _with_summed_gradient(placed, self._mesh, self._axis)
        return _scale_gradient(local.to_local(), 1 / self._num_parts)

    def _agree(self, tensors: list[torch.Tensor]) -> int:
        """Return the seed of this call for all ranks.

        Parts must have equal shapes on all ranks: DTensors of unequal parts would have a wrong global shape.
        """
        sizes = [size for tensor in tensors for size in tensor.shape]
        bounds = torch.tensor([draw_seed(), *sizes, *(-size for size in sizes)], device=self._mesh.device_type)
        # The maxima of sizes and of negated sizes equal this rank's own only if all ranks agree.
        for axis in range(self._mesh.ndim):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        seed, *agreed = bounds.tolist()
        if agreed != [*sizes, *(-size for size in sizes)]:
            raise ContradictionError(
                "the ranks' parts of the batch have different shapes",
                rank=dist.get_rank(),
                got=f"here {[tuple(tensor.shape) for tensor in tensors]}",
                want="the same shapes on all ranks",
                next_step="drop the last, smaller batch (drop_last=True), or pad it",
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


class _MixedTensorMode(TorchFunctionMode):
    """Lets plain tensors meet the batch's DTensors. It runs before autograd, so that gradients flow back."""

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
            args, kwargs = pytree.tree_map_only(DTensor, self._gather_parameter, (args, kwargs))
        if func is functional.dropout and isinstance(args[0], DTensor):
            return dropout(*args, **kwargs)
        mean = compute_whole_mean(func, args, kwargs) if num_dtensors else None
        result = func(*args, **kwargs) if mean is None else mean
        return _reduce_embedding(result) if func is functional.embedding and isinstance(result, DTensor) else result

    def _replica(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self._mesh, self._whole, run_check=False)

    def _is_cut_parameter(self, tensor: torch.Tensor) -> bool:
        if not isinstance(tensor, DTensor) or not isinstance(tensor, nn.Parameter):
            return False
        return tensor.device_mesh == self._mesh and hasattr(tensor.placements[self._axis], "dim")

    def _gather_parameter(self, tensor: DTensor) -> DTensor:
        if not self._is_cut_parameter(tensor):
            return tensor
        others: list[Any] = list(tensor.placements)
        dim = others[self._axis].dim
        # Strided shards depend on the parts of the batch axis. Without that axis, they are plain cuts.
        others = [Shard(dim) if hasattr(at, "split_factor") and at.dim == dim else at for at in others]
        others[self._axis] = Replicate()
        return tensor.redistribute(placements=others)


def _is_about_itself(func: Any) -> bool:
    """Return whether a function reads or sets a tensor's attribute, or changes it in place."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__", "__delete__") or name.endswith("_")


def _reduce_embedding(embedded: DTensor) -> DTensor:
    """Sum the result of a table that is cut by rows now: later, torch does so only in some cases."""
    summed = [Replicate() if type(at).__name__ == "_MaskPartial" else at for at in embedded.placements]
    return embedded.redistribute(placements=summed)


class _ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class _SummedGradient(torch.autograd.Function):
    """The identity on a replicated DTensor, with a gradient summed over the ranks along the batch axis."""

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


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    scaled: torch.Tensor = _ScaledGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return scaled


def _with_summed_gradient(tensor: DTensor, mesh: TorchMesh, axis: int) -> DTensor:
    summed: DTensor = _SummedGradient.apply(tensor, mesh, axis)  # type: ignore[no-untyped-call]
    return summed
