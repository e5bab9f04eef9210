"""Blocks of shared memory: an end takes one for each array that it sends, and has it back when its reader is done.

Only the sender gives out blocks, from a list of its own; a byte of shared memory for each block says whether its reader
still needs it. Blocks that came back are used again, the lowest first: fresh pages cost three times the copy.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from xrank.virtual.arrays import Bytes
from xrank.virtual.channels.segment import MAX_BLOCKS, Segment, no_space

__all__ = ["Block", "BlockArena", "give_back", "lend", "view"]

_ALIGNMENT = 64
_FREE, _TAKEN = 0, 1


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a sender's arena; offsets are in the segment."""

    offset: int
    nbytes: int
    mark: int
    """Where the byte lies that says whether it is in use."""


class BlockArena:
    """The sender's side: gives out blocks.

    Args:
        segment: shared with the readers.
        end: whose arena it is; one process alone makes it.
    """

    def __init__(self, segment: Segment, end: int) -> None:
        self._segment = segment
        self._table = segment.table(end)
        self._start = self._fresh = self._top = segment.arena(end)
        self._end = self._start + segment.arena_nbytes
        self._marks = np.frombuffer(segment.data, np.uint8, MAX_BLOCKS, self._table)
        self._used: list[tuple[int, int] | None] = []
        """(start, end) of the block in each slot, None for a slot without one."""
        self._empty_slots: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Of what came back, by address, neighbours joined."""

    def take(self, nbytes: int) -> Block:
        """Return a block that nobody uses, marked as in use.

        Raises:
            NoSpaceError: all that could be had is in use.
        """
        self._sweep()
        size = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        slot = self._empty_slots.pop() if self._empty_slots else len(self._used)
        if slot == MAX_BLOCKS:
            raise no_space(nbytes)
        start = self._found(size)
        if slot == len(self._used):
            self._used.append(None)
            if slot % 4096 == 0:  # the table's next page
                self._segment.write_fresh(self._table + slot, memoryview(bytes(4096)))
        self._used[slot] = (start, start + size)
        self._marks[slot] = _TAKEN
        return Block(start, nbytes, self._table + slot)

    def is_warm(self, end: int) -> bool:
        """Whether there are pages under all below `end`, so that a store finds them."""
        return end <= self._fresh

    def write(self, offset: int, content: memoryview) -> None:
        """Put bytes into a block.

        Raises:
            NoSpaceError: the system has no memory for them.
        """
        end = offset + len(content)
        if end <= self._fresh:
            self._segment.data[offset:end] = content
            return
        if offset > self._fresh:
            # The end of a block that was not filled: whoever takes it later must find pages there.
            self._segment.write_fresh(self._fresh, memoryview(bytes(offset - self._fresh)))
        self._segment.write_fresh(offset, content)
        self._fresh = end

    @property
    def num_used(self) -> int:
        """How many blocks are in use, as far as is known without a sweep."""
        return len(self._used) - len(self._empty_slots)

    def _found(self, size: int) -> int:
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[i], self._ends[i]
                else:
                    self._starts[i] = start + size
                return start
        if self._ends and self._ends[-1] == self._top:
            start = self._starts.pop()
            self._ends.pop()
        else:
            start = self._top
        if start + size > self._end:
            raise no_space(size)
        self._top = start + size
        return start

    def _sweep(self) -> None:
        if self.num_used == 0:
            return
        for slot in np.flatnonzero(self._marks[: len(self._used)] == _FREE).tolist():
            block = self._used[slot]
            if block is not None:
                self._used[slot] = None
                self._empty_slots.append(slot)
                self._give_back(*block)

    def _give_back(self, start: int, end: int) -> None:
        i = bisect_left(self._starts, start)
        joins_left = i > 0 and self._ends[i - 1] == start
        joins_right = i < len(self._starts) and self._starts[i] == end
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends.pop(i)
            del self._starts[i]
        elif joins_left:
            self._ends[i - 1] = end
        elif joins_right:
            self._starts[i] = start
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)


def view(segment: Segment, block: Block) -> Bytes:
    """Return a block's bytes, as long as it is the caller's."""
    return np.frombuffer(segment.data, np.uint8, block.nbytes, block.offset)


def lend(segment: Segment, block: Block) -> Bytes:
    """Return a block's bytes, writable, on the reader's side; the sender has it back when the last view is gone.

    What is made of them (an array, a tensor, a part of either) holds them. When this process forks meanwhile, the
    sender never has the block back: two processes hold it then, and neither knows when the other has dropped it.
    """
    whole = view(segment, block)
    _Lease(segment.data, block.mark, whole)
    return whole


def give_back(segment: Segment, mark: int) -> None:
    """Say that the reader needs a block no more."""
    segment.data[mark] = _FREE


class _Lease:
    def __init__(self, data: memoryview, mark: int, whole: Bytes) -> None:
        self._data, self._mark = data, mark
        self._end = weakref.ref(whole, self._ended)
        _leases.add(self)

    def _ended(self, whole: object) -> None:
        if _leases is not None and self in _leases:  # the interpreter may be ending, and its modules before it
            _leases.discard(self)
            self._data[self._mark] = _FREE


_leases: set[_Lease] = set()
"""Those that are not over: a reference that nobody holds would not be called."""

os.register_at_fork(before=_leases.clear)
