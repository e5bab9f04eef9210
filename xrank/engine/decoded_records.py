"""Records that are compressed.

Each is decoded once into a scratch file, and read there: the engine reads strided ranges in the output's order, and a
compressed record begins at its first byte. The scratch file keeps memory flat whatever the size of a record: it has no
name, is on a disk, and goes away with the process.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np

from xrank.engine.buffers import OpenSource
from xrank.engine.faults import COPY, find_owner
from xrank.engine.made_records import RecordClaims, RecordStream, ScratchFile, SourceLayer
from xrank.engine.windows import Read
from xrank.errors import CorruptError
from xrank.formats.zarr_array import import_zstandard, open_frame
from xrank.layout.stored_model import PLAIN, StoredModel

_CHUNK_NBYTES = 256 << 10


class DecodedSource(SourceLayer):
    """Reads records, and decodes those that are compressed. Errors as those of `FileSource`."""

    def __init__(self, model: StoredModel, inner: OpenSource, folder: str | None = None) -> None:
        super().__init__(inner)
        self._model = model
        self._inline = model.records.inline
        self._nbytes = model.records.nbytes
        encoded = model.records.encoded_nbytes
        self._encoded = np.full(len(model.records), PLAIN) if encoded is None else encoded
        room = np.where(self._encoded != PLAIN, self._nbytes, 0)
        self._place = np.cumsum(room) - room
        self._last = np.arange(len(model.records))
        """For each record the last one that a tensor with a piece in it has."""
        for shard in model.shards:
            if len(shard.record):
                np.maximum.at(self._last, shard.record, int(shard.record.max()))
        self._scratch = ScratchFile(folder, int(room.sum()), "compressed tensors are decoded")
        self._done = bytearray(len(model.records))
        self._claims = RecordClaims()

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        if record in self._inline:
            into[:] = self._inline[record][start : start + len(into)]
            return
        if self._encoded[record] == PLAIN:
            self._inner.read_into(record, start, into)
            return
        if not self._done[record]:
            self._bring(record)
        self._scratch.read_into(into, int(self._place[record]) + start)

    def announce(self, reads: Iterable[Read]) -> bool:
        """Start to fetch bytes of plain records; see `ObjectSource.announce`."""
        if self.objects is None:
            return False
        plain = (one for one in reads if one.record not in self._inline and self._encoded[one.record] == PLAIN)
        return self.objects.announce(plain)

    def close_files(self) -> None:
        """Close the model's files, which the next read opens again; decoded records stay."""
        self._inner.close()

    def close(self) -> None:
        """Close all files, the scratch file too; no read may be under way."""
        super().close()
        self._scratch.close()

    def _bring(self, record: int) -> None:
        """Return when a record is decoded, by this thread or another.

        Threads read the same stacked tensor at the same time. While another decodes the record, this one decodes the
        next of the same tensor.
        """
        later = range(record, int(self._last[record]) + 1)
        self._claims.bring(
            lambda: self._done[record] or None,
            lambda: (r for r in later if self._encoded[r] != PLAIN and not self._done[r]),
            self._decode,
        )

    def _decode(self, record: int) -> None:
        reader = open_frame(RecordStream(self._inner, record, int(self._encoded[record])))
        buffer = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
        wanted, done = int(self._nbytes[record]), 0
        try:
            while done <= wanted and (count := reader.readinto(buffer)):
                self._scratch.write(buffer[: min(count, wanted - done)], int(self._place[record]) + done)
                done += count
        except import_zstandard().ZstdError as error:
            raise self._corrupt(record, got=str(error)) from error
        if done != wanted:
            raise self._corrupt(record, got=f"{'more than ' if done > wanted else ''}{min(done, wanted):,} bytes")
        self._done[record] = 1

    def _corrupt(self, record: int, *, got: str) -> CorruptError:
        records = self._model.records
        path, offset = self._model.files[int(records.file[record])].path, int(records.offset[record])
        owner = find_owner(self._model, record)
        what = f"{owner['tensor']}, {owner['index_range']}: " if owner else ""
        what += f"{path} has a damaged chunk at byte {offset:,}"
        want = f"a valid zstd frame with {int(self._nbytes[record]):,} bytes"
        return CorruptError(what, file=path, got=got, want=want, next_step=COPY, **owner)
