"""Sources whose files contain compressed records: each is decoded once into a scratch file, and read there.

The engine reads strided ranges in the output's order, and a compressed record has none: it begins at its first byte.
The output of a model with stacked layers touches every record once per layer, so that decoding at each touch would
take as many times as long. A scratch file keeps memory flat whatever the size of a record: it has no name, lies on
disk, and goes away with the process.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from xrank.engine.buffers import FileSource, OpenSource
from xrank.engine.faults import find_owner
from xrank.engine.object_source import ObjectSource, holds_objects
from xrank.engine.windows import Read
from xrank.environment import environ, scratch_folder
from xrank.errors import AGAIN, CorruptError, NoSpaceError, XrankError
from xrank.formats.zstd_frame import import_zstandard, open_frame
from xrank.layout.stored_model import PLAIN, StoredModel
from xrank.system import read_at, write_at

if TYPE_CHECKING:
    pass

_CHUNK_NBYTES = 256 << 10
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def open_source(model: StoredModel, folder: str | None = None) -> OpenSource:
    """Return a source of a model's records, which the caller closes.

    Args:
        model: the model in files.
        folder: folder on a disk with room for the decoded records; it must exist when the first record is
            read. None: that of `scratch_folder`.
    """
    records = model.records
    if records.encoded_nbytes is None and not records.inline:
        return open_files(model)
    return DecodedSource(model, folder)


def open_files(model: StoredModel) -> FileSource | ObjectSource:
    """Return a source of a model's records as they are stored."""
    return ObjectSource(model) if holds_objects(model) else FileSource(model)


class DecodedSource:
    """Reads records, and decodes those that are compressed; called by many threads at once.

    Raises (from every method):
        CorruptError: a record is not what the metadata describes; other errors are those of `FileSource`.
        NoSpaceError: the scratch folder's disk is full.
    """

    def __init__(self, model: StoredModel, folder: str | None = None) -> None:
        self._model = model
        self._files = open_files(model)
        self._folder = folder
        self._inline = model.records.inline
        self._nbytes = model.records.nbytes
        encoded = model.records.encoded_nbytes
        self._encoded = np.full(len(model.records), PLAIN) if encoded is None else encoded
        room = np.where(self._encoded != PLAIN, self._nbytes, 0)
        self._place = np.cumsum(room) - room
        self._neighbours = _last_neighbours(model)
        self._scratch: int | None = None
        self._drop_scratch: Callable[[], object] = lambda: None
        self._done = bytearray(len(model.records))
        self._claimed: set[int] = set()
        self._changed = threading.Condition()

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        if record in self._inline:
            into[:] = self._inline[record][start : start + len(into)]
            return
        if self._encoded[record] == PLAIN:
            self._files.read_into(record, start, into)
            return
        if not self._done[record]:
            self._bring(record)
        assert self._scratch is not None
        offset = int(self._place[record]) + start
        while into:
            count = read_at(self._scratch, into, offset)
            into, offset = into[count:], offset + count

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Read into the staging buffer and return the part that was filled."""
        data = staging[:nbytes]
        self.read_into(record, start, data)
        return data

    def check_unchanged(self) -> None:
        """Compare size, inode and time of every file with those at the reading of its metadata."""
        self._files.check_unchanged()

    @property
    def objects(self) -> ObjectSource | None:
        """The objects in stores that it reads, if there are any."""
        return self._files if isinstance(self._files, ObjectSource) else None

    def announce(self, reads: Iterable[Read]) -> bool:
        """Start to fetch bytes of plain records; see `ObjectSource.announce`."""
        if self.objects is None:
            return False
        plain = (one for one in reads if one.record not in self._inline and self._encoded[one.record] == PLAIN)
        return self.objects.announce(plain)

    def close_files(self) -> None:
        """Close the model's files, which the next read opens again; decoded records stay."""
        self._files.close()

    def close(self) -> None:
        """Close all files, the scratch file too; no read may be under way."""
        self._files.close()
        self._drop_scratch()

    def _bring(self, record: int) -> None:
        """Return when a record is decoded, by this thread or another.

        Threads read the same stacked tensor at the same time. While another decodes the record, this one decodes the
        next of the same tensor.
        """
        while True:
            with self._changed:
                if self._done[record]:
                    return
                last = int(self._neighbours[record])
                free = (other for other in range(record, last + 1) if self._is_free(other))
                mine = next(free, None)
                if mine is None:
                    self._changed.wait()
                    continue
                self._claimed.add(mine)
                if self._scratch is None:
                    self._scratch = self._make_scratch()
                    self._drop_scratch = weakref.finalize(self, os.close, self._scratch)
            try:
                self._decode(mine, self._scratch)
            except BaseException:
                with self._changed:
                    self._claimed.discard(mine)  # a thread that waits for the record meets the error itself
                    self._changed.notify_all()
                raise
            with self._changed:
                self._done[mine] = 1
                self._changed.notify_all()

    def _is_free(self, record: int) -> bool:
        return self._encoded[record] != PLAIN and not self._done[record] and record not in self._claimed

    def _make_scratch(self) -> int:
        folder = self._folder or scratch_folder(environ())
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            raise self._scratch_error(error, folder) from error

    def _decode(self, record: int, scratch: int) -> None:
        reader = open_frame(_Frame(self._files, record, int(self._encoded[record])))
        buffer = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
        wanted, done = int(self._nbytes[record]), 0
        try:
            while done <= wanted and (count := reader.readinto(buffer)):
                self._write(scratch, int(self._place[record]) + done, buffer[: min(count, wanted - done)])
                done += count
        except import_zstandard().ZstdError as error:
            raise self._corrupt(record, got=str(error)) from error
        if done != wanted:
            raise self._corrupt(record, got=f"{'more than ' if done > wanted else ''}{min(done, wanted):,} bytes")

    def _write(self, scratch: int, offset: int, data: memoryview) -> None:
        try:
            while data:
                count = write_at(scratch, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            raise self._scratch_error(error, self._folder or scratch_folder(environ())) from error

    def _scratch_error(self, error: OSError, folder: str) -> XrankError:
        needed = int(np.where(self._encoded != PLAIN, self._nbytes, 0).sum())
        what = f"{folder}: {os.strerror(error.errno or 0)}, where compressed tensors are decoded"
        if error.errno in _NO_SPACE:
            return NoSpaceError(
                what,
                file=folder,
                needed_nbytes=needed,
                want=f"{needed:,} bytes beside the output",
                next_step=f"free space there, then {AGAIN}",
            )
        return XrankError(what, file=folder, next_step=f"set TMPDIR to a folder on a disk with room, then {AGAIN}")

    def _corrupt(self, record: int, *, got: str) -> CorruptError:
        records = self._model.records
        path, offset = self._model.files[int(records.file[record])].path, int(records.offset[record])
        owner = find_owner(self._model, record)
        subject = "" if owner is None else f"{owner.name}, {owner.where}: "
        return CorruptError(
            f"{subject}{path} holds no sound chunk at byte {offset:,}",
            tensor=None if owner is None else owner.name,
            rank=None if owner is None else owner.rank,
            file=path,
            index_range=None if owner is None else owner.where,
            got=got,
            want=f"a frame of zstd with {int(self._nbytes[record]):,} bytes",
            next_step="copy the file again from where it was written, or take another checkpoint",
        )


class _Frame:
    """The encoded bytes of a record as a stream."""

    def __init__(self, files: FileSource | ObjectSource, record: int, nbytes: int) -> None:
        self._files, self._record, self._nbytes = files, record, nbytes
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes; none at the end."""
        data = bytearray(min(size, self._nbytes - self._position))
        self._files.read_into(self._record, self._position, memoryview(data))
        self._position += len(data)
        return bytes(data)


def _last_neighbours(model: StoredModel) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return for each record the last one that a tensor with a piece in it has."""
    last = np.arange(len(model.records))
    for shard in model.shards:
        if len(shard.record):
            np.maximum.at(last, shard.record, int(shard.record.max()))
    return last
