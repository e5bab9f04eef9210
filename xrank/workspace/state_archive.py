"""A rank's state on its way out: what it holds, checked, and the torch archive that its bytes become.

`xrank.workspace.state_file` reads it back. Where the bytes go (a file, memory) is the workspace's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from xrank.errors import UsageError
from xrank.formats.archive_layout import ALIGNMENT
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord
from xrank.workspace.identity import WorkspaceIdentity
from xrank.workspace.state_content import plain_config, state_content

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["StateArchive", "make_state_archive"]


@dataclass(frozen=True, slots=True)
class StateArchive:
    """A state that can be written."""

    state: dict[str, Any]
    nbytes: int
    """Of the tensors; the archive is a little larger."""

    def write(self, fd: int) -> None:
        """Write the torch archive, from the descriptor's position on.

        Raises:
            OSError: the first error that writing met; what the descriptor then holds is no state.
        """
        import torch
        from torch.utils import serialization

        config: Any = serialization.config  # a module that makes itself an object, which no stub says
        sink = _Sink(fd)
        try:
            # The user's own settings must not take the checksums away. The patch holds for this thread only
            # (torch/utils/_config_module.py: patch).
            with config.patch({"save.storage_alignment": ALIGNMENT, "save.compute_crc32": True}):
                torch.save(self.state, cast(IO[bytes], sink))
        except BaseException:
            # torch's writer ends the archive while it unwinds, and buries the cause under its own RuntimeError.
            if sink.error is not None:
                raise sink.error from None
            raise


def make_state_archive(
    identity: WorkspaceIdentity,
    config_json: dict[str, Any],
    weights: Mapping[str, torch.Tensor],
    layouts: LayoutMap | None,
    step: int | None,
) -> StateArchive:
    """Return what a rank's state holds; see `xrank.workspace.base.Workspace.write_configs_and_weights`.

    Tensors whose bytes lie in a row on the CPU are taken where they are; strided, expanded and device tensors are
    copied to the CPU. A DTensor whose mesh this rank is not in is left out.

    Raises:
        UsageError: something in config, weights or step that no state can hold.
        LayoutError: a layout that no notation can say, or that does not fit its tensor.
    """
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(f"step is {step!r}", got=repr(step), want="a number of 0 or more, or None")
    config = plain_config(config_json)
    content = state_content(weights, layouts, identity.rank)
    record = RankRecord(
        run_id=identity.run_id,
        attempt=identity.attempt,
        step=step,
        rank=identity.rank,
        world_size=identity.world_size,
        host=socket.gethostname(),
        meshes=content.meshes,
        tensors=content.tensors,
    )
    return StateArchive({CONFIG: config, WEIGHT: content.weights, RECORD: record.to_json()}, content.nbytes)


class _Sink:
    """A file as torch.save wants it; keeps the first error, and takes nothing after it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is not None:
            raise self.error
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            self.error = error
            raise
        return done

    def flush(self) -> None:
        """Do nothing: nothing is held back."""
