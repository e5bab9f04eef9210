"""The memory that a cluster's processes share: one anonymous file, created before they are forked.

The file is sparse: its size allows for everything that any end could send, but only written pages take memory.

    the board     the current wait of each end          `xrank.virtual.channels.board`
    the rings     a head for each ordered pair of ends  `xrank.virtual.channels.message_ring`
    the tables    which blocks of an end are in use     `xrank.virtual.channels.block_arena`
    the arenas    an end's blocks: rings and arrays

An *end* is a device, numbered by its place in the mesh, or the host, which has the last number. Words are loaded and
stored atomically, and other processes see stores in program order, as x86-64 guarantees (`xrank.ranks.wire`).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache

from xrank.errors import NoSpaceError, UsageError
from xrank.ranks.wire import STORES_ARE_ORDERED

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
