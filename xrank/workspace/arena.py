"""Arenas: memory that a writer keeps and a reader maps, so that a message costs one copy; the reader may lease it.

The first word of an arena says whether it is taken: the writer sets it, and the reader frees it when it has copied
what it needs, or when the last tensor that lies in the arena is gone. Then the writer may write there again. The second
word is the number of the message that lies there, so that nobody takes a later message for the one that was told.

A memfd (memfd_create(2)) is counted against the process' memory, not against the size of /dev/shm, and nothing can be
left behind or guessed. Fresh bytes are written by write(2), the quickest way to fresh pages, which says ENOSPC where a
store through a mapping would be killed by SIGBUS; bytes that exist already are copied to directly.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from struct import Struct
from typing import TYPE_CHECKING

import numpy as np

from xrank.errors import NoSpaceError
from xrank.workspace.memory_file import MemoryFile, MemoryPlace, open_place

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Arena", "AttachedArena", "Lease", "new_buffer"]

ALIGNMENT = 64
_HEAD_NBYTES = ALIGNMENT
_USE = Struct("<q")
_FREE, _TAKEN, _LENT, _ABANDONED = range(4)
_NUMBER = Struct("<q")
_NUMBER_OFFSET = _USE.size
_NO_MESSAGE = 0
_STEP_NBYTES = 2 << 20
_HUGE_NBYTES = 4 << 20
"""Buffers from this size on get huge pages: fresh small pages cost three times the copy."""


class Arena:
    """The writer's side of one arena.

    Args:
        nbytes: that it is to hold at least; no memory is taken before it is written.
    """

    def __init__(self, nbytes: int) -> None:
        total = -(-(nbytes + _HEAD_NBYTES) // _STEP_NBYTES) * _STEP_NBYTES
        self.capacity = total - _HEAD_NBYTES
        self._written = 0
        self._num_messages = 0
        self._file = MemoryFile()
        try:
            os.ftruncate(self._file.fd, total)
            self.place: MemoryPlace = self._file.seal(writable=True)
            self._memory = mmap.mmap(self._file.fd, total)
            self._write_fresh(0, memoryview(bytes(_HEAD_NBYTES)))
        except BaseException:
            self._file.close()
            raise

    @property
    def is_free(self) -> bool:
        """Whether nobody reads it any more."""
        return bool(_USE.unpack_from(self._memory)[0] == _FREE)

    @property
    def is_abandoned(self) -> bool:
        """Whether nobody will say when it is free."""
        return bool(_USE.unpack_from(self._memory)[0] == _ABANDONED)

    def take(self) -> int:
        """Say that it is in use, until its reader says otherwise; return the new message's number."""
        self._num_messages += 1
        _NUMBER.pack_into(self._memory, _NUMBER_OFFSET, self._num_messages)
        _USE.pack_into(self._memory, 0, _TAKEN)
        return self._num_messages

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor's elements, row-major, to `offset`; writes to fresh memory go upwards, without a gap of a page.

        Raises:
            NoSpaceError: the system has no memory for it.
        """
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return
        if offset + nbytes <= self._written:
            target = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=_HEAD_NBYTES + offset)
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        self.write_bytes(offset, flat.numpy().data)

    def write_bytes(self, offset: int, content: bytes | memoryview) -> None:
        """Put bytes at `offset`; as `write`."""
        self._write_fresh(_HEAD_NBYTES + offset, memoryview(content))
        self._written = max(self._written, offset + len(content))

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
        _NUMBER.pack_into(self._memory, _NUMBER_OFFSET, _NO_MESSAGE)
        self.let_go()

    def let_go(self) -> None:
        """Let go of the memory in this process, and of nothing in those that share it."""
        self._file.close()
        # A tensor made by `write` may still hold the mapping for a moment; it goes with the last of them.
        del self._memory


class Lease:
    """The reader's use of an arena, from the lending until the last of what was lent is gone."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.is_over = False
        self._memory = memory
        self._is_abandoned = False
        _leases.add(self)

    def end(self) -> None:
        """Let the writer have the arena."""
        self.is_over = True
        if not self._is_abandoned:
            _USE.pack_into(self._memory, 0, _FREE)

    def abandon(self) -> None:
        """Let the writer go on without the arena."""
        self._is_abandoned = True
        _USE.pack_into(self._memory, 0, _ABANDONED)


_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


def _abandon_leases() -> None:
    # Two processes are about to hold the same tensors, and neither will know when the other has dropped them.
    for lease in [lease for lease in _leases if not lease.is_over]:
        lease.abandon()


os.register_at_fork(before=_abandon_leases)


class AttachedArena:
    """A reader's side: what the writer put there, until the reader says that it needs it no more."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

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
        is_taken = _USE.unpack_from(self._memory)[0] == _TAKEN
        return is_taken and bool(_NUMBER.unpack_from(self._memory, _NUMBER_OFFSET)[0] == number)

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
        _USE.pack_into(self._memory, 0, _FREE)

    def lend(self, parts: list[tuple[int, int]]) -> tuple[list[memoryview], Lease]:
        """Return (offset, nbytes) parts as they lie in the arena; the writer has it back when the last of them is gone.

        What is made of a part (a tensor, a view of it) holds it. When this process forks meanwhile, the writer never
        has it back, and takes another.
        """
        _USE.pack_into(self._memory, 0, _LENT)
        # One array that all parts hold, and nobody else: its end is the end of the last of them.
        whole = np.frombuffer(self._memory, np.uint8)
        lease = Lease(self._memory)
        weakref.finalize(whole, lease.end).atexit = False
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
