"""The one composition that the commands and Python callers use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xrank.conversion.layout_check import check_layouts

__all__ = ["check_layouts"]


def __getattr__(name: str) -> Any:
    # On first use: a command that needs another module of this package shall not wait for the engine.
    if name != "check_layouts":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from xrank.conversion.layout_check import check_layouts

    return check_layouts
