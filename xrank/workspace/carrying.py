"""The base of workspaces that carry messages beside the states of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.errors import UsageError
from xrank.workspace.base import MessageWorkspace
from xrank.workspace.identity import IdentifiedWorkspace

if TYPE_CHECKING:
    import torch


class CarryingWorkspace(IdentifiedWorkspace):
    """Passes the calls of a `MessageWorkspace` on to one in the same place."""

    _messages: MessageWorkspace | None
    """None if the workspace is uninitialised."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message under a name that is never reused; see `MessageWorkspace`."""
        return self._carrier().publish(header, tensors)

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message after verifying its checksums; see `MessageWorkspace`."""
        return self._carrier().fetch(rank, receipt)

    def retire(self, receipt: str) -> None:
        """Remove a message; see `MessageWorkspace`."""
        self._carrier().retire(receipt)

    def close(self) -> None:
        """Remove this rank's messages; its state stays. A second call does nothing."""
        if self._messages is not None:
            self._messages.close()

    def _carrier(self) -> MessageWorkspace:
        if self._messages is None:
            raise self._initialisation_error()
        return self._messages

    def _initialisation_error(self) -> UsageError:
        return UsageError(
            "the workspace is not initialised: it has no place",
            got="workspace_path=None",
            want="a place that all ranks reach",
            next_step=f"construct {type(self).__name__}(workspace_path)",
        )
