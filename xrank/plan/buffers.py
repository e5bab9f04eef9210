"""Where the executor reads and writes: ranges of files, or memory; either on either side."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from xrank.errors import ContradictionError, CorruptError, IncompleteError, XrankError
from xrank.plan.source import SourceFile, StoredModel
from xrank.plan.writeback import start_writeback

__all__ = ["FileSource", "FileTarget", "MemorySource", "MemoryTarget", "NullTarget", "OpenSource", "Source", "Target"]


_WRITEBACK_NBYTES = 8 << 20

_WRITE_NBYTES = 128 << 10
"""Bytes written to a disk by one call. ext4 takes a folio of that size for its cache, and the largest ones (1 MiB) come
from memory that lay idle: in a virtual machine its host has taken it back, and gives it anew at four times the cost."""


class Source(Protocol):
    """Records to read from; called by many threads at once."""

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes [start, start + nbytes): in `staging`, or a view of where they already are."""


class OpenSource(Source, Protocol):
    """A source that holds something open."""

    def check_unchanged(self) -> None:
        """Raise if it is not what its metadata described, as far as that can be seen."""

    def close(self) -> None:
        """Let go of it; no read may be under way."""


class Target(Protocol):
    """Output files to write to; called by many threads at once, never for the same bytes."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""


class FileSource:
    """Reads the records of a stored model; keeps a bounded number of files open.

    Raises (from every method):
        CorruptError: a file is shorter than its metadata said.
        XrankError: the disk or the server fails to give the bytes.
        ContradictionError: a file is not the one whose metadata was read.
    """

    def __init__(self, model: StoredModel) -> None:
        self._files = model.files
        self._record_files: Sequence[int] = model.records.file.tolist()
        self._record_offsets: Sequence[int] = model.records.offset.tolist()
        self._open: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._max_open = max(4, min(256, limit // 4 if limit > 0 else 256))

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        file = self._record_files[record]
        offset = self._record_offsets[record] + start
        with self._descriptor(file) as fd:
            while into:
                try:
                    n = os.preadv(fd, [into], offset)
                except OSError as error:  # it knows no name, and what is being written has another
                    raise XrankError(
                        f"{self._files[file].path} cannot be read at byte {offset:,}: {error.strerror}",
                        file=self._files[file].path,
                        got=errno.errorcode.get(error.errno or 0),
                        next_step="look at the disk or the server; the same command goes on from what is finished",
                    ) from error
                if n == 0:
                    raise CorruptError(
                        f"{self._files[file].path} ends before byte {offset:,}",
                        file=self._files[file].path,
                        got=f"{os.fstat(fd).st_size:,} bytes",
                        want=f"{self._files[file].nbytes:,} bytes, as when it was opened",
                        next_step="nothing may write to the source during a gather; run the same command again",
                    )
                into, offset = into[n:], offset + n

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Read into the staging buffer and return the part that was filled."""
        data = staging[:nbytes]
        self.read_into(record, start, data)
        return data

    @contextmanager
    def place(self, record: int) -> Iterator[tuple[int, int, int]]:
        """Give the body a record's file, its descriptor, and the record's first byte in it."""
        file = self._record_files[record]
        with self._descriptor(file) as fd:
            yield file, fd, self._record_offsets[record]

    @contextmanager
    def _descriptor(self, file: int) -> Iterator[int]:
        with self._lock:
            fd = self._open.get(file)
            if fd is None:
                fd = _open_checked(self._files[file])
                self._open[file] = fd
                self._evict()
            else:
                self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[file] -= 1

    def _evict(self) -> None:
        for file in list(self._open)[: max(0, len(self._open) - self._max_open)]:
            if not self._users.get(file):
                os.close(self._open.pop(file))

    def check_unchanged(self) -> None:
        """Compare every file with what it was when its metadata was read."""
        for file in self._files:
            try:
                status = os.stat(file.path)
            except FileNotFoundError:
                status = None
            if status is None or SourceFile.of(file.path, status) != file:
                raise _changed(file)

    def close(self) -> None:
        """Close all files; no read may be under way."""
        with self._lock:
            for fd in self._open.values():
                os.close(fd)
            self._open.clear()


def _open_checked(file: SourceFile) -> int:
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise IncompleteError(
            f"{file.path} was there when its metadata was read and is gone",
            file=file.path,
            next_step="nothing may remove the source during a gather; run the same command again",
        ) from None
    if SourceFile.of(file.path, os.fstat(fd)) != file:
        os.close(fd)
        raise _changed(file)
    return fd


def _changed(file: SourceFile) -> ContradictionError:
    return ContradictionError(
        f"{file.path} changed while it was being read",
        file=file.path,
        got="another size, time of change or inode",
        want=f"{file.nbytes:,} bytes, as when its metadata was read",
        next_step="let the ranks finish writing, then run the same command",
    )


class FileTarget:
    """Writes to file descriptors, one for each output file; opening, sizing and syncing them is the caller's.

    Args:
        descriptors: by index of the output file; the caller may add to them and take from them.
        in_memory: whether the files lie on tmpfs, where pages are small anyway and each call has its price.
    """

    def __init__(self, descriptors: dict[int, int], *, in_memory: bool = False) -> None:
        self.descriptors = descriptors
        self.in_memory = in_memory

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        fd = self.descriptors[file]
        while data:
            n = os.pwrite(fd, data if self.in_memory else data[:_WRITE_NBYTES], offset)
            data, offset = data[n:], offset + n
        # Windows come nearly in order: where one ends a stretch, the stretch before it is complete.
        if offset % _WRITEBACK_NBYTES == 0 and not self.in_memory:
            start_writeback(fd, max(0, offset - 2 * _WRITEBACK_NBYTES), _WRITEBACK_NBYTES)


class MemorySource:
    """Reads records that are views of memory, one for each record."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in views]

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        into[:] = self._views[record][start : start + len(into)]

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the bytes where they are; nothing is copied."""
        return self._views[record][start : start + nbytes]


class MemoryTarget:
    """Writes to views of memory, one for each output file."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in views]

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        self._views[file][offset : offset + len(data)] = data


class NullTarget:
    """Lets go of every byte: for digests, checksums and comparisons alone."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Do nothing."""
