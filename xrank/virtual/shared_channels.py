"""Channels between processes: a pipe to each process carries the messages, and shared memory the large arrays.

Both are created before the processes are forked. A message has at most `_MAX_RECORD_NBYTES`, which the kernel writes to
a pipe as a whole, so all senders share the receiver's pipe. A larger array lies in memory of its sender, which the
receiver uses in place; a message gives it back when the last view is gone. Messages that the pipe has no room for wait
in the sender, so a send never waits for the receiver. Arrays are never pickled. The system calls order the memory: who
reads a message sees the bytes that were written before it, on any processor.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap
import os
import pickle
import select
import struct
import sys
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xrank.dtypes import DTYPES
from xrank.errors import NoSpaceError, UsageError
from xrank.virtual.arrays import Array, ArrayKind, ArraySpec, Bytes, bytes_of, from_bytes, kind_of, spec_of
from xrank.virtual.engine import HOST, Heading, VirtualChannel

_MAX_RECORD_NBYTES = select.PIPE_BUF
_PIPE_NBYTES = 256 << 10
"""Wanted capacity of a pipe, below the limit of pages in pipes of one user."""
_READ_NBYTES = 64 << 10
MAX_READS = 1 + (1 << 20) // _READ_NBYTES
"""Reads that empty a pipe of any capacity."""
_ALIGNMENT = 64
_MIN_MEMORY_NBYTES = 64 << 20
_MAX_ADDRESSES = 1 << 45
"""Addresses that a run's memory may take: a quarter of a process' address space."""
_MAP_NORESERVE, _MADV_POPULATE_WRITE = 0x4000, 23
"""Of linux/mman.h; the module mmap lacks both names."""
_ANNOUNCE_SECONDS = 0.02
"""Seconds of a wait after which the host is told."""

_RECORD = struct.Struct(f"=IqBBHI{len(Heading())}Iqq")
"""Length, source, kind, element type, number of dims, number of parts, heading; offset (-1: the bytes are in the
record) and nbytes. The lengths of an array's dims follow, then the bytes."""
_KINDS: tuple[ArrayKind, ...] = ("numpy", "torch")
_OBJECT, _GIVE_BACK = len(_KINDS), len(_KINDS) + 1
_DTYPES = tuple(DTYPES)

_num_forks = 0


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    # Parent and child both have views of received arrays, and neither knows when the other drops its own.
    os.register_at_fork(before=_count_fork)


class SharedMemory:
    """A pipe to each process of a run, and memory for each one's arrays, which takes pages only as it is written."""

    def __init__(self, devices: Sequence[int]) -> None:
        self.ends = (*devices, HOST)
        self.inboxes: dict[int, int] = {}
        """The reading descriptors of the pipes; a process keeps its own alone."""
        self.outboxes: dict[int, int] = {}
        self.arenas: dict[int, mmap.mmap] = {}
        try:
            nbytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE  # no process can send more than that
            nbytes = min(nbytes, _MAX_ADDRESSES // len(self.ends) // mmap.PAGESIZE * mmap.PAGESIZE)
            for end in self.ends:
                self.inboxes[end], self.outboxes[end] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(self.outboxes[end], fcntl.F_SETPIPE_SZ, _PIPE_NBYTES)
                self.arenas[end] = _map_memory(nbytes if not self.arenas else len(self.arenas[self.ends[0]]))
        except BaseException:
            self.close()
            raise

    def close_inboxes(self, ends: Sequence[int]) -> None:
        """Close reading descriptors; a pipe that no process reads tells its senders so."""
        for end in ends:
            os.close(self.inboxes.pop(end))

    def close(self) -> None:
        """Free everything. Addresses stay mapped, but empty, while views exist: a kept error's frames may have some."""
        for descriptor in (*self.inboxes.values(), *self.outboxes.values()):
            os.close(descriptor)
        for arena in self.arenas.values():
            arena.madvise(mmap.MADV_REMOVE)
        self.inboxes, self.outboxes, self.arenas = {}, {}, {}


def _map_memory(nbytes: int) -> mmap.mmap:
    while True:
        try:
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        except (OSError, ValueError):  # a limit on addresses (ulimit -v)
            if nbytes < 2 * _MIN_MEMORY_NBYTES:
                raise
            nbytes = nbytes // 2 // mmap.PAGESIZE * mmap.PAGESIZE


class ArrayArena:
    """Places for one process' arrays, the lowest that is free first, so that the used part stays small and warm."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.taken: list[tuple[int, int]] = []
        """(start, end) of the places in use, by address."""
        self._num_dense = 0
        """Number of leading places with no gap between them."""
        self._warm = 0
        """End of the part that has pages."""

    def take(self, nbytes: int) -> int:
        """Return the start of an unused place."""
        size = max(_ALIGNMENT, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        index = self._num_dense
        start = self.taken[index - 1][1] if index else 0
        while index < len(self.taken) and self.taken[index][0] - start < size:
            if start == self.taken[index][0] and index == self._num_dense:
                self._num_dense += 1
            start = self.taken[index][1]
            index += 1
        if start + size > self._warm:
            self._warm_up(start + size, nbytes)
        self.taken.insert(index, (start, start + size))
        return start

    def give_back(self, start: int) -> None:
        """End the use of a place."""
        index = bisect_left(self.taken, (start,))
        del self.taken[index]
        self._num_dense = min(self._num_dense, index)

    def _warm_up(self, end: int, needed: int) -> None:
        # A store to a page that the system cannot give ends the process; this call returns an error instead.
        end = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            if end > len(self._memory):
                raise MemoryError
            self._memory.madvise(_MADV_POPULATE_WRITE, self._warm, end - self._warm)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno == 22:  # Linux before 5.14 lacks it
                return
            free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
            raise NoSpaceError(
                "a device cannot send: the shared memory is full",
                got=f"{free:,} bytes free",
                want=f"{needed:,} bytes",
                next_step="free memory on this host, or run smaller arrays; xrank.virtual.plan needs none",
                needed_nbytes=needed,
                free_nbytes=free,
            ) from error
        self._warm = end


@dataclass(frozen=True, slots=True)
class DeviceWait:
    """A device's wait for a message, which it reports to the host. It reports None when the wait is over."""

    source: int
    message: str
    since: float
    """Start of the wait, in seconds of the monotonic clock, which all processes of the host share."""
    num_taken: int
    """Number of arrays that the device has received from the source."""
    sent: dict[int, int]
    """Number of arrays that the device has sent, by target."""


class SharedLinks:
    """All channel ends of one process: of a device, or of `HOST`."""

    def __init__(self, shared: SharedMemory, device: int) -> None:
        self.device = device
        self.arena = ArrayArena(shared.arenas[device])
        self.inbox = shared.inboxes[device]
        self.outgoing: dict[int, SharedChannel] = {}
        self.incoming: dict[int, SharedChannel] = {}
        self.returned: deque[tuple[int, int, int]] = deque()
        """(owner, start, number of forks) of places whose last view is gone; they are given back at the next call."""
        self._shared = shared
        self._rest = b""
        self._unsent: dict[int, deque[bytes]] = {end: deque() for end in shared.ends}
        self.poll = select.poll()
        """Of `exchange`; the host registers more with it."""
        self.poll.register(self.inbox, select.POLLIN)

    def to_device(self, device: int) -> SharedChannel:
        """Return the end that sends to another device, or to `HOST`."""
        if device not in self.outgoing:
            self.outgoing[device] = SharedChannel(self, self.device, device)
        return self.outgoing[device]

    def from_device(self, device: int) -> SharedChannel:
        """Return the end that receives from another device, or from `HOST`."""
        if device not in self.incoming:
            self.incoming[device] = SharedChannel(self, device, self.device)
        return self.incoming[device]

    def memory_of(self, end: int, start: int, nbytes: int) -> Bytes:
        """Return bytes of the memory of a process."""
        return np.frombuffer(self._shared.arenas[end], np.uint8, nbytes, start)

    def push(self, target: int, record: bytes) -> None:
        """Send a record, at the latest when this process waits or ends."""
        self._unsent[target].append(record)
        self._flush(target)

    def push_returned(self) -> None:
        """Tell the senders of arrays that they can use the memory again."""
        while self.returned:
            owner, start, num_forks = self.returned.popleft()
            if num_forks == _num_forks:  # after a fork, the other process may have a view
                header = (_RECORD.size, self.device, _GIVE_BACK, 0, 0, 0, *Heading(), start, 0)
                self.push(owner, _RECORD.pack(*header))

    def collect(self) -> bool:
        """Sort the messages that have arrived into their channels; return whether there were any."""
        try:
            content = self._rest + os.read(self.inbox, _READ_NBYTES)
        except BlockingIOError:
            return False
        at = 0
        while len(content) - at >= _RECORD.size:
            length, source, kind, dtype, num_dims, num_parts, *rest = _RECORD.unpack_from(content, at)
            if at + length > len(content):
                break
            *heading, start, nbytes = rest
            first, at = at + _RECORD.size, at + length
            if kind == _GIVE_BACK:
                self.arena.give_back(start)
                continue
            channel = self.from_device(source)
            found = (
                np.frombuffer(bytearray(content[first + 8 * num_dims : at]), np.uint8)
                if start < 0
                else self._open(source, start, nbytes)
            )
            if kind == _OBJECT:
                channel.objects.append((found, num_parts if start >= 0 else 0))
            else:
                spec = ArraySpec(struct.unpack_from(f"={num_dims}q", content, first), _DTYPES[dtype])
                channel.arrays.append((Heading(*heading), from_bytes(found, spec, _KINDS[kind])))
        self._rest = content[at:]
        return True

    def wait(self, source: int, message: str) -> None:
        """Wait until messages have arrived, of any channel; after a while, tell the host for what."""
        self.exchange(_ANNOUNCE_SECONDS)
        if self.collect():
            return
        sent = {device: end.sent.messages for device, end in self.outgoing.items()}
        num_taken = self.from_device(source).received.messages
        since, to_host = time.monotonic() - _ANNOUNCE_SECONDS, self.to_device(HOST)
        to_host.send_object(DeviceWait(source, message, since, num_taken, sent))
        while not self.collect():
            self.exchange(None)
        to_host.send_object(None)

    def finish(self) -> None:
        """Wait until all messages are in the pipes."""
        while any(self._unsent.values()):
            self.exchange(None)
            self.collect()  # two processes that end may wait for each other's room

    def exchange(self, seconds: float | None) -> set[int]:
        """Wait until messages arrived or waiting ones can be sent, and send these; return the ready descriptors."""
        self.push_returned()
        targets = [target for target, records in self._unsent.items() if records]
        for target in targets:
            self.poll.register(self._shared.outboxes[target], select.POLLOUT)
        ready = self.poll.poll(None if seconds is None else 1000 * seconds)
        for target in targets:
            self.poll.unregister(self._shared.outboxes[target])
            self._flush(target)
        return {descriptor for descriptor, _ in ready}

    def _open(self, source: int, start: int, nbytes: int) -> Bytes:
        """Return the bytes of an array in its sender's memory; the host copies them, for they outlive the run."""
        found = self.memory_of(source, start, nbytes)
        if self.device == HOST:
            copied = np.empty(nbytes, np.uint8)
            copied[:] = found
            self.returned.append((source, start, _num_forks))
            return copied
        # Only appends to a queue: the callback may run at any moment, also within a send.
        weakref.finalize(found, self.returned.append, (source, start, _num_forks)).atexit = False
        return found

    def _flush(self, target: int) -> None:
        records = self._unsent[target]
        while records:
            try:
                os.write(self._shared.outboxes[target], records[0])
            except BlockingIOError:
                return
            except BrokenPipeError:  # the target has ended; its counts show that it did not receive this
                records.clear()
                return
            records.popleft()


class SharedChannel(VirtualChannel):
    """One direction between two processes, seen from the process at either end."""

    def __init__(self, links: SharedLinks, source: int, target: int) -> None:
        super().__init__(source, target)
        self._links = links
        self.arrays: deque[tuple[Heading, Array]] = deque()
        self.objects: deque[tuple[Bytes, int]] = deque()
        """Objects before they are unpickled: bytes, and the number of parts if a table of their lengths comes first."""

    def put(self, array: Array, heading: Heading) -> None:
        """Send without counting."""
        spec, kind = spec_of(array), kind_of(array)
        what = (_KINDS.index(kind), _DTYPES.index(spec.dtype), len(spec.shape), 0, *heading)
        lengths = struct.pack(f"={len(spec.shape)}q", *spec.shape)
        if _RECORD.size + len(lengths) + spec.nbytes <= _MAX_RECORD_NBYTES:
            self._push(what, lengths + bytes_of(array).tobytes(), -1, spec.nbytes)
            return
        start = self._take(spec.nbytes)
        try:
            place = from_bytes(self._links.memory_of(self.source, start, spec.nbytes), spec, kind)
            if kind == "torch":
                place.copy_(array.detach())
            else:
                np.copyto(place, array)
        except BaseException:
            self._links.arena.give_back(start)
            raise
        self._push(what, lengths, start, spec.nbytes)

    def take(self, heading: Heading) -> tuple[Heading, Array]:
        """Receive without counting or checks."""
        while not self.arrays:
            if not self._links.collect():
                self._links.wait(self.source, str(heading))
        return self.arrays.popleft()

    def send_object(self, value: Any) -> None:
        """Send any picklable object; its arrays and plain tensors are copied once, as by `send`."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, buffers).dump(value)
        parts = [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]
        what = (_OBJECT, 0, 0, len(parts), *Heading())
        starts, total = _place_parts(list(map(len, parts)))
        if _RECORD.size + total <= _MAX_RECORD_NBYTES and len(parts) == 1:
            self._push(what, bytes(parts[0]), -1, len(parts[0]))
            return
        start = self._take(total)
        content = self._links.memory_of(self.source, start, total).data
        content[: 8 * len(parts)] = struct.pack(f"={len(parts)}q", *map(len, parts))
        for at, part in zip(starts, parts, strict=True):
            content[at : at + len(part)] = part
        self._push(what, b"", start, total)

    def receive_object(self) -> Any:
        """Wait for the next object."""
        while not self.objects:
            if not self._links.collect():
                self._links.wait(self.source, "an object")
        content, num_parts = self.objects.popleft()
        if not num_parts:
            return pickle.loads(content.data)  # noqa: S301 - only this run's processes can write here
        lengths = struct.unpack_from(f"={num_parts}q", content.data)
        starts, _ = _place_parts(lengths)
        first, *others = (content[at : at + length].data for at, length in zip(starts, lengths, strict=True))
        return pickle.loads(first, buffers=others)  # noqa: S301

    def _take(self, nbytes: int) -> int:
        if self._links.arena.taken:
            self._links.collect()  # places may have been given back
        return self._links.arena.take(nbytes)

    def _push(self, what: Sequence[int], content: bytes, start: int, nbytes: int) -> None:
        header = _RECORD.pack(_RECORD.size + len(content), self.source, *what, start, nbytes)
        self._links.push_returned()
        self._links.push(self.target, header + content)


def _place_parts(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Return where each part of an object begins, behind the table of their lengths, and the whole size."""
    starts, total = [], 8 * len(lengths)
    for length in lengths:
        total = -(-total // _ALIGNMENT) * _ALIGNMENT
        starts.append(total)
        total += length
    return starts, total


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)

    def reducer_override(self, value: Any) -> Any:
        """Give a plain tensor as its elements; torch itself would write a file of its own into the pickle."""
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor or value.requires_grad:
            return NotImplemented
        try:
            kind_of(value)
            spec = spec_of(value)
        except UsageError:
            return NotImplemented
        return _tensor, (spec.dtype, spec.shape, pickle.PickleBuffer(bytes_of(value).data))


def _tensor(dtype: str, shape: tuple[int, ...], content: Any) -> Array:
    return from_bytes(np.frombuffer(content, np.uint8), ArraySpec(shape, dtype), "torch")
