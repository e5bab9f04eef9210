"""Lazy imports of a package's public names on first use (PEP 562), so that importing it imports nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def defer_imports(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a package, by public name -> module below it that defines it."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f"{package}.{homes[name]}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"{package}.{name} needs torch: run pip install 'torch>=2.10'"
            raise ModuleNotFoundError(message, name="torch") from error

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, names
