"""Sources and targets of the executor: ranges of files, or memory; blocks that files share on disk."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from xrank import system
from xrank.errors import AGAIN, ContradictionError, CorruptError, IncompleteError, NoSpaceError, XrankError, option
from xrank.layout.nest_table import IntArray
from xrank.layout.stored_model import LOST, SourceFile, StoredModel
from xrank.system import c_function

_SYNC_FILE_RANGE_WRITE = 2


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Begin to write a range of a file to its disk; errors are left to fsync."""
    function = c_function("sync_file_range")
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        function(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


_WRITEBACK_NBYTES = 8 << 20

SMALLEST_SHARED_NBYTES = 64 << 10
"""Smallest shared piece; a shorter one is written faster than shared."""
_SHORT_NBYTES = 16 << 10
"""Longest stretch of a file that is read together with its neighbors, and then copied to its place."""
_GAP_NBYTES = 4 << 10
"""Gaps up to this size between short stretches are read through."""
_WRITE_NBYTES = 128 << 10
"""Bytes of one write call to a disk. ext4 allocates a cache folio of that size. The largest folios (1 MiB) come from
idle memory, which the host of a virtual machine has taken back and returns at four times the cost."""


class Source(Protocol):
    """Records to read; called by many threads at once."""

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes [start, start + nbytes), in `staging` or as a view of the record's own memory."""


class OpenSource(Source, Protocol):
    """A source with open files or connections."""

    def check_unchanged(self) -> None:
        """Raise if the source has visibly changed since its metadata was read."""

    def close(self) -> None:
        """Release the source; no read may be under way."""


class Target(Protocol):
    """Output files to write to; called by many threads at once, never for the same bytes."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""


class PlacingTarget(Target, Protocol):
    """A target that has memory of its own for some files, in which windows are made: nothing is copied to it."""

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of each piece of the file's memory; 0: it has none."""

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return the memory for these bytes, which lie in one piece; wait until some is free."""

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Take what was put in the memory for these bytes."""


class Stretches(NamedTuple):
    """Bytes of records, each with a place in a window; columns of one length."""

    record: IntArray
    start: IntArray
    """First byte of the record."""
    place: IntArray
    """First byte of the window."""
    nbytes: IntArray


def read_stretches(source: Source, stretches: Stretches, window: memoryview, staging: memoryview) -> None:
    """Fill the places of stretches; neighbors in one file are read together, by way of the staging buffer."""
    if isinstance(source, FileSource):
        stretches = source.read_neighbors(stretches, window, staging)
    for record, start, place, nbytes in zip(*(column.tolist() for column in stretches), strict=True):
        source.read_into(record, start, window[place : place + nbytes])


class FileSource:
    """Reads the records of a stored model; keeps a bounded number of files open.

    Every method raises CorruptError for a file that is shorter than when its metadata was read, ContradictionError for
    a different one, and XrankError if the disk or the server fails.
    """

    def __init__(self, model: StoredModel) -> None:
        self._files = model.files
        self._records = model.records
        self._record_files = model.records.file.data  # whose numbers come faster than an array's
        self._record_offsets = model.records.offset.data
        self._open: OrderedDict[int, int] = OrderedDict()
        self._users: dict[int, int] = {}
        self._lock = threading.Lock()
        # A quarter of the limit: the process needs descriptors of its own.
        self._max_open = max(4, min(256, system.descriptor_limit() // 4))

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        self._read(self._record_files[record], self._record_offsets[record] + start, into)

    def _read(self, file: int, offset: int, into: memoryview) -> None:
        path, fd = self._files[file].path, self._take(file)
        try:
            while into:
                try:
                    n = system.read_at(fd, into, offset)
                except OSError as error:  # the error has no path, and the caller would add the target's
                    raise XrankError(
                        f"{path} cannot be read at byte {offset:,}: {error.strerror}",
                        file=path,
                        got=errno.errorcode.get(error.errno or 0),
                        next_step=f"check the disk or the server; then {AGAIN}, which resumes from the finished files",
                    ) from error
                if n == 0:
                    raise CorruptError(
                        f"{path} ends before byte {offset:,}",
                        file=path,
                        got=f"{os.fstat(fd).st_size:,} bytes",
                        want=f"{self._files[file].nbytes:,} bytes, as when it was opened",
                        next_step=f"nothing may write to the source during a gather; {AGAIN}",
                    )
                into, offset = into[n:], offset + n
        finally:
            self._leave(file)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Read into the staging buffer and return the part that was filled."""
        data = staging[:nbytes]
        self.read_into(record, start, data)
        return data

    def read_neighbors(self, stretches: Stretches, window: memoryview, staging: memoryview) -> Stretches:
        """Read short stretches that lie close together in a file; return the others."""
        longest = min(_SHORT_NBYTES, len(staging) // 2)
        file, offset = self._records.file[stretches.record], self._records.offset[stretches.record] + stretches.start
        order = np.lexsort((offset, file))
        order = order[stretches.nbytes[order] <= longest]
        file, offset, place, nbytes = (each[order] for each in (file, offset, stretches.place, stretches.nbytes))
        ends, stops = offset + nbytes, place + nbytes
        is_apart = (file[1:] != file[:-1]) | (offset[1:] - ends[:-1] > _GAP_NBYTES)
        is_left = np.ones(len(stretches.record), np.bool_)
        for first, last in pairwise([0, *(np.flatnonzero(is_apart) + 1).tolist(), len(order)]):
            while last - first > 1:
                # Whatever begins before the limit ends in the staging buffer.
                limit = offset[first] + len(staging) - longest
                run = slice(first, first + int(np.searchsorted(offset[first:last], limit, "right")))
                data = staging[: int(ends[run].max() - offset[first])]
                # An error comes again, and names the record, when these are read one by one.
                with suppress(XrankError):
                    self._read(int(file[first]), int(offset[first]), data)
                    columns = (place[run], stops[run], offset[run] - offset[first], ends[run] - offset[first])
                    for low, high, a, b in zip(*(column.tolist() for column in columns), strict=True):
                        window[low:high] = data[a:b]
                    is_left[order[run]] = False
                first = run.stop
        return Stretches(*(column[is_left] for column in stretches))

    @contextmanager
    def place(self, record: int) -> Iterator[tuple[int, int, int]]:
        """Yield the index of a record's file, the file's descriptor, and the record's first byte in it."""
        file = self._record_files[record]
        try:
            yield file, self._take(file), self._record_offsets[record]
        finally:
            self._leave(file)

    def _take(self, file: int) -> int:
        """Return the descriptor of a file, which stays open until `_leave`."""
        with self._lock:
            fd = self._open.get(file)
            if fd is None:
                fd = self._open[file] = _open_checked(self._files[file])
                # Least recently used first; the new file is the last. Files that a thread reads now stay open, so the
                # limit may be exceeded for a moment.
                for other in list(self._open)[: max(0, len(self._open) - self._max_open)]:
                    if other != file and not self._users.get(other):
                        system.close_read(self._open.pop(other))
            else:
                self._open.move_to_end(file)
            self._users[file] = self._users.get(file, 0) + 1
            return fd

    def _leave(self, file: int) -> None:
        with self._lock:
            self._users[file] -= 1

    def check_unchanged(self) -> None:
        """Compare size, inode and time of every file with those at the reading of its metadata."""
        for file in self._files:
            if file.in_store is not None or file.nbytes == LOST:
                continue
            try:
                status = os.stat(file.path)
            except FileNotFoundError:
                status = None
            if status is None or SourceFile.from_status(file.path, status) != file:
                raise make_change_error(file)

    def close(self) -> None:
        """Close all files; no read may be under way."""
        with self._lock:
            for fd in self._open.values():
                system.close_read(fd)
            self._open.clear()


def _open_checked(file: SourceFile) -> int:
    try:
        fd = os.open(file.path, system.READ)
    except FileNotFoundError:
        what = f"{file.path} has disappeared since its metadata was read"
        next_step = f"keep the source in its place while it is read, then {AGAIN}"
        raise IncompleteError(what, file=file.path, next_step=next_step) from None
    # The descriptor's status, not the path's: the path may name another file by now.
    if SourceFile.from_status(file.path, os.fstat(fd)) != file:
        system.close_read(fd)
        raise make_change_error(file)
    return fd


def make_change_error(file: SourceFile) -> ContradictionError:
    """Return the error for a file or an object that is not the one whose metadata was read."""
    return ContradictionError(
        f"{file.path} changed while it was being read",
        file=file.path,
        got="a different size, modification time or inode" if file.in_store is None else "a different size or version",
        want=f"{file.nbytes:,} bytes, as when its metadata was read",
        next_step=f"let the ranks finish writing, then {AGAIN}",
    )


class FileTarget:
    """Writes to file descriptors by index of the output file, which the caller opens, sizes and syncs."""

    def __init__(self, descriptors: dict[int, int], *, in_memory: bool = False) -> None:
        self.descriptors = descriptors
        self.in_memory = in_memory  # on tmpfs pages are small anyway, and fewer calls are faster

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        fd = self.descriptors[file]
        while data:
            n = system.write_at(fd, data if self.in_memory else data[:_WRITE_NBYTES], offset)
            data, offset = data[n:], offset + n
        # Windows come nearly in order: when one ends a stretch, the stretch before it is complete.
        if offset % _WRITEBACK_NBYTES == 0 and not self.in_memory:
            start_writeback(fd, max(0, offset - 2 * _WRITEBACK_NBYTES), _WRITEBACK_NBYTES)


class MemoryTarget:
    """Writes to views of memory, one for each output file; see `PlacingTarget`."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view.cast("B") for view in views]

    def part_nbytes(self, file: int) -> int:
        """Return the bytes of a view."""
        return len(self._views[file])

    def place(self, file: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of a view."""
        return self._views[file][offset : offset + nbytes]

    def placed(self, file: int, offset: int, nbytes: int) -> None:
        """Do nothing: the bytes are in the view."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Put bytes at `offset` of that output file."""
        self._views[file][offset : offset + len(data)] = data


class NullTarget:
    """Discards every byte: for digests, checksums and comparisons alone."""

    def write(self, file: int, offset: int, data: memoryview) -> None:
        """Do nothing."""


def take_memory(nbytes: int, what: str) -> memoryview:
    """Return page-aligned zeros, which go back to the system as soon as they are freed, or raise NoSpaceError."""
    try:
        return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]
    except (MemoryError, OSError) as error:
        raise NoSpaceError(
            f"not enough memory for {what}",
            got=str(error) or type(error).__name__,
            want=f"{nbytes:,} bytes",
            next_step=f"give a smaller {option('max_memory')} or fewer {option('workers')}, or free memory; {AGAIN}",
            needed_nbytes=nbytes,
        ) from error


with suppress(ImportError):  # Windows has no such module, and no request
    import fcntl

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_BLOCK_NBYTES = 4096
_NEVER = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.EACCES}
_NOT_HERE = {errno.EINVAL, errno.ETXTBSY, errno.EISDIR}


class SharedRun(NamedTuple):
    """Bytes of a window that a record contains unchanged."""

    start: int
    """First byte of the window."""
    nbytes: int
    record: int
    record_start: int
    """First byte of the record."""


class SharedExtents:
    """Shares blocks of source and output, if both are files; any thread may call it."""

    def __init__(self, source: Source, target: Target) -> None:
        self._source, self._target = source, target
        # The request is Linux's; elsewhere its number may mean another.
        are_files = isinstance(source, FileSource) and isinstance(target, FileTarget)
        self._is_possible = sys.platform == "linux" and are_files
        self._refused: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes that were shared and not written."""

    def share(self, file: int, first: int, nbytes: int, runs: Sequence[SharedRun]) -> Iterator[tuple[int, int]]:
        """Share blocks of a window from the file's byte `first` on; yield (start, stop) of the bytes still to write."""
        done = 0
        for run in runs if self._is_possible else ():
            low = -(-(first + run.start) // _BLOCK_NBYTES) * _BLOCK_NBYTES - first
            high = (first + run.start + run.nbytes) // _BLOCK_NBYTES * _BLOCK_NBYTES - first
            if high - low < SMALLEST_SHARED_NBYTES or not self._clone(file, first, run, low, high):
                continue
            if low > done:
                yield done, low
            done = high
        if done < nbytes:
            yield done, nbytes

    def _clone(self, file: int, first: int, run: SharedRun, low: int, high: int) -> bool:
        assert isinstance(self._source, FileSource) and isinstance(self._target, FileTarget)
        target = self._target.descriptors[file]
        with self._source.place(run.record) as (source_file, descriptor, offset):
            start = offset + run.record_start + low - run.start
            # `low` is at a block of the output; only if the source is at one as well, the blocks can be shared.
            if start % _BLOCK_NBYTES or (source_file, file) in self._refused:
                return False
            request = struct.pack("<qQQQ", descriptor, start, high - low, first + low)
            try:
                fcntl.ioctl(target, _FICLONERANGE, request)
            except OSError as error:
                # Some refusals hold for the whole file system, some for this pair of files: do not ask again.
                if error.errno in _NEVER:
                    self._is_possible = False
                elif error.errno in _NOT_HERE:
                    self._refused.add((source_file, file))
                else:
                    raise
                return False
        with self._lock:
            self.nbytes += high - low
        return True


def shares_blocks(source: int, target: int, nbytes: int) -> bool:
    """Let one file share the first bytes of another, both by descriptors; return whether the file system can."""
    if sys.platform != "linux":
        return False
    try:
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("<qQQQ", source, 0, nbytes, 0))
    except OSError:
        return False
    return True
