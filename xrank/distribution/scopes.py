"""The current distribution of this thread, and the modules that are made under it.

A parameter's name is known only from its outermost module, and its values only after its module has set them. So
modules are collected while they register parameters and submodules. They are laid out together: at the end of the
scope, or before the first use of one of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook as on_module_registration
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter_registration

from xrank.distribution.calls import find_hooks


class Construction:
    """Collects the modules that are made under a distribution, and lays them out.

    Order: `open`, hooks add modules, `finish` any number of times, `close`. Modules are held until they are laid out:
    with weak references, the garbage collector of each rank would decide, and all ranks must lay out the same modules.
    """

    def __init__(self, distribution: Any, *, is_scoped: bool) -> None:
        self.is_scoped = is_scoped
        self._distribution = distribution
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

    A copied module registers nothing, but its hooks are copied too, at a time when its id is known
    (copy.py:_reconstruct).
    """

    def __init__(self, key: int) -> None:
        self._key = key

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        construction = _PENDING.get(id(module))
        if construction is not None:
            construction.finish(is_last=not construction.is_scoped)
        # torch listed the hooks of this call earlier, so it does not run the new hook that begins it.
        hooks = find_hooks(module)
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
_HOOKS: list[Any] = []


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

    Modules that are made from now on are laid out before their first use, or at the next call.

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
        if not _HOOKS:
            _HOOKS.extend((on_parameter_registration(_add_module), on_module_registration(_add_module)))
    return construction


def _close(construction: Construction) -> None:
    with _LOCK:
        _OPEN.discard(id(construction))
        if not _OPEN:
            for hook in _HOOKS:
                hook.remove()
            _HOOKS.clear()


def _add_module(module: nn.Module, name: str, value: Any) -> None:
    construction = _CURRENT.state.construction
    if construction is not None and value is not None and not _CURRENT.is_laying_out:
        construction.add(module)
