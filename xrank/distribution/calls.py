"""Losses inside a model: means over the whole batch, from each rank's part of it.

The gradients are those of a loss whose mean over the ranks is the loss of the whole batch. Parts have equal shapes, so
that is each rank's own mean, except where ranks ignore different numbers of targets.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from xrank.distribution.parallel_operations import average_value, batch_norm, embedding, linear
from xrank.distribution.parameters import is_laid_out, release_saved, take_whole
from xrank.errors import ContradictionError

_COUNTED: dict[Any, int] = {functional.cross_entropy: 1, functional.nll_loss: 1}
"""Losses that ignore some targets, and the position of the targets among their arguments."""
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    _COUNTED[functional.linear_cross_entropy] = 2
_LOSSES = frozenset(
    function
    for name, function in vars(functional).items()
    if name.endswith(("_loss", "entropy", "_with_logits", "kl_div")) and callable(function)
)


def is_loss(function: Callable[..., Any]) -> bool:
    """Return whether a function is one of torch's losses."""
    return function in _LOSSES


def compute_loss(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute a loss of plain tensors; a mean is that of all ranks' parts. A sum is that of this rank's part."""
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        loss: torch.Tensor = function(*args, **kwargs)
        return loss
    targets = args[_COUNTED[function]] if function in _COUNTED else None
    if targets is None or torch.is_floating_point(targets):
        loss = function(*args, **kwargs)
        return loss if loss.ndim else average_value(loss, group)
    losses = function(*args, **{**kwargs, "reduction": "none"})
    is_counted = targets != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight")
    if weight is None:
        count = is_counted.sum(dtype=losses.dtype)
    else:
        count = (weight[torch.where(is_counted, targets, 0)] * is_counted).sum()
    dist.all_reduce(count, group=group)
    return average_value(losses.sum() / (count / dist.get_world_size(group)), group)


def draw_seed() -> int:
    """Return a number drawn from torch's default generator."""
    return int(torch.randint(1 << 62, ()).item())


class Stream:
    """Context in which torch's generators continue from a seed; their old states return at the end."""

    def __init__(self, seed: int, part: int, device_type: str) -> None:
        # An odd, large factor makes the seeds of parts differ in many of the bits that the generator uses.
        self._seed = (seed + part * 0x9E3779B97F4A7C15) % (1 << 63)
        self._device: Any = None if device_type == "cpu" else torch.get_device_module(device_type)
        self._before: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Self:
        self._before = torch.get_rng_state(), None if self._device is None else self._device.get_rng_state()
        torch.manual_seed(self._seed)
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_rng_state(self._before[0])
        if self._device is not None:
            self._device.set_rng_state(self._before[1])


class _Call(NamedTuple):
    frame: FrameType
    """Frame of the call: after Ctrl-C, no hook ends the call here."""
    contexts: tuple[AbstractContextManager[Any], ...]
    """Contexts of the call, in the order of their starts."""
    has_dtensors: bool


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[_Call] = []


_CALLS = _Calls()
_ENTRANCES: WeakKeyDictionary[nn.Module, Entrance] = WeakKeyDictionary()


def entrance_of(module: nn.Module) -> Entrance | None:
    """Return the entrance of a module."""
    return _ENTRANCES.get(module)


class Entrance:
    """Surrounds the calls to any module of a model; of nested calls only the outermost."""

    def __init__(self, mesh: TorchMesh, batch_axis: str) -> None:
        self._mesh = mesh
        self._axis = (mesh.mesh_dim_names or ()).index(batch_axis)

    def __deepcopy__(self, memo: Any) -> Entrance:
        return self  # a copied module has the same mesh

    def stand_before(self, module: nn.Module) -> None:
        """Make every call of the module from outside enter here."""
        if module not in _ENTRANCES:
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.leave, always_call=True)
            _ENTRANCES[module] = self

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Start a call from outside: check that all ranks' parts fit together, and agree on random numbers."""
        frame = _call_frame(sys._getframe(1))
        # Calls that ended by an exception have left no hook: close those that are not around this frame.
        while _CALLS.open and not _is_inside(frame, _CALLS.open[-1].frame):
            _end(_CALLS.open.pop())
        if _CALLS.open:
            return None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        has_dtensors = any(isinstance(tensor, DTensor) for tensor in tensors)
        contexts: list[AbstractContextManager[Any]] = [_Interception(self._mesh, self._axis)]
        # A call inside a backward recomputes an earlier call, with the same randomness, and torch.utils.checkpoint
        # collects what it saves.
        if torch._C._current_graph_task_id() == -1:
            contexts.append(release_saved())
            seed = self._agree([tensor for tensor in tensors if not isinstance(tensor, DTensor)])
            part = self._mesh.get_local_rank(self._axis)
            contexts.append(Stream(seed, part, self._mesh.device_type))
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._convert_input, (args, kwargs))
        for context in contexts:
            context.__enter__()
        _CALLS.open.append(_Call(frame, tuple(contexts), has_dtensors))
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End a call."""
        if not _CALLS.open or _CALLS.open[-1].frame is not _call_frame(sys._getframe(1)):
            return None
        call = _CALLS.open.pop()
        _end(call)
        return pytree.tree_map_only(torch.Tensor, self._wrap_output, output) if call.has_dtensors else None

    def _convert_input(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            placements: list[Any] = [Replicate()] * self._mesh.ndim
            if tensor.placements[self._axis] == Shard(0):
                placements[self._axis] = Shard(0)
            # A rank's gradient is that of its own loss, of which the whole loss is the mean.
            return tensor.redistribute(placements=placements).to_local(grad_placements=placements)
        # Moved to the mesh's device, as distribute_tensor moves parameters: a loader's tensors are on the CPU.
        return tensor.to(self._mesh.device_type)

    def _wrap_output(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a DTensor of this rank's part; a loss without dims is a mean over the ranks."""
        if isinstance(tensor, DTensor):
            return tensor
        placements: list[Any] = [Replicate()] * self._mesh.ndim
        placements[self._axis] = Shard(0) if tensor.ndim else Partial("avg")
        return DTensor.from_local(tensor, self._mesh, placements, run_check=False)

    def _agree(self, tensors: list[torch.Tensor]) -> int:
        """Return the seed of this call for all ranks.

        Parts must have equal shapes on all ranks: else the mean of their means would not be that of the whole batch.
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
    for context in reversed(call.contexts):
        context.__exit__(None, None, None)


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


class _Interception(TorchFunctionMode):
    """Gives plain tensors to all operations of a call. It runs before autograd, so that gradients flow back."""

    def __init__(self, mesh: TorchMesh, batch_axis: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._axis = batch_axis
        self._batch_group = mesh.get_group(batch_axis) if mesh.size(batch_axis) > 1 else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(leaf, DTensor) for leaf in leaves) and not _is_about_itself(func):
            operation = _PARALLEL.get(func)
            if operation is not None and len(args) > 1 and is_laid_out(args[1]):
                return operation(self._axis, *self._take_all(args[:1]), *args[1:], **kwargs)
            args, kwargs = self._take_all((args, kwargs))
        if self._batch_group is not None:
            if func is functional.batch_norm and _takes_batch_statistics(*args, **kwargs):
                return batch_norm(self._batch_group, *args, **kwargs)
            if is_loss(func):
                return compute_loss(func, args, kwargs, self._batch_group)
        return func(*args, **kwargs)

    def _take_all(self, values: Any) -> Any:
        return pytree.tree_map_only(DTensor, self._take, values)

    def _take(self, tensor: DTensor) -> torch.Tensor:
        return take_whole(tensor, self._axis) if tensor.device_mesh == self._mesh else tensor


_PARALLEL: dict[Any, Callable[..., torch.Tensor]] = {functional.linear: linear, functional.embedding: embedding}

_ABOUT_ITSELF = frozenset(
    ("__delete__", "__format__", "__len__", "__repr__", "__set__", "backward", "detach", "dim", "element_size",
     "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_same_size", "ndimension", "numel",
     "register_hook", "retain_grad", "size", "storage_offset", "stride")
)  # fmt: skip
_TRANSPOSED = frozenset(("H", "T", "mH", "mT"))


def _is_about_itself(func: Any) -> bool:
    """Return whether a function reads or sets a tensor's attribute, or changes the tensor in place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TRANSPOSED
    return name in _ABOUT_ITSELF or (name.endswith("_") and not name.endswith("__"))


def _takes_batch_statistics(*args: Any, training: bool = False, **_: Any) -> bool:
    return bool(args[5]) if len(args) > 5 else training
