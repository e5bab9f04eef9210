"""Workspaces: where ranks leave their states for others.

Names are loaded when they are first used, so that importing this imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import deferred

if TYPE_CHECKING:
    from xrank.workspace.base import MessageWorkspace, Workspace

__all__ = ["MessageWorkspace", "Workspace"]

__getattr__, __dir__ = deferred(__name__, {"MessageWorkspace": "base", "Workspace": "base"})
