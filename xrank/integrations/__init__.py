"""Integrations: training frameworks call xrank at their saves. Each module imports its framework; this one, nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from xrank.engine.report import Report


class Saves:
    """The exports of one training: in the background, one after another, and all ended at the end."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # A resumed training repeats steps, and so overwrites folders.
        self._options = {"background": True, "overwrite": True, **options}
        self._last: Future[Report] | None = None

    def start(self, model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any], out: str) -> None:
        """Export a model to a folder; every rank makes this call.

        An earlier export that still runs is awaited; its failure is raised on all ranks.
        """
        from xrank.commands.export import export_model

        made: Report | Future[Report] = export_model(model, out, **self._options)
        self._last = made if isinstance(made, Future) else None

    def finish(self) -> None:
        """Wait for the last export, and raise its failure on all ranks; every rank makes this call."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
