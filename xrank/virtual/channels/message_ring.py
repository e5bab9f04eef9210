"""Rings: ordered records from one process to another through shared memory; a send never waits.

A ring is a chain of chunks, which are blocks of the sender's arena. A record begins with its publish word: its length,
stored last; 0 before it is sent; `_ELSEWHERE` if the ring continues in the next chunk, whose address is the
first word of this chunk. A full chunk gets a successor and the reader frees the full one, so a sender never waits for
room, and two devices may both send any amount before either receives.

The ring's head contains the offset of the first chunk and the number of records sent.
"""

from __future__ import annotations

from xrank.virtual.channels.block_arena import BlockArena, free_block
from xrank.virtual.channels.segment import Segment

_CHUNK_NBYTES = 32 << 10
_ELSEWHERE = -1
_WORD = 8
_NEXT, _MARK, _NUM_WORDS = range(3)
"""The words at the beginning of a chunk."""


class RingWriter:
    """The sender's side.

    Args:
        segment: the segment shared with the reader.
        head: offset of the ring's head in the segment.
        arena: the sender's arena, for chunks.
    """

    def __init__(self, segment: Segment, head: int, arena: BlockArena) -> None:
        self._segment, self._arena = segment, arena
        self._head = head // _WORD
        self._chunk = self._position = self._end = 0
        self._num_sent = 0

    def push(self, record: bytes) -> None:
        """Send a non-empty record.

        Raises:
            NoSpaceError: the system has no memory for it.
        """
        words = self._segment.words
        step = _step(len(record))
        # Room for one more publish word: it stops the reader behind this record, or sends it to the next chunk.
        if self._position + step + _WORD > self._end:
            self._begin_chunk(step)
        position = self._position
        self._segment.data[position + _WORD : position + _WORD + len(record)] = record
        self._position = position + step
        words[self._position // _WORD] = 0
        # The order of these stores is the protocol: the record's bytes, then an empty publish word behind it, then its
        # own publish word. A reader that sees the length sees the bytes too, and stops at the empty word.
        self._num_sent += 1
        words[self._head + 1] = self._num_sent
        words[position // _WORD] = len(record)

    def _begin_chunk(self, step: int) -> None:
        words = self._segment.words
        nbytes = max(_CHUNK_NBYTES, (_NUM_WORDS + 1) * _WORD + step)
        block = self._arena.take(nbytes)
        # The words below are stored through the mapping, where a missing page may be a SIGBUS.
        if not self._arena.is_warm(block.offset + nbytes):
            self._arena.write(block.offset, memoryview(bytes(nbytes)))
        first = block.offset // _WORD
        words[first + _NEXT] = 0
        words[first + _MARK] = block.mark
        words[first + _NUM_WORDS] = 0
        if self._chunk:
            # Link the chunk before `_ELSEWHERE` sends the reader to it.
            words[self._chunk // _WORD + _NEXT] = block.offset
            words[self._position // _WORD] = _ELSEWHERE
        else:
            words[self._head] = block.offset
        self._chunk, self._end = block.offset, block.offset + nbytes
        self._position = block.offset + _NUM_WORDS * _WORD


class RingReader:
    """The receiver's side; `num_taken` counts the received records.

    Args:
        segment: the segment shared with the sender.
        head: offset of the ring's head in the segment.
    """

    def __init__(self, segment: Segment, head: int) -> None:
        self._segment = segment
        self._head = head // _WORD
        self._chunk = self._position = 0
        self.num_taken = 0

    @property
    def has_record(self) -> bool:
        """Whether `pop` would return a record."""
        return bool(self._segment.words[self._position // _WORD if self._chunk else self._head])

    def pop(self) -> bytes | None:
        """Return the next record; None if it was not sent yet."""
        words = self._segment.words
        if not self._chunk and not self._enter(words[self._head]):
            return None
        length = words[self._position // _WORD]
        if length == _ELSEWHERE:
            first = self._chunk // _WORD
            mark = words[first + _MARK]
            self._enter(words[first + _NEXT])
            # Leave the chunk before freeing it: the sender may reuse it at once.
            free_block(self._segment, mark)
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
    """Return the number of records sent through a ring; any process may call this."""
    return segment.words[head // _WORD + 1]


def _step(nbytes: int) -> int:
    return _WORD + -(-nbytes // _WORD) * _WORD
