"""Arenas: memory that a writer keeps and a reader maps, so that a message costs one copy; the reader may lease it.

The first word of an arena says whether it is taken: the writer sets it, and the reader frees it when it has copied
what it needs, or when the last tensor that lies in the arena is gone. Then the writer may write there again. The second
word is the number of the message that lies there, so that nobody takes a later message for the one that was told.

A memfd (memfd_create(2)) is counted against the process' memory, not against the size of /dev/shm, and nothing can be
left behind or guessed. Fresh bytes are written by write(2), the quickest way to fresh pages, which says ENOSPC where a
store through a mapping would be killed by SIGBUS; bytes that exist already are copied to directly.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np

from xrank.errors import NoSpaceError
from xrank.workspace.memory_file import MemoryFile, MemoryPlace, open_place
from xrank.workspace.plain_memory import row_major_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Arena", "AttachedArena", "Lease", "is_as_in_memory", "new_buffer"]

ALIGNMENT = 64
_HEAD_NBYTES = ALIGNMENT
_USE, _NUMBER = range(2)
"""The words of an arena."""
_FREE, _TAKEN, _LENT, _ABANDONED = range(4)
_NO_MESSAGE = 0
_MIN_NBYTES = 128 << 10
_SMALL_NBYTES = 4 << 20
"""Up to here a plain copy costs less than to make the tensor that torch would copy to, with all its threads."""
_HUGE_NBYTES = 4 << 20
"""Buffers from this size on get huge pages: fresh small pages cost three times the copy."""


class Arena:
    """The writer's side of one arena.

    Args:
        nbytes: that it is to hold at least; no memory is taken before it is written.
    """

    def __init__(self, nbytes: int) -> None:
        total = max(_MIN_NBYTES, 1 << (nbytes + _HEAD_NBYTES - 1).bit_length())
        self.capacity = total - _HEAD_NBYTES
        self._written = 0
        self._num_messages = 0
        self._file = MemoryFile()
        try:
            os.ftruncate(self._file.fd, total)
            self.place: MemoryPlace = self._file.seal(writable=True)
            self.told = self.place.to_json()
            self._whole: torch.Tensor | None = None
            self._memory = mmap.mmap(self._file.fd, total)
            self._words = _words_of(self._memory)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            self._write_fresh(0, memoryview(bytes(_HEAD_NBYTES)))
        except BaseException:
            self._file.close()
            raise

    @property
    def is_free(self) -> bool:
        """Whether nobody reads it any more."""
        return self._words[_USE] == _FREE

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody will say when it is free."""
        return self._words[_USE] == _ABANDONED

    def take(self) -> int:
        """Say that it is in use, until its reader says otherwise; return the new message's number."""
        self._num_messages += 1
        self._words[_NUMBER] = self._num_messages
        self._words[_USE] = _TAKEN
        return self._num_messages

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor's elements, row-major, to `offset`; writes to fresh memory go upwards, without a gap of a page.

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
        """Put bytes at `offset`; as `write`."""
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
                if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                    raise
                free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
                raise NoSpaceError(
                    "there is no memory for what is to be gathered",
                    got=f"{free:,} bytes free",
                    want=f"{needed:,} bytes",
                    next_step="free memory on this host, or give workspace_path",
                    needed_nbytes=needed,
                    free_nbytes=free,
                ) from error
            data, position = data[n:], position + n

    def close(self) -> None:
        """End the message in it, and let go of the memory; what readers have of it, they keep."""
        self._words[_NUMBER] = _NO_MESSAGE
        self.let_go()

    def let_go(self) -> None:
        """Let go of the memory in this process, and of nothing in those that share it."""
        self._file.close()
        # A tensor made by `write` may still hold the mapping for a moment; it goes with the last of them.
        del self._memory, self._words, self._whole


def _words_of(memory: mmap.mmap) -> memoryview:
    # Numbers that are loaded and stored whole; all slots of a memoryview keep the mapping, as any part of it does.
    return memoryview(memory)[:_HEAD_NBYTES].cast("q")


def is_as_in_memory(tensor: torch.Tensor) -> bool:
    """Say whether a tensor's elements are what lies at its address, one after another."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Lease:
    """The reader's use of an arena, from the lending until the last of what was lent is gone.

    Args:
        words: of the arena.
        whole: what all that was lent holds, and nobody else; when it goes, the writer has the arena back.
    """

    def __init__(self, words: memoryview, whole: np.ndarray) -> None:
        self.is_over = False
        self._words = words
        self._is_abandoned = False
        self._end = weakref.ref(whole, self._ended)
        _leases.add(self)

    def _ended(self, whole: object) -> None:
        self.is_over = True
        if _leases is not None:  # the interpreter may be ending, and its modules before it
            _leases.discard(self)
        if not self._is_abandoned:
            self._words[_USE] = _FREE

    def abandon(self) -> None:
        """Let the writer go on without the arena."""
        self._is_abandoned = True
        self._words[_USE] = _ABANDONED


_leases: set[Lease] = set()
"""Those that are not over: a reference that nobody holds would not be called."""


def _abandon_leases() -> None:
    # Two processes are about to hold the same tensors, and neither will know when the other has dropped them.
    for lease in list(_leases):
        lease.abandon()


os.register_at_fork(before=_abandon_leases)


class AttachedArena:
    """A reader's side: what the writer put there, until the reader says that it needs it no more."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory, self._words = memory, _words_of(memory)

    @classmethod
    def open(cls, place: MemoryPlace) -> AttachedArena | None:
        """Map an arena; None where it is there no more."""
        fd = open_place(place, writable=True)
        if fd is None:
            return None
        try:
            return cls(mmap.mmap(fd, place.nbytes))
        finally:
            os.close(fd)

    def holds(self, number: int) -> bool:
        """Whether the message of that number lies here, and was not fetched yet."""
        return self._words[_USE] == _TAKEN and self._words[_NUMBER] == number

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at `offset`."""
        return self._memory[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]

    def copy(self, parts: list[tuple[int, int]]) -> list[memoryview]:
        """Return copies of (offset, nbytes) parts, and let the writer have the arena."""
        copies = [new_buffer(nbytes) for _, nbytes in parts]
        with memoryview(self._memory) as whole:
            for (offset, nbytes), copy in zip(parts, copies, strict=True):
                copy[:] = whole[_HEAD_NBYTES + offset : _HEAD_NBYTES + offset + nbytes]
        self.drop()
        return copies

    def drop(self) -> None:
        """Let the writer have the arena."""
        self._words[_USE] = _FREE

    def lend(self, parts: list[tuple[int, int]]) -> tuple[list[memoryview], Lease]:
        """Return (offset, nbytes) parts as they lie in the arena; the writer has it back when the last of them is gone.

        What is made of a part (a tensor, a view of it) holds it. When this process forks meanwhile, the writer never
        has it back, and takes another.
        """
        self._words[_USE] = _LENT
        # One array that all parts hold, and nobody else: its end is the end of the last of them.
        whole = np.frombuffer(self._memory, np.uint8)
        lease = Lease(self._words, whole)
        view = whole.data
        starts = [(_HEAD_NBYTES + offset, nbytes) for offset, nbytes in parts]
        return [view[start : start + nbytes] for start, nbytes in starts], lease


def new_buffer(nbytes: int) -> memoryview:
    """Return writable memory of the caller's own, its content undefined; much of it lies in huge pages."""
    if nbytes < _HUGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(nbytes, np.uint8).data
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
