"""Calls of laid out models, and the modules that are made under the current distribution of a thread.

The tensors of a call from outside are plain: this rank's part of the batch, along dim 0. So are all activations inside,
and the output. Every operation is torch's own, except those that use a laid out parameter, and those that depend on the
whole batch: losses and batch normalization. `_Interception` finds them.

Parameters get the gradients of the mean of all ranks' losses, so a mean over this rank's part trains as a mean over the
whole batch would. A call with DTensors gets this rank's parts of them, and returns DTensors.

Ranks with different seeds draw the same numbers, so that replicas stay equal. In each call from outside every rank
draws one number. The largest number, with the index of the rank's part of the batch, seeds torch's generators during
the call: ranks along a model axis draw the same numbers, and parts of the batch draw others.

A parameter's name is known only from its outermost module, and its values only after its module has set them. So
modules are collected while they register parameters and submodules. They are laid out together: at the end of the
scope, or before the first use of one of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional
from torch.nn.modules.module import register_module_module_registration_hook as on_module_registration
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter_registration
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from xrank.distribution.parameters import (
    average_loss,
    batch_norm,
    embedding,
    is_laid_out,
    linear,
    release_saved,
    take_whole,
)
from xrank.errors import ContradictionError, UsageError

_PARALLEL: dict[Any, Callable[..., torch.Tensor]] = {functional.linear: linear, functional.embedding: embedding}
_COUNTED: dict[Any, int] = {functional.cross_entropy: 1, functional.nll_loss: 1}
"""Losses that ignore some targets, and the position of the targets among their arguments."""
if hasattr(functional, "linear_cross_entropy"):  # since torch 2.13
    _COUNTED[functional.linear_cross_entropy] = 2
_LOSSES = frozenset(
    function
    for name, function in vars(functional).items()
    if name.endswith(("_loss", "entropy", "_with_logits", "kl_div")) and callable(function)
)
_ABOUT_ITSELF = frozenset(
    ("__delete__", "__format__", "__len__", "__repr__", "__set__", "backward", "detach", "dim", "element_size",
     "get_device", "is_complex", "is_contiguous", "is_floating_point", "is_same_size", "ndimension", "numel",
     "register_hook", "retain_grad", "size", "storage_offset", "stride")
)  # fmt: skip
_TRANSPOSED = frozenset(("H", "T", "mH", "mT"))


class _Call(threading.local):
    """The call from outside that runs in this thread."""

    module: nn.Module | None = None
    """The module that was called; None if no call runs."""
    frame: FrameType | None = None
    """torch's frame that runs the hooks and `forward` of the call."""
    contexts = ExitStack()
    has_dtensors = False

    def end(self) -> None:
        self.module = self.frame = None
        self.contexts.close()


_CALL = _Call()
_HOOKS: WeakKeyDictionary[nn.Module, CallHooks] = WeakKeyDictionary()


class CallHooks:
    """Hooks around the calls of a model's modules; of nested calls they surround the outermost one."""

    def __init__(self, mesh: TorchMesh, batch_axis: str) -> None:
        self._mesh = mesh
        self._axis = (mesh.mesh_dim_names or ()).index(batch_axis)

    def __deepcopy__(self, memo: Any) -> CallHooks:
        return self  # a copied module has the same mesh

    def register(self, module: nn.Module) -> None:
        """Surround every call of the module from outside."""
        if module not in _HOOKS:
            module.register_forward_pre_hook(self.begin, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.end, always_call=True)
            _HOOKS[module] = self

    def begin(self, module: nn.Module, args: Any, kwargs: Any, frame: FrameType | None = None) -> Any:
        """Begin a call from outside: check that all ranks' parts fit together, and agree on random numbers.

        `frame` is torch's frame that runs the hooks of the call. Without it, it is the caller's.
        """
        if _CALL.frame is not None:
            # End a call whose frame no longer runs: torch runs no hook of a call that Ctrl-C stops.
            try:
                _CALL.frame.clear()
            except RuntimeError:  # Python clears no frame that runs
                pass
            else:
                _CALL.end()
        if _CALL.module is module:
            _CALL.end()  # the hook that ends a call could not tell the inner one from the outer one
            raise UsageError(
                f"this {type(module).__name__} calls itself",
                next_step="call self.forward(...) in its forward instead",
            )
        if _CALL.module is not None:
            return None
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with ExitStack() as entered:
            # A call inside a backward recomputes an earlier call, with the same randomness, and torch.utils.checkpoint
            # collects what it saves.
            is_recomputed = torch._C._current_graph_task_id() != -1
            seed = 0 if is_recomputed else self._agree([one for one in tensors if not isinstance(one, DTensor)])
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._convert_input, (args, kwargs))
            entered.enter_context(_Interception(self._mesh, self._axis))
            if not is_recomputed:
                entered.enter_context(release_saved())
                part = self._mesh.get_local_rank(self._axis)
                entered.enter_context(_seed_generators(seed, part, self._mesh.device_type))
            contexts = entered.pop_all()
        _CALL.module, _CALL.frame, _CALL.contexts = module, frame or sys._getframe(1), contexts
        _CALL.has_dtensors = any(isinstance(tensor, DTensor) for tensor in tensors)
        return args, kwargs

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End a call from outside."""
        if _CALL.module is not module:
            return None
        _CALL.end()
        return pytree.tree_map_only(torch.Tensor, self._wrap_output, output) if _CALL.has_dtensors else None

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
        """Return the seed of this call for all ranks, whose parts must have equal shapes."""
        sizes = [size for tensor in tensors for size in tensor.shape]
        drawn = int(torch.randint(1 << 62, ()).item())
        bounds = torch.tensor([drawn, *sizes, *(-size for size in sizes)], device=self._mesh.device_type)
        # The maxima of sizes and of negated sizes equal this rank's own only if all ranks agree.
        for axis in range(self._mesh.ndim):
            dist.all_reduce(bounds, dist.ReduceOp.MAX, group=self._mesh.get_group(axis))
        seed, *agreed = bounds.tolist()
        if agreed != [*sizes, *(-size for size in sizes)]:
            # The mean of their means would not be that of the whole batch.
            raise ContradictionError(
                "the ranks' parts of the batch have different shapes",
                rank=dist.get_rank(),
                got=f"here {[tuple(tensor.shape) for tensor in tensors]}",
                next_step="drop the last, smaller batch (drop_last=True), or pad it",
            )
        return int(seed)


@contextmanager
def _seed_generators(seed: int, part: int, device_type: str) -> Iterator[None]:
    """Let torch's generators continue from a seed, and restore their states at the end.

    Recomputed activations (torch.utils.checkpoint) find the same generator states as before.
    """
    device = None if device_type == "cpu" else torch.get_device_module(device_type)
    before = torch.get_rng_state(), None if device is None else device.get_rng_state()
    # An odd, large factor makes the seeds of parts differ in many of the bits that the generator uses.
    torch.manual_seed((seed + part * 0x9E3779B97F4A7C15) % (1 << 63))
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        if device is not None:
            device.set_rng_state(before[1])


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
            is_trained = func is functional.batch_norm and (args[5] if len(args) > 5 else kwargs.get("training", False))
            if is_trained:
                return batch_norm(self._batch_group, *args, **kwargs)
            if func in _LOSSES:
                return _compute_loss(func, args, kwargs, self._batch_group)
        return func(*args, **kwargs)

    def _take_all(self, values: Any) -> Any:
        def take(tensor: DTensor) -> torch.Tensor:
            return take_whole(tensor, self._axis) if tensor.device_mesh == self._mesh else tensor

        return pytree.tree_map_only(DTensor, take, values)


def _compute_loss(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], group: dist.ProcessGroup
) -> torch.Tensor:
    """Compute a loss of plain tensors: the mean of all ranks' parts, or the sum of this rank's part.

    The gradients are those of a loss whose mean over the ranks is the loss of the whole batch.
    """
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "batchmean"):
        loss: torch.Tensor = function(*args, **kwargs)
        return loss
    targets = args[_COUNTED[function]] if function in _COUNTED else None
    if targets is None or torch.is_floating_point(targets):
        # Parts have equal shapes, so the gradients are those of each rank's own mean.
        loss = function(*args, **kwargs)
        return loss if loss.ndim else average_loss(loss, group)
    losses = function(*args, **{**kwargs, "reduction": "none"})
    is_counted = targets != kwargs.get("ignore_index", -100)
    weight = kwargs.get("weight")
    if weight is None:
        count = is_counted.sum(dtype=losses.dtype)
    else:
        count = (weight[torch.where(is_counted, targets, 0)] * is_counted).sum()
    dist.all_reduce(count, group=group)
    return average_loss(losses.sum() / (count / dist.get_world_size(group)), group)


def _is_about_itself(func: Any) -> bool:
    """Return whether a function reads or sets a tensor's attribute, or changes the tensor in place."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _TRANSPOSED
    return name in _ABOUT_ITSELF or (name.endswith("_") and not name.endswith("__"))


class Construction:
    """Collects the modules that are made under a distribution, and lays them out."""

    def __init__(self, distribution: Any, *, is_scoped: bool) -> None:
        self.is_scoped = is_scoped
        self._distribution = distribution
        # Held until they are laid out: with weak references, the garbage collector of each rank would decide, and all
        # ranks must lay out the same modules.
        self._modules: dict[int, nn.Module] = {}
        self._used: set[str] = set()
        self._is_unchecked = False

    def add(self, module: nn.Module) -> None:
        """Add a module that registers a parameter or a submodule."""
        if id(module) not in self._modules:
            module.register_forward_pre_hook(_FirstUse(id(module)), prepend=True, with_kwargs=True)
            self.hold(module)

    def hold(self, module: nn.Module) -> None:
        """Hold a module that already has the hook, such as a copy of a held module."""
        self._modules[id(module)] = module
        _PENDING[id(module)] = self

    def finish(self, *, is_last: bool) -> None:
        """Lay out the collected modules; the last time, also check that all rules were used."""
        modules = list(self._modules.values())
        self.forget()
        parts = {id(part) for module in modules for part in module.children()}
        # Only outermost modules know the full names of parameters.
        roots = [module for module in modules if id(module) not in parts]
        if roots:
            _CURRENT.is_laying_out = True
            try:
                self._used |= self._distribution.lay_out(roots)
            finally:
                _CURRENT.is_laying_out = False
            self._is_unchecked = True
        if is_last and self._is_unchecked:
            self._is_unchecked = False
            self._distribution.check_used(self._used)

    def forget(self) -> None:
        """Drop the collected modules without changing them."""
        for key, module in self._modules.items():
            _PENDING.pop(key, None)
            for number, hook in list(module._forward_pre_hooks.items()):
                if isinstance(hook, _FirstUse):
                    del module._forward_pre_hooks[number]
                    module._forward_pre_hooks_with_kwargs.pop(number, None)
        self._modules.clear()


_PENDING: dict[int, Construction] = {}
"""Construction that holds a module, by the module's id; for all threads, since another thread may use a model."""


class _FirstUse:
    """The hook that lays out a module before its first use.

    A copied module registers nothing, but its hooks are copied once its id is known (copy.py:_reconstruct).
    """

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        construction = _PENDING.get(id(module))
        if construction is not None:
            construction.finish(is_last=not construction.is_scoped)
        # torch listed the hooks of this call earlier, so it does not run the new hook that begins it.
        hooks = _HOOKS.get(module)
        if construction is None or hooks is None:
            return None
        return hooks.begin(module, args, kwargs, sys._getframe(1))

    def __deepcopy__(self, memo: Any) -> _FirstUse:
        construction, module = _PENDING.get(self._key), memo.get(self._key)
        if construction is not None and isinstance(module, nn.Module):
            construction.hold(module)
            return _FirstUse(id(module))
        return self


@dataclass(frozen=True, slots=True)
class _State:
    value: Any = None
    construction: Construction | None = None


class _Current(threading.local):
    state = _State()
    is_laying_out = False
    """Whether the registered parameters replace others, so that no module is being made."""


_CURRENT = _Current()
_LOCK = threading.Lock()
_OPEN: set[int] = set()
_REGISTRATION_HOOKS: list[Any] = []


def distribution() -> Any:
    """Return this thread's current distribution, from `set_distribution` or a scope; None without one.

    Example:
        >>> from xrank.distribution import distribution
        >>> distribution() is None
        True
    """
    return _CURRENT.state.value


def set_distribution(value: Any) -> None:
    """Set this thread's current distribution until the next call; None ends it.

    Modules that are created from now on are sharded before their first use, or at the next call.

    Example:
        >>> from xrank.distribution import DataParallel, distribution, set_distribution
        >>> set_distribution(DataParallel(devices=["cpu:0"]))
        >>> distribution().num_model_replicas
        1
        >>> set_distribution(None)
    """
    before = _CURRENT.state
    can_lay_out = callable(getattr(value, "lay_out", None))
    _CURRENT.state = _State(value, _open(value, is_scoped=False) if can_lay_out else None)
    _end(before)


@contextmanager
def scope_of(value: Any) -> Iterator[None]:
    """Make a distribution current, and lay out the new modules at the end, unless the body raised."""
    before = _CURRENT.state
    construction = _open(value, is_scoped=True)
    _CURRENT.state = _State(value, construction)
    try:
        yield
    except BaseException:
        for made in (construction, _CURRENT.state.construction):
            if made is not None and made is not before.construction:
                _close(made)
                made.forget()
        raise
    else:
        _close(construction)
        within, _CURRENT.state = _CURRENT.state, before
        _end(within)
        construction.finish(is_last=True)
    finally:
        _CURRENT.state = before


def _end(state: _State) -> None:
    """Lay out the modules made since `set_distribution`. A scope does this itself."""
    if state.construction is not None and not state.construction.is_scoped:
        _close(state.construction)
        state.construction.finish(is_last=True)


def _open(value: Any, *, is_scoped: bool) -> Construction:
    construction = Construction(value, is_scoped=is_scoped)
    with _LOCK:
        _OPEN.add(id(construction))
        # torch's registration hooks are global: one set serves all open constructions.
        if not _REGISTRATION_HOOKS:
            _REGISTRATION_HOOKS.extend((on_parameter_registration(_add_module), on_module_registration(_add_module)))
    return construction


def _close(construction: Construction) -> None:
    with _LOCK:
        _OPEN.discard(id(construction))
        if not _OPEN:
            for hook in _REGISTRATION_HOOKS:
                hook.remove()
            _REGISTRATION_HOOKS.clear()


def _add_module(module: nn.Module, name: str, value: Any) -> None:
    construction = _CURRENT.state.construction
    if construction is not None and value is not None and not _CURRENT.is_laying_out:
        construction.add(module)
