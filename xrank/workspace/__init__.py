"""Workspaces: where ranks write their states for other ranks to read.

To add a transport of states or of tensors in live gathers, write a class with the methods of `Workspace` or
`MessageWorkspace`, and subclass `xrank.testing.WorkspaceContract` or `xrank.testing.MessageWorkspaceContract`.
`xrank.ranks.memory_messages` is an example. `xrank.ranks.gathering` chooses the one that a gather uses.

Names are loaded on first use, so importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.workspace.base import MessageWorkspace, Workspace

__all__ = ["MessageWorkspace", "Workspace"]

__getattr__, __dir__ = defer_imports(__name__, {"MessageWorkspace": "base", "Workspace": "base"})
