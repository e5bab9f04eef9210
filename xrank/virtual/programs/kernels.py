"""Kernels: the computations that programs call by name.

    @kernel("relu")
    def relu(x: Array) -> Array: ...

A kernel gets the arrays of its inputs (all numpy, or all torch), and its options as keyword arguments. It gives back
an array, or a tuple where the instruction has several outputs, of the same kind, with the shapes and element types
that the instruction says. It changes none of its inputs; an output may be a view of one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from xrank.errors import UsageError

__all__ = ["find_kernel", "kernel"]

_HOMES = ("xrank.virtual.programs.kernels_dense", "xrank.virtual.programs.kernels_mlp")
"""The modules whose import registers xrank's own kernels; imported when a name is not yet known."""

_KERNELS: dict[str, Callable[..., Any]] = {}

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(name: str) -> Callable[[_F], _F]:
    """Return the decorator that gives a function its name among the kernels.

    Raises:
        UsageError: another function has the name.
    """

    def register(function: _F) -> _F:
        known = _KERNELS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise UsageError(
                f"there are two kernels {name!r}",
                got=f"{function.__module__}.{function.__qualname__}",
                want=f"{known.__module__}.{known.__qualname__} alone",
                next_step="choose another name",
            )
        _KERNELS[name] = function
        return function

    return register


def find_kernel(name: str) -> Callable[..., Any]:
    """Return the kernel of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in _KERNELS:
        for home in _HOMES:
            import_module(home)
    try:
        return _KERNELS[name]
    except KeyError:
        raise UsageError(
            f"no kernel is called {name!r}",
            got=repr(name),
            want=f"one of {sorted(_KERNELS)}",
            next_step="import the module that registers it before the run",
        ) from None
