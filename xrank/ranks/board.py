"""The board: shared memory where each rank says how far it is, why it failed, and leaves one message for the first.

Each rank writes its own share alone, but for the alarm, which all set, and what the first rank has taken. A reader may
see a share while it is written: the words are single aligned numbers, which processors load and store whole, and a
failure record counts only when its checksum is right.
"""

from __future__ import annotations

import mmap
import os
import zlib
from struct import Struct

from xrank.ranks.failure import FailureRecord
from xrank.ranks.letter_box import BOX_NBYTES, LetterBox
from xrank.ranks.wire import Word

__all__ = ["Board"]

_PAGE_NBYTES = 4096
_SHARE_NBYTES = _PAGE_NBYTES + BOX_NBYTES
_WORD_NBYTES = 8
_SHARE_WORDS = _SHARE_NBYTES // _WORD_NBYTES
_ALARM = len(Word)
"""The word of the first share that says whether any rank has left a failure record."""
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
        """Return the descriptor of a new board: memory without a name, which ends with its last user."""
        fd = os.memfd_create("xrank-board", os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, num_ranks * _SHARE_NBYTES)
        return fd

    @staticmethod
    def index(position: int, word: Word) -> int:
        """Return where in `words` a word of a rank is, for who looks at it often."""
        return position * _SHARE_WORDS + word

    def box(self, position: int) -> LetterBox:
        """Return where a rank leaves messages for the first."""
        return LetterBox(self._memory, self.words, position * _SHARE_NBYTES + _PAGE_NBYTES)

    def say(self, position: int, word: Word, value: int) -> None:
        """Set a word of a rank."""
        self.words[self.index(position, word)] = value

    def heard(self, position: int, word: Word) -> int:
        """Return a word of a rank; 0 where it has said nothing."""
        return self.words[self.index(position, word)]

    def fail(self, position: int, record: FailureRecord) -> None:
        """Leave a failure record; the first one stays."""
        if self.failure(position) is not None:
            return
        content, at = record.to_bytes(), position * _SHARE_NBYTES + _RECORD
        self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + len(content)] = content
        _RECORD_HEAD.pack_into(self._memory, at, len(content), zlib.crc32(content))
        self.words[_ALARM] = 1

    @property
    def is_alarmed(self) -> bool:
        """Whether any rank has left a failure record."""
        return self.words[_ALARM] != 0

    def failure(self, position: int) -> FailureRecord | None:
        """Return a rank's failure record, if it left one."""
        at = position * _SHARE_NBYTES + _RECORD
        length, checksum = _RECORD_HEAD.unpack_from(self._memory, at)
        if not 0 < length <= _PAGE_NBYTES - _RECORD - _RECORD_HEAD.size:
            return None
        content = self._memory[at + _RECORD_HEAD.size : at + _RECORD_HEAD.size + length]
        return FailureRecord.from_bytes(content) if zlib.crc32(content) == checksum else None

    def close(self) -> None:
        """Let go of the memory."""
        self.words.release()
        self._memory.close()
