"""The board: shared memory with each rank's status, failure record and one message for the first rank.

Each rank writes only its own share, except for the alarm, which all set, and the first rank's count of taken messages.
A reader may see a share while it is written: a status is a single aligned number, which processors load and store
whole, and a failure record counts only when its checksum is right.
"""

from __future__ import annotations

import mmap
import os
import zlib
from struct import Struct

from xrank.ranks.failure import FailureRecord
from xrank.ranks.letter_box import BOX_NBYTES, LetterBox
from xrank.ranks.wire import Status

_PAGE_NBYTES = 4096
_SHARE_NBYTES = _PAGE_NBYTES + BOX_NBYTES
_WORD_NBYTES = 8
_SHARE_WORDS = _SHARE_NBYTES // _WORD_NBYTES
_ALARM = len(Status)
"""Index of the alarm in the first share: not 0 once any rank has written a failure record."""
_RECORD_HEAD = Struct("<II")  # length, CRC-32
_RECORD = 64


class Board:
    """The shares of all ranks of a circle, by position in its rank list."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(fd, num_ranks * _SHARE_NBYTES)
        self._num_ranks = num_ranks
        # Not struct.Struct("<q"), which loads and stores byte by byte.
        self.words = memoryview(self._memory).cast("q")

    @staticmethod
    def create(num_ranks: int) -> int:
        """Return the descriptor of a new board: unnamed memory, which the kernel frees after its last user."""
        fd = os.memfd_create("xrank-board", os.MFD_CLOEXEC)
        # All pages now: if memory is short, this raises; a later store through the mapping would be a SIGBUS.
        os.posix_fallocate(fd, 0, num_ranks * _SHARE_NBYTES)
        return fd

    @staticmethod
    def index(position: int, status: Status) -> int:
        """Return the index of a rank's status in `words`, for callers that read it often."""
        return position * _SHARE_WORDS + status

    def box(self, position: int) -> LetterBox:
        """Return the letter box of a rank, for its messages to the first."""
        return LetterBox(self._memory, self.words, position * _SHARE_NBYTES + _PAGE_NBYTES)

    def set_status(self, position: int, status: Status, value: int) -> None:
        """Set a status of a rank."""
        self.words[self.index(position, status)] = value

    def get_status(self, position: int, status: Status) -> int:
        """Return a status of a rank; 0 before it was set."""
        return self.words[self.index(position, status)]

    def fail(self, position: int, record: FailureRecord) -> None:
        """Write a rank's failure record, unless it has one."""
        if self.failure(position) is not None:
            return
        content, at = record.to_bytes(), position * _SHARE_NBYTES + _RECORD
        self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + len(content)] = content
        # Content, head, alarm, in this order: a reader that sees the alarm too early finds a wrong checksum, not a
        # wrong record.
        _RECORD_HEAD.pack_into(self._memory, at, len(content), zlib.crc32(content))
        self.words[_ALARM] = 1

    @property
    def is_alarmed(self) -> bool:
        """Whether any rank has written a failure record."""
        return self.words[_ALARM] != 0

    def failure(self, position: int) -> FailureRecord | None:
        """Return a rank's failure record, if it has one."""
        at = position * _SHARE_NBYTES + _RECORD
        length, checksum = _RECORD_HEAD.unpack_from(self._memory, at)
        if not 0 < length <= _PAGE_NBYTES - _RECORD - _RECORD_HEAD.size:
            return None
        content = self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + length]
        return FailureRecord.from_bytes(content) if zlib.crc32(content) == checksum else None

    def close(self) -> None:
        """Release the memory."""
        self.words.release()
        self._memory.close()
