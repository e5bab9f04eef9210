"""Blocks of shared memory: the sender takes one per array and gets it back when the receiver has finished with it.

Only the sender allocates blocks, from its own list; one byte of shared memory per block records whether the receiver
still uses it. Returned blocks are reused, lowest first: writing fresh pages costs three times the copy.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from xrank.virtual.arrays import Bytes
from xrank.virtual.channels.segment import MAX_BLOCKS, Segment, make_no_space_error

_ALIGNMENT = 64
_FREE, _TAKEN = 0, 1


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a sender's arena; offsets are positions in the segment."""

    offset: int
    nbytes: int
    mark: int
    """Offset of the byte that records whether the block is in use."""


class BlockArena:
    """The sender's side: allocates blocks.

    Args:
        segment: the segment shared with the receivers.
        end: the owner of the arena; only its process creates a `BlockArena` for it.
    """

    def __init__(self, segment: Segment, end: int) -> None:
        self._segment = segment
        self._table = segment.table(end)
        self._start = self._fresh = self._top = segment.arena(end)
        self._end = self._start + segment.arena_nbytes
        self._marks = np.frombuffer(segment.data, np.uint8, MAX_BLOCKS, self._table)
        self._used: list[tuple[int, int] | None] = []
        """(start, end) of the block in each slot; None for an empty slot."""
        self._empty_slots: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Bounds of the returned ranges, by address; adjacent ranges are merged."""

    def take(self, nbytes: int) -> Block:
        """Allocate an unused block and mark it as in use.

        Raises:
            NoSpaceError: the rest of the arena is too small.
        """
        self._sweep()
        size = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        start = self._find_space(size)
        try:
            slot = self._empty_slots.pop() if self._empty_slots else self._add_slot(nbytes)
        except BaseException:
            self._give_back(start, start + size)
            raise
        self._used[slot] = (start, start + size)
        self._marks[slot] = _TAKEN
        return Block(start, nbytes, self._table + slot)

    def is_warm(self, end: int) -> bool:
        """Return whether all bytes below `end` have pages, so that a plain store cannot fault."""
        return end <= self._fresh

    def write(self, offset: int, content: memoryview) -> None:
        """Write bytes into a block.

        Raises:
            NoSpaceError: the system has no memory for them.
        """
        end = offset + len(content)
        if end <= self._fresh:
            self._segment.data[offset:end] = content
            return
        if offset > self._fresh:
            # The end of an earlier block was never written; a later block there must find pages.
            self._segment.write_fresh(self._fresh, memoryview(bytes(offset - self._fresh)))
        self._segment.write_fresh(offset, content)
        self._fresh = end

    @property
    def num_used(self) -> int:
        """Number of blocks in use, as of the last sweep."""
        return len(self._used) - len(self._empty_slots)

    def _add_slot(self, nbytes: int) -> int:
        slot = len(self._used)
        if slot == MAX_BLOCKS:
            raise make_no_space_error(nbytes)
        if slot % 4096 == 0:  # the table's next page
            self._segment.write_fresh(self._table + slot, memoryview(bytes(4096)))
        self._used.append(None)
        return slot

    def _find_space(self, size: int) -> int:
        # First fit by address keeps the used part of the arena small, so its pages stay warm.
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[i], self._ends[i]
                else:
                    self._starts[i] = start + size
                return start
        # Extend the free range at the top instead of leaving it behind as a gap.
        is_top_free = bool(self._ends) and self._ends[-1] == self._top
        start = self._starts[-1] if is_top_free else self._top
        if start + size > self._end:
            raise make_no_space_error(size)
        if is_top_free:
            del self._starts[-1], self._ends[-1]
        self._top = start + size
        return start

    def _sweep(self) -> None:
        if self.num_used == 0:
            # Receivers free blocks by a byte store, without a message, so the sender has to look for them.
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
    """Return a block's bytes; valid while the caller owns the block."""
    return np.frombuffer(segment.data, np.uint8, block.nbytes, block.offset)


def lend(segment: Segment, block: Block) -> Bytes:
    """Return a block's writable bytes on the receiver's side; the block is freed when their last view is gone.

    Arrays and tensors made of the bytes, and parts of them, are views. If this process forks meanwhile, the block is
    never freed: both processes have views, and neither knows when the other has dropped its own.
    """
    whole = view(segment, block)
    _Lease(segment.data, block.mark, whole)
    return whole


def free_block(segment: Segment, mark: int) -> None:
    """Mark a block as free."""
    segment.data[mark] = _FREE


class _Lease:
    def __init__(self, data: memoryview, mark: int, whole: Bytes) -> None:
        self._data, self._mark = data, mark
        self._end = weakref.ref(whole, self._free)
        _leases.add(self)

    def _free(self, whole: object) -> None:
        if _leases is not None and self in _leases:  # at interpreter exit, the module may be cleared already
            _leases.discard(self)
            self._data[self._mark] = _FREE


_leases: set[_Lease] = set()
"""The active leases: a weak reference's callback runs only while the reference itself is alive."""

# Before a fork: a child must not free a block that the parent still uses.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_leases.clear)
