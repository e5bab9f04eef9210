"""Helpers for tests of code that runs on ranks. They are shipped, but the library never imports them.

Names are loaded on first use, so that the plugin can make pytest rewrite the contracts' asserts before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.testing.message_contract import MessageWorkspaceContract
    from xrank.testing.reader_contract import ReaderContract, SampleSource, whole
    from xrank.testing.workspace_contract import WorkspaceContract

__all__ = ["MessageWorkspaceContract", "ReaderContract", "SampleSource", "WorkspaceContract", "whole"]

_HOMES = {
    "MessageWorkspaceContract": "message_contract",
    "ReaderContract": "reader_contract",
    "SampleSource": "reader_contract",
    "WorkspaceContract": "workspace_contract",
    "whole": "reader_contract",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
