"""Channels between processes: a ring carries the records, and blocks carry the arrays.

The sender copies an array once, into a block of its own arena or, if small, into the record. A receiving device uses
the array in place and may keep and change it; the block is freed when its last view is gone. The host's arrays outlive
the run, so the host copies them. Arrays are never pickled.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xrank.dtypes import DTYPES
from xrank.ranks.memory_messages import new_buffer
from xrank.virtual.array_spec import ArraySpec
from xrank.virtual.arrays import Array, ArrayKind, Bytes, bytes_of, from_bytes, kind_of, spec_of
from xrank.virtual.channels.block_arena import Block, BlockArena, free_block, lend, view
from xrank.virtual.channels.board import WaitBoard
from xrank.virtual.channels.channel import HOST, Heading, VirtualChannel
from xrank.virtual.channels.message_ring import RingReader, RingWriter
from xrank.virtual.channels.segment import Segment
from xrank.virtual.packed_object import pack_object, unpack_object

_INLINE_NBYTES = 2 << 10
"""Largest array that is stored in the record itself."""
_ALIGNMENT = 64
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
