"""The connections of a gloo process group, which the kernel closes when the process at their other end ends.

They are the only sign of a rank that ended before it used xrank. A receive that no rank matches is posted on the
connection; gloo refuses to post on a connection that is closed (gloo/transport/tcp/pair.cc: throwIfException). It costs
some bytes each time, no collective and no wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

_TAG = 0x7872616E
"""Tag of the receives; no rank sends with it."""
_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Texts of gloo's errors that mean the other end. Others come of this end, for example after a time-out."""


class GroupConnections:
    """The connections of this process in a process group.

    Args:
        group: torch's process group. It is referenced weakly: its owner ends it by dropping it.
        environ: the environment of this process.
    """

    def __init__(self, group: Any, environ: Mapping[str, str]) -> None:
        self._group = weakref.ref(group)
        # With lazy connections a receive would connect, and wait for the other rank.
        self._is_lazy = environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")

    def find_closed(self, rank: int) -> str | None:
        """Return why the connection to a rank of the world is closed; None if it is open, or unknown."""
        import torch
        import torch.distributed

        distributed: Any = torch.distributed
        group = self._group()
        if group is None or self._is_lazy:
            return None
        try:
            backend = group._get_backend(torch.device("cpu"))
            if backend.name() != "gloo":
                return None
            place = distributed.get_group_rank(group, rank)
        except (RuntimeError, ValueError, AttributeError):  # no backend for the CPU; no such rank in the group
            return None
        try:
            backend.recv([torch.empty(1, dtype=torch.uint8)], place, _TAG)
        except RuntimeError as error:
            return next((text for text in _CLOSED if text in str(error)), None)
        return None
