"""The letter box: shared memory for messages to the first rank, without a system call on either side.

A box contains one message at a time. Messages are numbered whether they go through the box or the link, so that the
first rank takes them in order: a message that finds the box full, or does not fit, goes through the link, and so do all
after it until the first rank has taken them. One number in the box is that of its message; another, which the first
rank sets, counts the messages it has taken. Processors that may reorder stores do not use boxes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from xrank.ranks.store_order import STORES_ARE_ORDERED

BOX_NBYTES = 40 << 10
"""Bytes of a box with its numbers: whole pages."""
_WORD_NBYTES = 8
_POSTED, _TAKEN, _NBYTES = range(3)
_CONTENT = 64
_CAPACITY = BOX_NBYTES - _CONTENT


class LetterBox:
    """One rank's box, as it or the first rank sees it.

    Args:
        memory: shared memory.
        words: the same memory as 8-byte numbers.
        start: first byte of the box.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview, start: int) -> None:
        self._memory, self._words = memory, words
        self._start = start + _CONTENT
        self._word = start // _WORD_NBYTES

    def put(self, number: int, parts: Sequence[bytes], nbytes: int) -> bool:
        """Put a message, the concatenation of `parts`, if all before it were taken; return whether it was put."""
        words, word = self._words, self._word
        if words[word + _TAKEN] != number - 1 or nbytes > _CAPACITY or not STORES_ARE_ORDERED:
            return False
        at = self._start
        for part in parts:
            end = at + len(part)
            self._memory[at:end] = part
            at = end
        words[word + _NBYTES] = nbytes
        words[word + _POSTED] = number  # last: the first rank reads the box once it sees the number
        return True

    def take(self, number: int) -> bytes | None:
        """Return the message of that number if it is here, and free the box."""
        words, word = self._words, self._word
        if words[word + _POSTED] != number:
            return None
        content = self._memory[self._start : self._start + words[word + _NBYTES]]
        # After the copy: the sender may fill the box again at once.
        words[word + _TAKEN] = number
        return content

    def skip(self, number: int) -> None:
        """On the first rank: count the message of that number, which came through the link, as taken."""
        self._words[self._word + _TAKEN] = number
