"""The weight files of a plan in a stage on a disk: each is made at its full size, filled, synced and named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol

from xrank.plan.buffers import FileTarget, Target
from xrank.writers.disk import is_in_memory


class OutputFiles(Protocol):
    """The weight files of an output while they are made, on a disk or in a store."""

    @property
    def target(self) -> Target:
        """What the executor writes to, by the files' index."""

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        """Make a file, before its first byte is written; `late` are (offset, bytes) of the parts of its ending."""

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        """Finish a file after its last byte; `tensors` are the digests of its tensors, in order."""

    def close(self) -> None:
        """Leave the files that a failure left open."""


class _Stage(Protocol):
    def create_part(self, name: str, nbytes: int) -> int: ...
    def finish_part(self, name: str, fd: int, nbytes: int, digest: str) -> None: ...


class PartFiles:
    """Files of a stage on a disk; see `OutputFiles`."""

    def __init__(self, stage: _Stage) -> None:
        self.target = FileTarget({})
        self._stage = stage

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        """Make a file at its full size."""
        fd = self._stage.create_part(name, nbytes)
        self.target.in_memory = is_in_memory(fd)
        self.target.descriptors[index] = fd

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        """Sync a file, name it and record it in the journal."""
        # The stage closes the descriptor in any case, so remove it from `close`'s reach first.
        self._stage.finish_part(name, self.target.descriptors.pop(index), nbytes, digest)

    def close(self) -> None:
        """Close the files that a failure left open."""
        for fd in self.target.descriptors.values():
            os.close(fd)
        self.target.descriptors.clear()
