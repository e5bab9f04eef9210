"""Helpers for tests of code that runs on ranks. They are shipped, but the library never imports them.

Names are loaded on first use, so that the plugin can make pytest rewrite the contracts' asserts before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.testing.reader_contract import ReaderContract, SampleSource, whole
    from xrank.testing.workspace_contract import MessageWorkspaceContract, WorkspaceContract

__all__ = ["MessageWorkspaceContract", "ReaderContract", "SampleSource", "WorkspaceContract", "whole"]

_MODULES: dict[str, tuple[str, ...]] = {
    "reader_contract": ("ReaderContract", "SampleSource", "whole"),
    "workspace_contract": ("MessageWorkspaceContract", "WorkspaceContract"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
