"""Memory of another process, read by the kernel without that process's help (process_vm_readv(2)).

A process number proves nothing: another process may have it by now, or the process may have freed the lent memory. So
a lender keeps a sign in its memory, 16 random bytes, for as long as it lends; and every read copies the sign too, after
the data. If the sign is still there, the data were the lent ones.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
import threading
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.system import c_library

_FOR_WRITING = 0x200  # CPython, Include/cpython/object.h: PyBUF_WRITE
_SET_PTRACER = 0x59616D61  # linux/prctl.h: PR_SET_PTRACER
_ANY_PTRACER = ctypes.c_ulong(-1)  # linux/prctl.h: PR_SET_PTRACER_ANY
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_SIGN_NBYTES = 16
MAX_SPANS = 1024
"""Spans of one side in one call (linux/uio.h: UIO_MAXIOV)."""
SpanArray: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (address, bytes), laid out as struct iovec; shape [n, 2]."""
_MAX_NBYTES = 256 << 20
"""Bytes of one call; the kernel's limit is a little less than 2 GiB."""

# A ctypes array type for each length would cost more than the copy.
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_memory_view.restype = ctypes.py_object

_LIBC = c_library()


def memory_at(address: int, nbytes: int) -> memoryview:
    """Return this process's memory at an address; the caller keeps it alive."""
    memory: memoryview = _memory_view(address, nbytes, _FOR_WRITING)
    return memory


def address_of(memory: memoryview) -> int:
    """Return the address of writable memory of at least one byte, for a call that ends before the memory is freed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class LendingEndedError(Exception):
    """The process has ended, or no longer lends its memory."""


class UnreadableMemoryError(Exception):
    """The kernel does not let this process read there: another user's or namespace's memory, or a device's."""


class LendingSign:
    """A sign in this process's memory for as long as it lends some of it.

    Yama, a security module of the kernel that Ubuntu and others use, lets only a parent read a process's memory. While
    any sign stands, this process asks Yama to let all processes of the user read and trace it, as on a kernel without
    Yama. The end of the last sign revokes this, and with it any such request of the program itself.
    """

    def __init__(self) -> None:
        self._sign = (ctypes.c_ubyte * _SIGN_NBYTES).from_buffer_copy(secrets.token_bytes(_SIGN_NBYTES))
        self.address = ctypes.addressof(self._sign)
        self.content = bytes(self._sign)
        self._stands = True
        _readers.allow()

    def end(self) -> None:
        """Erase the sign, before any lent memory is freed."""
        if self._stands:
            self._stands = False
            ctypes.memset(self.address, 0, _SIGN_NBYTES)
            _readers.forbid()


class _Readers:
    """Lets other processes of this user read this one's memory while a sign stands."""

    def __init__(self) -> None:
        self._num_signs = 0
        self._lock = threading.Lock()

    def allow(self) -> None:
        with self._lock:
            self._num_signs += 1
            if self._num_signs == 1:
                self._set_ptracer(_ANY_PTRACER)

    def forbid(self) -> None:
        with self._lock:
            self._num_signs -= 1
            if self._num_signs == 0:
                self._set_ptracer(ctypes.c_ulong(0))

    def _set_ptracer(self, tracer: ctypes.c_ulong) -> None:
        with suppress(OSError), open(_YAMA, encoding="ascii") as scope:  # without Yama, nothing is forbidden
            if scope.read().strip() == "1":  # 0 forbids nothing; 2 and 3 ignore the request
                zero = ctypes.c_ulong(0)
                assert _LIBC is not None  # Yama is Linux's
                _LIBC.prctl(ctypes.c_int(_SET_PTRACER), tracer, zero, zero, zero)


_readers = _Readers()


class _Span(ctypes.Structure):
    """struct iovec (process_vm_readv(2))."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class PeerMemory:
    """The memory that another process of this host lends; several threads may read at once.

    Args:
        pid: its number in this process's namespace.
        sign_address: address of its sign.
        sign: content of its sign.

    Raises:
        LendingEndedError, UnreadableMemoryError: the sign cannot be read there.
    """

    def __init__(self, pid: int, sign_address: int, sign: bytes) -> None:
        if len(sign) != _SIGN_NBYTES:
            raise UnreadableMemoryError
        self._pid, self._sign_address, self._sign = pid, sign_address, sign
        self.check_lent()

    def check_lent(self) -> None:
        """Read only the sign; errors as in `read_into`."""
        copy = ctypes.create_string_buffer(_SIGN_NBYTES)
        if self._read([(self._sign_address, ctypes.addressof(copy), _SIGN_NBYTES)]) < _SIGN_NBYTES:
            raise UnreadableMemoryError
        if copy.raw != self._sign:
            raise LendingEndedError

    def read_into(self, address: int, into: memoryview) -> None:
        """Fill `into` with that process's bytes at the address.

        Raises:
            LendingEndedError: the process no longer lends them.
            UnreadableMemoryError: the kernel cannot read these bytes. Part of `into` may be filled.
        """
        for start in range(0, len(into), _MAX_NBYTES):
            part = into[start : start + _MAX_NBYTES]
            copy = ctypes.create_string_buffer(_SIGN_NBYTES)
            # The kernel reads in this order, so the sign is read after the data (process_vm_readv(2)).
            count = self._read(
                [
                    (address + start, address_of(part), len(part)),
                    (self._sign_address, ctypes.addressof(copy), _SIGN_NBYTES),
                ]
            )
            if count < len(part) + _SIGN_NBYTES:
                self.check_lent()  # freed memory cannot be read either
                raise UnreadableMemoryError
            if copy.raw != self._sign:
                raise LendingEndedError

    def copy_spans(self, there: SpanArray, here: SpanArray) -> None:
        """Copy spans of that process's memory to spans of this one's, in order; the caller checks the sign afterwards.

        Args:
            there: (address, bytes) of each span to read; at most `MAX_SPANS`.
            here: spans to fill, of as many bytes in all; they may be cut otherwise.

        Raises:
            LendingEndedError: the process has ended.
            UnreadableMemoryError: the kernel cannot read these bytes. Part of them may be copied.
        """
        assert len(there) <= MAX_SPANS and len(here) <= MAX_SPANS
        count: int = _process_vm_readv(self._pid, here.ctypes.data, len(here), there.ctypes.data, len(there), 0)
        if count == int(there[:, 1].sum()):
            return
        if count < 0 and ctypes.get_errno() == errno.ESRCH:
            raise LendingEndedError
        self.check_lent()  # freed memory cannot be read either
        raise UnreadableMemoryError

    def _read(self, spans: list[tuple[int, int, int]]) -> int:
        """Copy spans of (remote address, local address, bytes), and return the number of copied bytes."""
        there, here = (_Span * len(spans))(), (_Span * len(spans))()
        for i, (there_address, here_address, nbytes) in enumerate(spans):
            there[i] = _Span(there_address, nbytes)
            here[i] = _Span(here_address, nbytes)
        number = ctypes.c_ulong(len(spans))
        count: int = _process_vm_readv(self._pid, here, number, there, number, 0)
        if count < 0:
            if ctypes.get_errno() == errno.ESRCH:
                raise LendingEndedError
            return 0
        return count


def _unknown_call(*arguments: object) -> int:
    ctypes.set_errno(errno.ENOSYS)
    return -1


_process_vm_readv: Any = getattr(_LIBC, "process_vm_readv", _unknown_call)
if _process_vm_readv is not _unknown_call:
    _process_vm_readv.argtypes = (
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    )
    _process_vm_readv.restype = ctypes.c_ssize_t
