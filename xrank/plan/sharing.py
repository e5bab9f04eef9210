"""Shared extents: where a file system can, a piece of an output is the source's own bytes on disk, not a copy.

``FICLONERANGE`` (ioctl_ficlonerange(2)) makes a range of one file share another's blocks until either is written to.
XFS, btrfs and NFS 4.2 have it. Both ranges must begin at a block and be whole blocks, so a piece whose two places
differ by a part of a block is copied. The bytes are read all the same, for checksums and digests.
"""

from __future__ import annotations

import errno
import fcntl
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xrank.plan.buffers import FileSource, FileTarget, Source, Target

__all__ = ["Run", "SharedExtents"]

_FICLONERANGE = 0x4020940D  # linux/fs.h: _IOW(0x94, 13, struct file_clone_range)
_BLOCK_NBYTES = 4096
_SMALLEST_NBYTES = 64 << 10
"""A shorter piece is written sooner than shared."""
_NEVER = {errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EPERM, errno.EACCES}
_NOT_HERE = {errno.EINVAL, errno.ETXTBSY, errno.EISDIR}


class Run(NamedTuple):
    """Bytes of a window that stand in a record as they are."""

    start: int
    """First byte of the window."""
    nbytes: int
    record: int
    record_start: int
    """First byte of the record."""


class SharedExtents:
    """Tries to share what lies alike in source and output; any thread may call it.

    Args:
        source: where records are read.
        target: where the output is written. Anything but files on both sides shares nothing.
    """

    def __init__(self, source: Source, target: Target) -> None:
        self._source, self._target = source, target
        self._is_possible = isinstance(source, FileSource) and isinstance(target, FileTarget)
        self._refused: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self.nbytes = 0
        """Bytes that no new block was needed for."""

    def share(self, file: int, first: int, nbytes: int, runs: Sequence[Run]) -> Iterator[tuple[int, int]]:
        """Share what can be of a window; yield (start, stop) of its bytes that are still to be written.

        Args:
            file: the output file.
            first: the window's first byte in it.
            nbytes: of the window.
            runs: by rising start.
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

    def _clone(self, file: int, first: int, run: Run, low: int, high: int) -> bool:
        assert isinstance(self._source, FileSource) and isinstance(self._target, FileTarget)
        target = self._target.descriptors[file]
        with self._source.place(run.record) as (source_file, descriptor, offset):
            start = offset + run.record_start + low - run.start
            if start % _BLOCK_NBYTES or (source_file, file) in self._refused:
                return False
            request = struct.pack("<qQQQ", descriptor, start, high - low, first + low)
            try:
                fcntl.ioctl(target, _FICLONERANGE, request)
            except OSError as error:
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
