"""The board: a page of shared memory for each rank, where it says how far it is, and why it failed.

Each rank writes its own page alone. A reader may see a page while it is written: the words are single aligned numbers,
and a failure record counts only when its checksum is right.
"""

from __future__ import annotations

import mmap
import os
import zlib
from struct import Struct

from xrank.ranks.failure import FailureRecord
from xrank.ranks.wire import Word

__all__ = ["Board"]

_PAGE_NBYTES = 4096
_WORD = Struct("<q")
_RECORD_HEAD = Struct("<II")  # length, CRC-32
_RECORD = 64


class Board:
    """The pages of all ranks of a circle, by position in its rank list."""

    def __init__(self, fd: int, num_ranks: int) -> None:
        self._memory = mmap.mmap(fd, num_ranks * _PAGE_NBYTES)

    @staticmethod
    def create(num_ranks: int) -> int:
        """Return the descriptor of a new board: memory without a name, which ends with its last user."""
        fd = os.memfd_create("xrank-board", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, num_ranks * _PAGE_NBYTES)
        return fd

    def say(self, position: int, word: Word, value: int) -> None:
        """Set a word of a rank."""
        _WORD.pack_into(self._memory, position * _PAGE_NBYTES + _WORD.size * word, value)

    def heard(self, position: int, word: Word) -> int:
        """Return a word of a rank; 0 where it has said nothing."""
        value: int = _WORD.unpack_from(self._memory, position * _PAGE_NBYTES + _WORD.size * word)[0]
        return value

    def fail(self, position: int, record: FailureRecord) -> None:
        """Leave a failure record; the first one stays."""
        if self.failure(position) is not None:
            return
        content, at = record.to_bytes(), position * _PAGE_NBYTES + _RECORD
        self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + len(content)] = content
        _RECORD_HEAD.pack_into(self._memory, at, len(content), zlib.crc32(content))

    def failure(self, position: int) -> FailureRecord | None:
        """Return a rank's failure record, if it left one."""
        at = position * _PAGE_NBYTES + _RECORD
        length, checksum = _RECORD_HEAD.unpack_from(self._memory, at)
        if not 0 < length <= _PAGE_NBYTES - _RECORD - _RECORD_HEAD.size:
            return None
        content = self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + length]
        return FailureRecord.from_bytes(content) if zlib.crc32(content) == checksum else None

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
