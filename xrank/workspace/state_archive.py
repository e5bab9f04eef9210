"""A rank's state as a torch archive, checked and ready to be written to a file or to memory.

`xrank.workspace.state_file` reads it back.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from xrank import system
from xrank.errors import UsageError, XrankError, require_torch
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord
from xrank.formats.zip_archive import ALIGNMENT
from xrank.workspace.identity import WorkspaceIdentity
from xrank.workspace.state_content import plain_config, state_content

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


@dataclass(frozen=True, slots=True)
class StateArchive:
    """A state that can be written."""

    state: dict[str, Any]
    nbytes: int
    """Bytes of the tensors; the archive is a little larger."""

    def write(self, fd: int) -> None:
        """Write the torch archive, starting at the descriptor's position; errors as `pass_to`."""
        self.pass_to(lambda data: system.write_all(fd, data))

    def pass_to(self, write: Callable[[memoryview], None]) -> None:
        """Pass the bytes of the torch archive to a function, in order.

        Raises:
            OSError, XrankError: the first error of `write`; the bytes until then are not a complete state.
        """
        import torch
        from torch.utils import serialization

        config: Any = serialization.config  # a module that replaces itself with an object; stubs do not know that
        sink = _Sink(write)
        try:
            # The user's own settings must not disable the checksums. The patch holds for this thread only
            # (torch/utils/_config_module.py: patch).
            with config.patch({"save.storage_alignment": ALIGNMENT, "save.compute_crc32": True}):
                torch.save(self.state, cast(IO[bytes], sink))
        except BaseException:
            # torch's writer finishes the archive while it unwinds, and hides the cause behind its own RuntimeError.
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
    """Return a rank's state as an archive; see `xrank.workspace.base.Workspace.write_configs_and_weights`.

    Contiguous CPU tensors are not copied; strided, expanded and device tensors are copied to the CPU. A DTensor whose
    mesh does not contain this rank is left out.

    Raises:
        UsageError: a state cannot hold the config, a tensor or the step.
        LayoutError: the notation cannot express a layout, or a layout does not fit its tensor.
    """
    require_torch("write_configs_and_weights")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise UsageError(
            f"step is {step!r}",
            got=repr(step),
            want="an integer of 0 or more, or None",
            next_step="pass the training step as an integer, or leave it out",
        )
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
    """A file object for torch.save. It keeps the first error and refuses writes after it."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self.error: OSError | XrankError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is not None:
            raise self.error
        try:
            self._write(data)
        except (OSError, XrankError) as error:
            self.error = error
            raise
        return len(data)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""
