"""Kernels: the computations that programs call by name.

    @kernel("relu")
    def relu(x: Array) -> Array: ...

A kernel receives its input arrays (all numpy, or all torch) and its options as keyword arguments. It returns an array,
or a tuple if the instruction has several outputs, of the same kind and with the instruction's shapes and element types.
It must not change its inputs; an output may be a view of one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from xrank.errors import UsageError

_HOMES = ("xrank.virtual.programs.kernels_dense", "xrank.virtual.programs.kernels_mlp")
"""Modules that register xrank's own kernels when they are imported, at the first unknown name."""

_KERNELS: dict[str, Callable[..., Any]] = {}

_F = TypeVar("_F", bound=Callable[..., Any])


def kernel(name: str) -> Callable[[_F], _F]:
    """Return a decorator that registers a function as a kernel.

    Raises:
        UsageError: another function has this name.

    >>> @kernel("example.double")
    ... def double(x):
    ...     return 2 * x
    >>> find_kernel("example.double")(21)
    42
    """

    def register(function: _F) -> _F:
        known = _KERNELS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (function.__module__, function.__qualname__):
            raise UsageError(
                f"two kernels are named {name!r}",
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
        UsageError: the name is unknown.
    """
    if name not in _KERNELS:
        for home in _HOMES:
            import_module(home)
    try:
        return _KERNELS[name]
    except KeyError:
        raise UsageError(
            f"unknown kernel {name!r}",
            got=repr(name),
            want=f"one of {sorted(_KERNELS)}",
            next_step="import the module that registers it before the run",
        ) from None
