"""Shared extents: on some file systems, a piece of an output shares the source's blocks on disk.

``FICLONERANGE`` (ioctl_ficlonerange(2)) makes a range of one file share another's blocks until either is written to.
XFS, btrfs and NFS 4.2 support it. Both ranges must be whole blocks, so a piece whose two places differ by a part of a
block is copied. The bytes are read in either case, for checksums and digests.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xrank.plan.buffers import FileSource, FileTarget, Source, Target

with contextlib.suppress(ImportError):  # Windows has no such module, and no request
    import fcntl

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_BLOCK_NBYTES = 4096
_SMALLEST_NBYTES = 64 << 10
"""Smallest shared piece; a shorter one is written faster than shared."""
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
    """Shares blocks of source and output if possible; any thread may call it.

    Args:
        source: reads the records.
        target: writes the output. Blocks are shared only if both are files.
    """

    def __init__(self, source: Source, target: Target) -> None:
        self._source, self._target = source, target
        # The request is Linux's; elsewhere its number may mean another.
        self._is_possible = (
            sys.platform == "linux" and isinstance(source, FileSource) and isinstance(target, FileTarget)
        )
        self._refused: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes that were shared and not written."""

    def share(self, file: int, first: int, nbytes: int, runs: Sequence[SharedRun]) -> Iterator[tuple[int, int]]:
        """Share as much of a window as possible; yield (start, stop) of its bytes that are still to be written.

        Args:
            file: the output file.
            first: the window's first byte in it.
            nbytes: bytes of the window.
            runs: unchanged bytes, by rising start.
        """
        done = 0
        for run in runs if self._is_possible else ():
            low = -(-(first + run.start) // _BLOCK_NBYTES) * _BLOCK_NBYTES - first
            high = (first + run.start + run.nbytes) // _BLOCK_NBYTES * _BLOCK_NBYTES - first
            if high - low < _SMALLEST_NBYTES or not self._clone(file, first, run, low, high):
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
