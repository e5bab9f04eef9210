"""Rings: records from one process to another, in order, through shared memory; a send never waits.

A ring is a chain of chunks, blocks of the sender's arena. A record begins with its publish word: its length, written
last; 0 where nothing was sent yet; `_ELSEWHERE` where the sender went on in the next chunk, which the chunk's own first
word tells. Nobody waits for room: a chunk that is full gets a successor, and the reader gives the full one back. So
two devices may send to each other as much as they like before either receives.

The ring's head tells where the first chunk lies, and how many records were sent.
"""

from __future__ import annotations

from xrank.virtual.channels.block_arena import BlockArena, give_back
from xrank.virtual.channels.segment import Segment

__all__ = ["RingReader", "RingWriter", "num_sent"]

_CHUNK_NBYTES = 32 << 10
_ELSEWHERE = -1
_WORD = 8
_NEXT, _MARK, _NUM_WORDS = range(3)
"""The words that begin a chunk."""


class RingWriter:
    """The sender's side.

    Args:
        segment: shared with the reader.
        head: of the ring, in the segment.
        arena: of the sender, for chunks.
    """

    def __init__(self, segment: Segment, head: int, arena: BlockArena) -> None:
        self._segment, self._arena = segment, arena
        self._head = head // _WORD
        self._chunk = self._position = self._end = 0
        self._num_sent = 0

    def push(self, record: bytes) -> None:
        """Send a record, not empty.

        Raises:
            NoSpaceError: the system has no memory for it.
        """
        words = self._segment.words
        step = _step(len(record))
        if self._position + step + _WORD > self._end:
            self._begin_chunk(step)
        position = self._position
        self._segment.data[position + _WORD : position + _WORD + len(record)] = record
        self._position = position + step
        words[self._position // _WORD] = 0
        self._num_sent += 1
        words[self._head + 1] = self._num_sent
        words[position // _WORD] = len(record)

    def _begin_chunk(self, step: int) -> None:
        words = self._segment.words
        nbytes = max(_CHUNK_NBYTES, (_NUM_WORDS + 1) * _WORD + step)
        block = self._arena.take(nbytes)
        if not self._arena.is_warm(block.offset + nbytes):
            self._arena.write(block.offset, memoryview(bytes(nbytes)))
        first = block.offset // _WORD
        words[first + _NEXT] = 0
        words[first + _MARK] = block.mark
        words[first + _NUM_WORDS] = 0
        if self._chunk:
            words[self._chunk // _WORD + _NEXT] = block.offset
            words[self._position // _WORD] = _ELSEWHERE
        else:
            words[self._head] = block.offset
        self._chunk, self._end = block.offset, block.offset + nbytes
        self._position = block.offset + _NUM_WORDS * _WORD


class RingReader:
    """The receiver's side; `num_taken` counts its records.

    Args:
        segment: shared with the sender.
        head: of the ring, in the segment.
    """

    def __init__(self, segment: Segment, head: int) -> None:
        self._segment = segment
        self._head = head // _WORD
        self._chunk = self._position = 0
        self.num_taken = 0

    @property
    def has_record(self) -> bool:
        """Whether `pop` has something to return."""
        return bool(self._segment.words[self._position // _WORD if self._chunk else self._head])

    def pop(self) -> bytes | None:
        """Return the next record, or None where there is none yet."""
        words = self._segment.words
        if not self._chunk and not self._enter(words[self._head]):
            return None
        length = words[self._position // _WORD]
        if length == _ELSEWHERE:
            first = self._chunk // _WORD
            mark = words[first + _MARK]
            self._enter(words[first + _NEXT])
            give_back(self._segment, mark)
            length = words[self._position // _WORD]
        if not length:
            return None
        start = self._position + _WORD
        record = bytes(self._segment.data[start : start + length])
        self._position += _step(length)
        self.num_taken += 1
        return record

    def _enter(self, chunk: int) -> bool:
        self._chunk = chunk
        self._position = chunk + _NUM_WORDS * _WORD
        return bool(chunk)


def num_sent(segment: Segment, head: int) -> int:
    """Return how many records were sent through a ring, as any process sees it."""
    return segment.words[head // _WORD + 1]


def _step(nbytes: int) -> int:
    return _WORD + -(-nbytes // _WORD) * _WORD
