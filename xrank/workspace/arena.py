"""Arenas: memory that a writer keeps and readers map; it has no name, and ends with its last user.

A memfd (memfd_create(2)) is counted against the process' memory, not against the size of /dev/shm, and nothing can be
left behind or guessed. The first bytes of an arena are written by write(2), the quickest way to fresh pages, which says
ENOSPC where a store through a mapping would be killed by SIGBUS; bytes that exist already are copied to directly.
"""

from __future__ import annotations

import errno
import mmap
import os
from math import prod
from typing import TYPE_CHECKING

from xrank.errors import NoSpaceError

if TYPE_CHECKING:
    import torch

__all__ = ["ALIGNMENT", "Arena", "AttachedArena", "new_tensor"]

ALIGNMENT = 64
_STEP_NBYTES = 2 << 20
_HUGE_NBYTES = 4 << 20
"""Tensors from this size on get huge pages: fresh small pages cost three times the copy."""


class Arena:
    """The writer's side of one arena."""

    def __init__(self, nbytes: int) -> None:
        self.capacity = -(-nbytes // _STEP_NBYTES) * _STEP_NBYTES
        self.fd = os.memfd_create("xrank-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.fd, self.capacity)
            self._memory = mmap.mmap(self.fd, self.capacity)
        except BaseException:
            os.close(self.fd)
            raise
        self._written = 0

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor's elements, row-major, to `offset`.

        Raises:
            NoSpaceError: the system has no memory for it.
        """
        import torch

        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return
        if offset + nbytes <= self._written:
            target = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
            return
        flat = tensor.resolve_conj().resolve_neg().cpu().contiguous().view(-1).view(torch.uint8)
        self._write_fresh(offset, flat.numpy().data)
        self._written = max(self._written, offset + nbytes)

    def write_bytes(self, offset: int, content: bytes) -> None:
        """Put bytes at `offset`; errors as `write`."""
        self._write_fresh(offset, memoryview(content))

    def _write_fresh(self, offset: int, data: memoryview) -> None:
        needed = len(data)
        while data:
            try:
                n = os.pwrite(self.fd, data, offset)
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
            data, offset = data[n:], offset + n

    def close(self) -> None:
        """Let go of the memory; readers that map it keep it."""
        os.close(self.fd)
        # A tensor made by `write` may still hold the mapping for a moment; it goes with the last of them.
        del self._memory


class AttachedArena:
    """A reader's side: reads what the writer put there."""

    def __init__(self, fd: int) -> None:
        """Map the arena; the descriptor stays the caller's."""
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)

    def copy(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor of the reader's own with the elements at `offset`."""
        import torch

        made = new_tensor(shape, getattr(torch, dtype))
        nbytes = made.numel() * made.element_size()
        if nbytes:
            source = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes, offset=offset)
            made.view(-1).view(torch.uint8).copy_(source)
        return made

    def read_bytes(self, offset: int, nbytes: int) -> bytes:
        """Return the bytes at `offset`."""
        return self._memory[offset : offset + nbytes]


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor on the CPU; a large one in huge pages of its own."""
    import torch

    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _HUGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
