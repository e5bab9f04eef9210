"""Memory of another process, read by the kernel without that process's help, or by Mooncake's transfer engine."""

from __future__ import annotations

import ctypes
import errno
import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.environment import environ
from xrank.errors import UsageError, option
from xrank.ranks.byte_service import host_addresses
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

    The constructor reads the sign with which the other lends, which is at `sign_address`.
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

        Both are (address, bytes), at most `MAX_SPANS`, of as many bytes in all, and may be cut differently. Errors as
        of `read_into`.
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


_MAX_SPANS = 512
"""Spans of one call: its TCP transport refused 4,096 as a full queue."""


def is_mooncake(wire: str | None, call: str) -> bool:
    """Return whether the ``wire`` of `call` names Mooncake; UsageError if its engine cannot be imported."""
    if wire is None:
        return False
    if wire != "mooncake":
        next_step = f"leave {option('wire')} out: one host reads by the kernel, several by sockets"
        raise UsageError(f"{call} knows no {option('wire')} of this name", got=repr(wire), next_step=next_step)
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"{call} cannot load Mooncake's transfer engine",
            got=str(error),
            want=f"the package of {option('wire')}='mooncake'",
            next_step="run pip install mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda without CUDA, "
            f"and install the libraries that it names; or leave {option('wire')} out",
        ) from None
    return True


class MooncakeEngine:
    """This process's end of Mooncake; several threads may read at once.

    The environment says how it transfers, as for Mooncake's own programs: ``MOONCAKE_PROTOCOL`` (``tcp``, the default,
    or ``rdma``), ``MOONCAKE_DEVICE`` (names of network devices; empty: Mooncake chooses) and
    ``MOONCAKE_LOCAL_HOSTNAME`` (the address under which other hosts reach this one; default: the first that it has).

    Args:
        spans: (address, bytes) of the memory that others read, or that this process fills; it must live until `close`.
            Empty and overlapping spans are allowed.

    Raises:
        UsageError: Mooncake cannot transfer by this protocol or device, or cannot register the memory.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self._spans = _merge_spans(spans)
        self._lock = threading.Lock()
        self._num_readers, self._has_failed = 0, False
        self._native = _start(self._spans)

    @property
    def session(self) -> str:
        """The name under which other processes reach this engine."""
        return f"{_host()}:{self._native.get_rpc_port()}"

    def read(self, session: str, here: list[int], there: list[int], nbytes: list[int]) -> bool:
        """Copy spans of another process's memory to spans of this one's; return False if a read of any thread failed.

        Once all threads have left a failed read, no byte arrives any more. The next read begins anew.
        """
        with self._lock:
            if self._has_failed:
                return False
            if self._native is None:
                self._native = _start(self._spans)
            self._num_readers += 1
        is_done = False
        try:
            is_done = not self._native.batch_transfer_sync_read(session, here, there, nbytes)
        finally:
            with self._lock:
                self._num_readers -= 1
                self._has_failed |= not is_done
                if self._has_failed and not self._num_readers:
                    self._end()
        return is_done

    def close(self) -> None:
        """End all transfers; no thread may read. Further calls do nothing."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._has_failed = False
        if self._native is not None:
            for address, _ in self._spans:
                self._native.unregister_memory(address)
            self._native = None  # Mooncake has no call that ends an engine


class MooncakeMemory:
    """The memory that another process, by the name of its session, lends; several threads may read at once."""

    def __init__(self, engine: MooncakeEngine, session: str) -> None:
        self._engine, self._session = engine, session

    def copy_spans(self, there: SpanArray, here: SpanArray) -> None:
        """Copy spans as `PeerMemory.copy_spans`, to memory that the engine has; after an error no more bytes arrive."""
        pairs = pair_spans(there, here)
        for start in range(0, len(pairs), _MAX_SPANS):
            sources, targets, nbytes = pairs[start : start + _MAX_SPANS].T.tolist()
            if not self._engine.read(self._session, targets, sources, nbytes):
                raise UnreadableMemoryError


def pair_spans(there: SpanArray, here: SpanArray) -> SpanArray:
    """Return rows of (address there, address here, bytes): both sides cut wherever either is."""
    sides = (there, here)
    ends = [np.cumsum(side[:, 1]) for side in sides]
    cuts = np.union1d(*ends)
    starts = np.concatenate((np.zeros(1, np.uint64), cuts[:-1]))[: len(cuts)]
    addresses = []
    for side, its in zip(sides, ends, strict=True):
        owner = np.searchsorted(its, starts, side="right")
        addresses.append(side[owner, 0] + (starts - (its - side[:, 1])[owner]))
    return np.stack((*addresses, cuts - starts), axis=1)


def _start(spans: Sequence[tuple[int, int]]) -> Any:
    """Return a new engine of Mooncake that has the spans."""
    from mooncake.engine import TransferEngine

    native = TransferEngine()
    protocol, device = environ().get("MOONCAKE_PROTOCOL", "tcp"), environ().get("MOONCAKE_DEVICE", "")
    if native.initialize(_host(), "P2PHANDSHAKE", protocol, device):
        raise UsageError(
            "Mooncake's transfer engine does not start",
            got=f"MOONCAKE_PROTOCOL={protocol}, MOONCAKE_DEVICE={device}, MOONCAKE_LOCAL_HOSTNAME={_host()}",
            want="a protocol, a device and an address that this host has",
            next_step=f"set these variables, or leave {option('wire')} out",
        )
    for address, nbytes in spans:
        if native.register_memory(address, nbytes):
            raise UsageError(
                f"Mooncake cannot register {nbytes:,} bytes of this process's memory",
                want="memory that its devices can read",
                next_step=f"raise the limit of locked memory (ulimit -l), or leave {option('wire')} out",
            )
    return native


def _host() -> str:
    return environ().get("MOONCAKE_LOCAL_HOSTNAME") or host_addresses()[0]


def _merge_spans(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans by rising address; those that touch become one: Mooncake refuses overlapping ones."""
    merged: list[tuple[int, int]] = []
    for address, nbytes in sorted(span for span in spans if span[1]):
        if merged and address <= sum(merged[-1]):
            first = merged[-1][0]
            merged[-1] = (first, max(sum(merged[-1]), address + nbytes) - first)
        else:
            merged.append((address, nbytes))
    return merged
