"""Uploads the files of a plan to the stage of an output in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.writers.store_files import PartPool, UploadedFile

if TYPE_CHECKING:
    from xrank.writers.store_stage import StoreStage

__all__ = ["UploadedFiles"]


class UploadedFiles:
    """Uploads the files of a plan; see `xrank.writers.part_files.OutputFiles`."""

    def __init__(self, stage: StoreStage) -> None:
        self.target = self
        self._stage = stage
        self._pool: PartPool | None = None
        self._files: dict[int, UploadedFile] = {}

    def share_memory(self, allowed_nbytes: int) -> int:
        """Return how much of a budget the parts take; called before any file begins."""
        self._pool = self._pool or PartPool(allowed_nbytes)
        return self._pool.nbytes

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        """Begin a file."""
        self._pool = self._pool or PartPool()
        self._files[index] = self._stage.begin_file(name, nbytes, self._pool, late)

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        self._files[file].write(offset, data)

    def write_late(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes of the file's ending at `offset`."""
        self._files[file].write_late(offset, data)

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        """Finish a file."""
        self._stage.finish_file(name, self._files.pop(index), digest, tensors)

    def close(self) -> None:
        """Wait for the parts that are on their way."""
        self._files.clear()
        if self._pool is not None:
            self._pool.close()
