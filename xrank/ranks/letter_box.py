"""The letter box: memory where a rank leaves the first a message, without a system call on either side.

It holds one message at a time. Messages have numbers, whichever way they go, so that the first takes them in their
order: one that finds the box full, or does not fit, goes another way, and so do all after it until the first has taken
them. A word says which message lies in the box, and one, which the first sets, how many it has taken. Where processors
may see stores in another order, no message lies in a box.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from xrank.ranks.store_order import STORES_ARE_ORDERED

__all__ = ["BOX_NBYTES", "LetterBox"]

BOX_NBYTES = 40 << 10
"""Of a box with its words: whole pages."""
_WORD_NBYTES = 8
_POSTED, _TAKEN, _NBYTES = range(3)
_CONTENT = 64
_CAPACITY = BOX_NBYTES - _CONTENT


class LetterBox:
    """One rank's box, as it or the first rank sees it.

    Args:
        memory: shared.
        words: the same, as numbers.
        start: of the box, in bytes.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview, start: int) -> None:
        self._memory, self._words = memory, words
        self._start = start + _CONTENT
        self._word = start // _WORD_NBYTES

    def put(self, number: int, parts: Sequence[bytes], nbytes: int) -> bool:
        """Leave a message, which is all of `parts`, if the first has taken all before it; say whether it is left."""
        words, word = self._words, self._word
        if words[word + _TAKEN] != number - 1 or nbytes > _CAPACITY or not STORES_ARE_ORDERED:
            return False
        at = self._start
        for part in parts:
            end = at + len(part)
            self._memory[at:end] = part
            at = end
        words[word + _NBYTES] = nbytes
        words[word + _POSTED] = number
        return True

    def take(self, number: int) -> bytes | None:
        """Return the message of that number, if it lies here; the box can then be used again."""
        words, word = self._words, self._word
        if words[word + _POSTED] != number:
            return None
        content = self._memory[self._start : self._start + words[word + _NBYTES]]
        words[word + _TAKEN] = number
        return content

    def took(self, number: int) -> None:
        """Say, as the first rank, that the message of that number came another way."""
        self._words[self._word + _TAKEN] = number
