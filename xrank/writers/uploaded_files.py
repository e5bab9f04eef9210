"""Uploads the files of a plan to a store, and to the stage of an output there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from xrank.stores.uploads import part_nbytes_for
from xrank.writers.store_files import PartPool, UploadedFile

if TYPE_CHECKING:
    from xrank.writers.store_stage import StoreStage


class PartsTarget:
    """Files in parts as the executor's target; see `xrank.plan.buffers.PlacingTarget`."""

    def __init__(self) -> None:
        self._pool: PartPool | None = None
        self._files: dict[int, UploadedFile] = {}

    def share_memory(self, room_nbytes: int, largest_nbytes: int) -> tuple[int, int]:
        """Return the memory that parts take, and their number; called before any file begins.

        Args:
            room_nbytes: memory that they may take.
            largest_nbytes: bytes of the largest file.
        """
        self._pool = self._pool or PartPool(room_nbytes, part_nbytes_for(largest_nbytes))
        return self._pool.nbytes, self._pool.num_parts

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of each part of a file; 0 where bytes that are written late lie among others."""
        return 0 if self._files[file].late else self._files[file].part_nbytes

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory for bytes of one part; wait while all parts are on their way."""
        return self._files[file].place(offset, nbytes)

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Take bytes that were put into their place."""
        self._files[file].placed(offset, nbytes)

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        self._files[file].write(offset, data)

    def write_late(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes of the file's ending at `offset`."""
        self._files[file].write_late(offset, data)


class UploadedFiles(PartsTarget):
    """Uploads the files of a plan to a stage; see `xrank.writers.part_files.OutputFiles`."""

    def __init__(self, stage: StoreStage) -> None:
        super().__init__()
        self.target = self
        self._stage = stage

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        """Begin a file."""
        self._pool = self._pool or PartPool()
        self._files[index] = self._stage.begin_file(name, nbytes, self._pool, late)

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        """Finish a file."""
        self._stage.finish_file(name, self._files.pop(index), digest, tensors)

    def close(self) -> None:
        """Wait for the parts that are on their way."""
        self._files.clear()
        if self._pool is not None:
            self._pool.close()
