"""A thin module for each command; the command line and Python callers use the same functions.

Each decides by `xrank.recipes`, agrees by `xrank.ranks.team`, and makes the output by `xrank.engine`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.commands.layout import check_layouts

__all__ = ["check_layouts"]

# A command that needs another module of this package shall not wait for the engine.
__getattr__, __dir__ = defer_imports(__name__, {"check_layouts": "layout"})
