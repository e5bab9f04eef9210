"""Arenas: memory that a writer owns and a reader maps, so that a message costs one copy. The reader may lease it.

The first word of an arena is its state. The writer sets it to taken. The reader sets it to free after it has copied the
message, or when the last tensor in the arena is gone; then the writer may reuse the arena. The second word is the
message's number, so that a reader cannot mistake a later message for the one in its receipt.

A memfd (memfd_create(2)) counts against the process's memory, not against the size of /dev/shm. It has no name that
could be guessed or left behind. Fresh bytes are written by write(2): it is the quickest way to fresh pages, and it
reports ENOSPC where a store through a mapping would cause SIGBUS. Existing bytes are copied to directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from xrank.workspace.free_space import NO_MEMORY, make_no_memory_error
from xrank.workspace.memory_file import MemoryFile, MemoryPlace, open_place
from xrank.workspace.plain_memory import row_major_bytes

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
_HEAD_NBYTES = ALIGNMENT
_USE, _NUMBER = range(2)
"""Indexes of an arena's words."""
_FREE, _TAKEN, _LENT, _ABANDONED = range(4)
_NO_MESSAGE = 0
_MIN_NBYTES = 128 << 10
_SMALL_NBYTES = 4 << 20
"""Up to this size a plain copy costs less than creating the tensor that torch copies to with all its threads."""
_HUGE_NBYTES = 4 << 20
"""Larger buffers get huge pages, because fresh small pages cost three times the copy."""


class Arena:
    """The writer's side of one arena.

    Args:
        nbytes: minimum capacity; memory is allocated when it is written.
    """

    def __init__(self, nbytes: int) -> None:
        # A power of two: the next message, if it is a little larger, still fits the same warm pages.
        total = max(_MIN_NBYTES, 1 << (nbytes + _HEAD_NBYTES - 1).bit_length())
        self.capacity = total - _HEAD_NBYTES
        self._written = 0
        self._num_messages = 0
        self._file = MemoryFile()
        try:
            os.ftruncate(self._file.fd, total)
            self.place: MemoryPlace = self._file.seal(writable=True)
            self.description = self.place.to_json()
            self._whole: torch.Tensor | None = None
            self._memory = mmap.mmap(self._file.fd, total)
            self._words = _words_of(self._memory)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            # Allocates the page of the words, which are then stored through the mapping.
            self._write_fresh(0, memoryview(bytes(_HEAD_NBYTES)))
        except BaseException:
            self._file.close()
            raise

    @property
    def is_free(self) -> bool:
        """Whether no reader needs it any more."""
        return self._words[_USE] == _FREE

    @property
    def is_abandoned(self) -> bool:
        """Whether no reader will ever free it."""
        return self._words[_USE] == _ABANDONED

    def take(self) -> int:
        """Mark the arena as taken until its reader frees it, and return the new message's number."""
        self._num_messages += 1
        # The number before the state: a reader that sees the arena taken must find this message's number.
        self._words[_NUMBER] = self._num_messages
        self._words[_USE] = _TAKEN
        return self._num_messages

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor's elements, row-major, to `offset`; writes to fresh memory go upwards, less than a page apart.

        Raises:
            NoSpaceError: the system has no memory for it.
        """
        nbytes = tensor.nbytes
        if nbytes == 0:
            return
        if offset + nbytes <= self._written:
            start = _HEAD_NBYTES + offset
            if nbytes <= _SMALL_NBYTES and is_as_in_memory(tensor):
                ctypes.memmove(self._address + start, tensor.data_ptr(), nbytes)
            else:
                import torch

                if self._whole is None:
                    self._whole = torch.frombuffer(self._memory, dtype=torch.uint8)
                self._whole[start : start + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return
        self.write_bytes(offset, row_major_bytes(tensor).data)

    def write_bytes(self, offset: int, content: bytes | memoryview) -> None:
        """Write bytes at `offset`, like `write`."""
        start, end = _HEAD_NBYTES + offset, offset + len(content)
        if end <= self._written:
            self._memory[start : _HEAD_NBYTES + end] = content
        else:
            self._write_fresh(start, memoryview(content))
            self._written = end

    def _write_fresh(self, position: int, data: memoryview) -> None:
        needed = len(data)
        while data:
            try:
                n = os.pwrite(self._file.fd, data, position)
            except OSError as error:
                if error.errno not in NO_MEMORY:
                    raise
                next_step = "free memory on this host, or give workspace_path"
                raise make_no_memory_error("the message", needed, next_step) from error
            data, position = data[n:], position + n

    def close(self) -> None:
        """End the message in it and release the memory. Readers keep what they hold."""
        # A reader that has mapped the arena, and still has the receipt, must see that the message is gone.
        self._words[_NUMBER] = _NO_MESSAGE
        self.release()

    def release(self) -> None:
        """Release the memory in this process only."""
        self._file.close()
        # A tensor made by `write` may still hold the mapping for a moment; the mapping ends with the last such tensor.
        del self._memory, self._words, self._whole


def _words_of(memory: mmap.mmap) -> memoryview:
    # memoryview items are loaded and stored as whole numbers. Like every slice, this one keeps the mapping alive.
    return memoryview(memory)[:_HEAD_NBYTES].cast("q")


def is_as_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie at its address, one after another."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Lease:
    """A reader's use of an arena, until the last of the lent buffers is gone.

    Args:
        words: the arena's words.
        whole: the array that only the lent buffers reference; when it is gone, the writer gets the arena back.
    """

    def __init__(self, words: memoryview, whole: np.ndarray) -> None:
        self.is_over = False
        self._words = words
        self._is_abandoned = False
        self._end = weakref.ref(whole, self._finish)
        _leases.add(self)

    def _finish(self, whole: object) -> None:
        self.is_over = True
        if _leases is not None:  # at interpreter exit, module globals may be gone
            _leases.discard(self)
        if not self._is_abandoned:
            self._words[_USE] = _FREE

    def abandon(self) -> None:
        """Stop counting on the arena's return, so that the writer takes another one."""
        self._is_abandoned = True
        self._words[_USE] = _ABANDONED


_leases: set[Lease] = set()
"""Leases that are not over: a weak reference calls its callback only as long as it exists itself."""


def _abandon_leases() -> None:
    # After the fork two processes hold the same tensors, and neither can know when the other one drops them.
    for lease in list(_leases):
        lease.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_abandon_leases)


class AttachedArena:
    """The reader's side of an arena."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._words = memory, _words_of(memory)

    @classmethod
    def open(cls, place: MemoryPlace) -> AttachedArena | None:
        """Map an arena; return None if it no longer exists."""
        fd = open_place(place, writable=True)
        if fd is None:
            return None
        try:
            return cls(mmap.mmap(fd, place.nbytes))
        finally:
            os.close(fd)

    def holds(self, number: int) -> bool:
        """Return whether that message lies here and was not fetched yet."""
        return self._words[_USE] == _TAKEN and self._words[_NUMBER] == number

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at `offset`."""
        return self._memory[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]

    def copy(self, parts: list[tuple[int, int]]) -> list[memoryview]:
        """Return copies of (offset, nbytes) parts, and give the arena back to the writer."""
        copies = [new_buffer(nbytes) for _, nbytes in parts]
        with memoryview(self._memory) as whole:
            for (offset, nbytes), copy in zip(parts, copies, strict=True):
                copy[:] = whole[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]
        self.drop()
        return copies

    def drop(self) -> None:
        """Give the arena back to the writer."""
        self._words[_USE] = _FREE

    def lend(self, parts: list[tuple[int, int]]) -> tuple[list[memoryview], Lease]:
        """Return (offset, nbytes) parts in place; the writer gets the arena back when the last of them is gone.

        Tensors and views made from a part keep it alive. If this process forks meanwhile, the writer never gets the
        arena back, and takes another.
        """
        # Until the lease ends, the writer must not reuse the arena.
        self._words[_USE] = _LENT
        # All parts, and nothing else, reference this one array: it is freed with the last of them.
        whole = np.frombuffer(self._memory, np.uint8)
        lease = Lease(self._words, whole)
        view = whole.data
        starts = [(_HEAD_NBYTES + offset, nbytes) for offset, nbytes in parts]
        return [view[start : start + nbytes] for start, nbytes in starts], lease


def new_buffer(nbytes: int) -> memoryview:
    """Return writable, uninitialised memory owned by the caller; large buffers lie in huge pages."""
    if nbytes < _HUGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(nbytes, np.uint8).data
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
