"""The memory that a cluster's processes share: one anonymous file, created before they are forked.

The file is sparse: its size allows for everything that any end could send, but only written pages take memory.

    the board     the current wait of each end
    the rings     a head for each ordered pair of ends
    the tables    which blocks of an end are in use
    the arenas    an end's blocks: rings and arrays

An *end* is a device, numbered by its place in the mesh, or the host, which has the last number. Words are loaded and
stored atomically, and other processes see stores in program order, as x86-64 guarantees (`xrank.ranks.store_order`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import select
import struct
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from xrank.dtypes import DTYPES
from xrank.errors import NoSpaceError, UsageError
from xrank.ranks.store_order import STORES_ARE_ORDERED
from xrank.virtual.arrays import (
    Array,
    ArrayKind,
    ArraySpec,
    Bytes,
    bytes_of,
    from_bytes,
    kind_of,
    pack_object,
    spec_of,
    unpack_object,
)
from xrank.virtual.channels import HOST, Heading, VirtualChannel
from xrank.workspace.arena import new_buffer

BOARD_NBYTES = 128
"""Bytes of the board per end."""
HEAD_NBYTES = 16
"""Bytes of a ring's head."""
MAX_BLOCKS = 1 << 20
"""Blocks of one end's arena in use at once."""
_MAX_NBYTES = 1 << 45
"""Addresses that a segment may take: a quarter of a process' address space."""
_MIN_ARENA_NBYTES = 64 << 20
_PAGE_NBYTES = mmap.PAGESIZE


class Segment:
    """The shared file, mapped into memory.

    Args:
        num_ends: number of devices plus 1 for the host.

    Raises:
        UsageError: this system lacks such files or enough addresses, or its processors may show stores out of order.
    """

    def __init__(self, num_ends: int) -> None:
        if not hasattr(os, "memfd_create") or not hasattr(os, "eventfd") or not hasattr(os, "pidfd_open"):
            raise UsageError(
                "devices as processes need a kind of shared memory that only Linux has",
                next_step='give engine="in-process"',
            )
        if not STORES_ARE_ORDERED:
            raise UsageError(
                "devices as processes may see a message on these processors before its bytes are there",
                got=os.uname().machine,
                want="x86-64",
                next_step='give engine="in-process"',
            )
        self.num_ends = num_ends
        self._rings = _round_up(num_ends * BOARD_NBYTES)
        self._tables = self._rings + _round_up(num_ends * num_ends * HEAD_NBYTES)
        self._arenas = self._tables + num_ends * MAX_BLOCKS
        # No end can send more than the machine's memory.
        nbytes = min(os.sysconf("SC_PHYS_PAGES") * _PAGE_NBYTES, _round_down((_MAX_NBYTES - self._arenas) // num_ends))
        self._fd = os.memfd_create("xrank-virtual", os.MFD_CLOEXEC)
        try:
            self._address, self.arena_nbytes = self._map_file(max(nbytes, _MIN_ARENA_NBYTES))
            self.data = _view(self._address, self._nbytes)
            self.words = self.data.cast("q")
            # Give the heads pages now: a store to a missing page is a SIGBUS if memory is full.
            self.write_fresh(0, memoryview(bytes(self._tables)))
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def _nbytes(self) -> int:
        return self._arenas + self.num_ends * self.arena_nbytes

    def _map_file(self, arena_nbytes: int) -> tuple[int, int]:
        while True:
            total = self._arenas + self.num_ends * arena_nbytes
            try:
                os.ftruncate(self._fd, total)
                return _map(self._fd, total), arena_nbytes
            except OSError as error:
                # A limit on addresses or file size (ulimit -v, -f): try a smaller file.
                if error.errno not in (errno.ENOMEM, errno.EFBIG) or arena_nbytes < 2 * _MIN_ARENA_NBYTES:
                    raise
                arena_nbytes = _round_down(arena_nbytes // 2)

    def board(self, end: int) -> int:
        """Return the offset of an end's part of the board."""
        return end * BOARD_NBYTES

    def ring(self, sender: int, receiver: int) -> int:
        """Return the offset of the head of a pair's ring."""
        return self._rings + (sender * self.num_ends + receiver) * HEAD_NBYTES

    def table(self, end: int) -> int:
        """Return the offset of an end's table of blocks."""
        return self._tables + end * MAX_BLOCKS

    def arena(self, end: int) -> int:
        """Return the offset of an end's arena."""
        return self._arenas + end * self.arena_nbytes

    def write_fresh(self, offset: int, content: memoryview) -> None:
        """Write bytes to fresh pages with `pwrite`: full memory is an error here but a SIGBUS in a store.

        This is also the fastest way to get fresh pages.

        Raises:
            NoSpaceError: the system has no memory for them.
        """
        needed = len(content)
        while content:
            try:
                n = os.pwrite(self._fd, content, offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                raise make_no_space_error(needed) from error
            content, offset = content[n:], offset + n

    def close(self) -> None:
        """Free all memory; no end may use it afterwards.

        The addresses stay mapped, but empty, until their last view is gone: a kept error's frames may have views.
        """
        _libc().madvise(self._address, self._nbytes, mmap.MADV_REMOVE)
        os.close(self._fd)


def _map(fd: int, nbytes: int) -> int:
    # mmap.mmap would keep a file descriptor open as long as a view exists.
    address = _libc().mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(address)


def _view(address: int, nbytes: int) -> memoryview:
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    weakref.finalize(memory, _libc().munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes = [ctypes.c_void_p, word, number, number, number, ctypes.c_longlong]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, word]
    libc.madvise.argtypes = [ctypes.c_void_p, word, number]
    return libc


def make_no_space_error(needed: int) -> NoSpaceError:
    """Return the error for a failed allocation of shared memory."""
    free = os.sysconf("SC_AVPHYS_PAGES") * _PAGE_NBYTES
    return NoSpaceError(
        "a device cannot send: the shared memory is full",
        got=f"{free:,} bytes free",
        want=f"{needed:,} bytes",
        next_step="free memory on this host, or run smaller arrays; xrank.virtual.plan needs none",
        needed_nbytes=needed,
        free_nbytes=free,
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE_NBYTES) * _PAGE_NBYTES


def _round_down(nbytes: int) -> int:
    return nbytes // _PAGE_NBYTES * _PAGE_NBYTES


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


_WORD = 8
_TURN, _SOURCE, _SINCE, _NUM_TAKEN, _HEADING = range(5)
"""Places of words. An odd turn is a wait, an even turn is not; each change adds 1."""
assert (_HEADING + 1 + len(Heading())) * _WORD <= BOARD_NBYTES


@dataclass(frozen=True, slots=True)
class Wait:
    """The record that an end waits for."""

    turn: int
    """Number of the wait, unique for this end."""
    source: int
    """The end that must send the record."""
    since: float
    """Start of the wait, in seconds of the monotonic clock, which all processes of the host share."""
    num_taken: int
    """Number of records that the end had received from the source before."""
    heading: Heading | None
    """The expected heading; None for an object."""


class WaitBoard:
    """One place per end, written by the end and read by the host.

    Args:
        segment: the segment shared by all ends.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def begin(self, end: int, source: int, num_taken: int, heading: Heading | None) -> None:
        """Record that an end starts to wait."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        words[first + _SOURCE] = source
        words[first + _SINCE] = time.monotonic_ns()
        words[first + _NUM_TAKEN] = num_taken
        words[first + _HEADING] = heading is not None
        for place, number in enumerate(heading or (), first + _HEADING + 1):
            words[place] = number
        # The turn comes last: a reader that sees it also sees the words before it.
        words[first + _TURN] += 1

    def finish(self, end: int) -> None:
        """Record that the end has stopped waiting."""
        self._segment.words[self._segment.board(end) // _WORD + _TURN] += 1

    def read(self, end: int) -> Wait | None:
        """Return the wait of an end; None if it does not wait."""
        words, first = self._segment.words, self._segment.board(end) // _WORD
        while True:
            turn = words[first + _TURN]
            if turn % 2 == 0:
                return None
            start = first + _HEADING + 1
            heading = Heading(*words[start : start + len(Heading())]) if words[first + _HEADING] else None
            wait = Wait(turn, words[first + _SOURCE], words[first + _SINCE] / 1e9, words[first + _NUM_TAKEN], heading)
            # The words belong together only if the wait has not ended while they were read.
            if words[first + _TURN] == turn:
                return wait


_CHUNK_NBYTES = 32 << 10
_ELSEWHERE = -1
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


_INLINE_NBYTES = 2 << 10
"""Largest array that is stored in the record itself."""
_NUM_LOOKS = 5
"""Polls before a receiver sleeps. Few, because the awaited sender may need this very core. Yielding between polls
(sched_yield) is worse than sleeping: on a busy machine it costs a whole time slice, and slows a ring down 10 times."""

_RECORD = struct.Struct(f"=BBHI{len(Heading())}Iqqq")
"""Kind, element type, number of dims, number of parts, heading; mark, offset and nbytes of a block. The lengths of an
array's dims or of an object's parts follow, then the payload unless it is in a block."""
_KINDS: tuple[ArrayKind, ...] = ("numpy", "torch")
_OBJECT = len(_KINDS)
_DTYPES = tuple(DTYPES)


class SharedLinks:
    """All channel ends of one process.

    Args:
        segment: the segment shared by all ends.
        bells: the ends' eventfds, which wake a sleeping receiver.
        devices: the devices in the order of their ends; the host's end is the last one.
        device: the device of this process; `HOST` for the host.
    """

    def __init__(self, segment: Segment, bells: Sequence[int], devices: Sequence[int], device: int) -> None:
        self.segment = segment
        self.board = WaitBoard(segment)
        self._ends = {**{name: end for end, name in enumerate(devices)}, HOST: len(devices)}
        self.device, self.end = device, self._ends[device]
        self.arena = BlockArena(segment, self.end)
        self.copies = device == HOST
        """Whether received arrays are copied because they outlive the other processes."""
        self._bells = bells
        self.bell = bells[self.end]
        """The own eventfd, readable after a record came."""
        self._poll = select.poll()
        self._poll.register(self.bell, select.POLLIN)
        self.outgoing: dict[int, SharedChannel] = {}
        self.incoming: dict[int, SharedChannel] = {}

    @property
    def from_host(self) -> SharedChannel:
        """The end that receives the host's packets."""
        return self.from_device(HOST)

    @property
    def to_host(self) -> SharedChannel:
        """The end that sends to the host."""
        return self.to_device(HOST)

    def to_device(self, device: int) -> SharedChannel:
        """Return the end that sends to another device."""
        if device not in self.outgoing:
            self.outgoing[device] = SharedChannel(self, self.device, device)
        return self.outgoing[device]

    def from_device(self, device: int) -> SharedChannel:
        """Return the end that receives from another device."""
        if device not in self.incoming:
            self.incoming[device] = SharedChannel(self, device, self.device)
        return self.incoming[device]

    def end_of(self, device: int) -> int:
        """Return the end of a device or of the host."""
        return self._ends[device]

    def ring_bell(self, end: int) -> None:
        """Wake an end after a record was sent to it."""
        os.eventfd_write(self._bells[end], 1)

    def wait(self, ring: RingReader, source: int, heading: Heading | None) -> None:
        """Wait until the ring from that end has a record."""
        for _ in range(_NUM_LOOKS):
            if ring.has_record:
                return
        # The host finds deadlocks by the board, so the wait must be on it before this process sleeps.
        self.board.begin(self.end, source, ring.num_taken, heading)
        while not ring.has_record:
            # The bell is a counter: a record that arrives before the poll still wakes it.
            self._poll.poll()
            self.clear_bell()
        self.board.finish(self.end)

    def clear_bell(self) -> None:
        """Reset the own bell until the next record comes."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)


class SharedChannel(VirtualChannel):
    """One direction between two processes, seen from the process at either end.

    Args:
        links: the ends of this process.
        source: the sending device; `HOST` for the host.
        target: the receiving device; `HOST` for the host.
    """

    def __init__(self, links: SharedLinks, source: int, target: int) -> None:
        super().__init__(source, target)
        self._links, self._segment = links, links.segment
        self._source, self._target = links.end_of(source), links.end_of(target)
        head = self._segment.ring(self._source, self._target)
        if source == links.device:
            self._writer = RingWriter(self._segment, head, links.arena)
        else:
            self._reader = RingReader(self._segment, head)
        self._arrays: deque[tuple[Heading, Array]] = deque()
        self._objects: deque[Any] = deque()

    def put(self, array: Array, heading: Heading) -> None:
        """Send without counting."""
        spec, kind = spec_of(array), kind_of(array)
        header = (_KINDS.index(kind), _DTYPES.index(spec.dtype), len(spec.shape), 0, *heading)
        if spec.nbytes <= _INLINE_NBYTES:
            self._push(header, spec.shape, None, bytes_of(array).tobytes())
            return
        arena = self._links.arena
        with self._block(spec.nbytes) as block:
            if arena.is_warm(block.offset + spec.nbytes):
                # Pages exist, so numpy or torch can copy directly, also from strided arrays.
                place = from_bytes(view(self._segment, block), spec, kind)
                if kind == "torch":
                    place.copy_(array.detach())
                else:
                    np.copyto(place, array)
            else:
                # Fresh pages need pwrite, which reports full memory as an error.
                arena.write(block.offset, bytes_of(array).data)
            self._push(header, spec.shape, block)

    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive without counting or checks."""
        while not self._arrays:
            if not self.collect():
                self._links.wait(self._reader, self._source, heading)
        return self._arrays.popleft()

    def send_object(self, value: Any) -> None:
        """Send any picklable object; its arrays and plain tensors are copied once, as by `send`."""
        parts = pack_object(value)
        lengths = [len(part) for part in parts]
        header = (_OBJECT, 0, 0, len(parts), *Heading())
        if len(parts) == 1 and lengths[0] <= _INLINE_NBYTES:
            self._push(header, lengths, None, bytes(parts[0]))
            return
        starts, total = _place_parts(lengths)
        with self._block(total) as block:
            for start, part in zip(starts, parts, strict=True):
                self._links.arena.write(block.offset + start, part)
            self._push(header, lengths, block)

    def receive_object(self) -> Any:
        """Wait for the next object."""
        while not self._objects:
            if not self.collect():
                self._links.wait(self._reader, self._source, None)
        return self._objects.popleft()

    @property
    def has_array(self) -> bool:
        """Whether `receive` returns without waiting."""
        return bool(self._arrays)

    def collect(self) -> bool:
        """Queue the next record for `receive` or `receive_object`, and return whether there was one."""
        record = self._reader.pop()
        if record is None:
            return False
        kind, dtype, num_dims, num_parts, *rest = _RECORD.unpack_from(record)
        numbers, (mark, offset, nbytes) = rest[: len(Heading())], rest[len(Heading()) :]
        num_lengths = num_parts if kind == _OBJECT else num_dims
        start = _RECORD.size + 8 * num_lengths
        lengths = struct.unpack_from(f"={num_lengths}q", record, _RECORD.size)
        # A mark is an offset behind the board and the rings, so 0 means no block.
        content = (
            self._open_block(Block(offset, nbytes, mark))
            if mark
            else np.frombuffer(bytearray(record[start:]), np.uint8)
        )
        if kind == _OBJECT:
            starts, _ = _place_parts(lengths)
            parts = [content[at : at + length].data for at, length in zip(starts, lengths, strict=True)]
            self._objects.append(unpack_object(parts))
        else:
            spec = ArraySpec(tuple(lengths), _DTYPES[dtype])
            self._arrays.append((Heading(*numbers), from_bytes(content, spec, _KINDS[kind])))
        return True

    @contextlib.contextmanager
    def _block(self, nbytes: int) -> Iterator[Block]:
        block = self._links.arena.take(nbytes)
        try:
            yield block
        except BaseException:
            # The receiver never learns of this block.
            free_block(self._segment, block.mark)
            raise

    def _open_block(self, block: Block) -> Bytes:
        if not self._links.copies:
            return lend(self._segment, block)
        content = np.frombuffer(new_buffer(block.nbytes), np.uint8)
        content[:] = view(self._segment, block)
        free_block(self._segment, block.mark)
        return content

    def _push(self, header: Sequence[int], lengths: Sequence[int], block: Block | None, payload: bytes = b"") -> None:
        place = (block.mark, block.offset, block.nbytes) if block else (0, 0, len(payload))
        record = _RECORD.pack(*header, *place) + struct.pack(f"={len(lengths)}q", *lengths) + payload
        self._writer.push(record)
        self._links.ring_bell(self._target)


def _place_parts(lengths: Sequence[int]) -> tuple[list[int], int]:
    starts, total = [], 0
    for length in lengths:
        starts.append(total)
        total += -(-length // _ALIGNMENT) * _ALIGNMENT
    return starts, total
