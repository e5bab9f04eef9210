"""Memory that ranks lend each other: reads of other processes' memory, offers, and a source of many ranks' bytes."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from xrank.environment import environ
from xrank.errors import (
    AGAIN,
    ContradictionError,
    CorruptError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
    option,
)
from xrank.ranks.byte_service import (
    AnswerKind,
    PeerConnection,
    PeerGoneError,
    PeerRefusalError,
    PeerService,
    ServicePlace,
    derive_token,
    host_addresses,
    read_view,
)
from xrank.ranks.failure import FailureRecord
from xrank.ranks.memory import LocalBytes, TensorBytes, address_of
from xrank.ranks.waits import Peer, is_readable, process_space
from xrank.storage.entries import Entry
from xrank.system import c_library, host_name, keep_descriptors_free

if TYPE_CHECKING:
    from xrank.ranks.team import Team

_SET_PTRACER = 0x59616D61  # linux/prctl.h: PR_SET_PTRACER
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"
_SIGN_NBYTES = 16
MAX_SPANS = 1024
"""Spans of one side in one call (linux/uio.h: UIO_MAXIOV)."""
SpanArray: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (address, bytes), laid out as struct iovec; shape [n, 2]."""
_MAX_NBYTES = 256 << 20
"""Bytes of one call; the kernel's limit is a little less than 2 GiB."""

_LIBC = c_library()


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

    _num_standing = 0
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._sign = (ctypes.c_ubyte * _SIGN_NBYTES).from_buffer_copy(os.urandom(_SIGN_NBYTES))
        self.address = ctypes.addressof(self._sign)
        self.content = bytes(self._sign)
        self._stands = True
        self._count(1)

    def end(self) -> None:
        """Erase the sign, before any lent memory is freed."""
        if self._stands:
            self._stands = False
            ctypes.memset(self.address, 0, _SIGN_NBYTES)
            self._count(-1)

    @classmethod
    def _count(cls, change: int) -> None:
        with cls._lock:
            cls._num_standing += change
            if cls._num_standing == max(0, change):  # the first sign, or none
                tracer, zero = ctypes.c_ulong(-1 if change > 0 else 0), ctypes.c_ulong(0)  # PR_SET_PTRACER_ANY, or none
                with suppress(OSError), open(_YAMA, encoding="ascii") as scope:  # without Yama, nothing is forbidden
                    if scope.read().strip() == "1":  # 0 forbids nothing; 2 and 3 ignore the request
                        assert _LIBC is not None  # Yama is Linux's
                        _LIBC.prctl(ctypes.c_int(_SET_PTRACER), tracer, zero, zero, zero)


class PeerMemory:
    """The memory that another process of this host lends; several threads may read at once.

    Methods and the constructor raise LendingEndedError if the process has ended or no longer lends the memory: its sign
    is then not at the address. They raise UnreadableMemoryError if the kernel cannot read the memory.
    """

    def __init__(self, pid: int, sign_address: int, sign: bytes) -> None:
        if len(sign) != _SIGN_NBYTES:
            raise UnreadableMemoryError
        self._pid, self._sign, self._sign_span = pid, sign, (sign_address, len(sign))
        self.check_lent()

    def check_lent(self) -> None:
        """Read only the sign."""
        copy = ctypes.create_string_buffer(_SIGN_NBYTES)
        if self._read([self._sign_span], [(ctypes.addressof(copy), _SIGN_NBYTES)]) < _SIGN_NBYTES:
            raise UnreadableMemoryError
        if copy.raw != self._sign:
            raise LendingEndedError

    def read_into(self, address: int, into: memoryview) -> None:
        """Fill `into` with that process's bytes at the address; after an error, part of it may be filled."""
        for start in range(0, len(into), _MAX_NBYTES):
            part = into[start : start + _MAX_NBYTES]
            copy = ctypes.create_string_buffer(_SIGN_NBYTES)
            # The kernel reads in this order, so the sign is read after the data (process_vm_readv(2)).
            here = [(address_of(part), len(part)), (ctypes.addressof(copy), _SIGN_NBYTES)]
            count = self._read([(address + start, len(part)), self._sign_span], here)
            if count < len(part) + _SIGN_NBYTES:
                self.check_lent()  # freed memory cannot be read either
                raise UnreadableMemoryError
            if copy.raw != self._sign:
                raise LendingEndedError

    def copy_spans(self, there: SpanArray, here: SpanArray) -> None:
        """Copy spans of that process's memory to spans of this one's, in order; the caller checks the sign afterwards.

        Both are (address, bytes), at most `MAX_SPANS`, of as many bytes in all, and may be cut differently.
        """
        assert len(there) <= MAX_SPANS and len(here) <= MAX_SPANS
        if self._read(there, here) != int(there[:, 1].sum()):
            self.check_lent()  # freed memory cannot be read either
            raise UnreadableMemoryError

    def _read(self, there: SpanArray | list[tuple[int, int]], here: SpanArray | list[tuple[int, int]]) -> int:
        """Copy spans of (address, bytes), and return the number of copied bytes, 0 if the kernel copies nothing."""
        remote, local = np.asarray(there, np.uint64), np.asarray(here, np.uint64)
        count: int = _process_vm_readv(self._pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
        if count < 0 and ctypes.get_errno() == errno.ESRCH:
            raise LendingEndedError
        return max(0, count)


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
"""Spans of one call of Mooncake: its TCP transport refused 4,096 as a full queue."""


def is_mooncake(wire: str | None, call: str) -> bool:
    """Return whether the ``wire`` of `call` names Mooncake; UsageError if its engine cannot be imported."""
    if wire is None:
        return False
    if wire != "mooncake":
        next_step = f"leave {option('wire')} out: ranks of one host read through the kernel, others through sockets"
        raise UsageError(f"{call} has no {option('wire')} of this name", got=repr(wire), next_step=next_step)
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

    Spans are (address, bytes) of the memory that others read, or that this process fills; it must live until `close`.
    Empty and overlapping ones are allowed.
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


class MemoryOffer:
    """The memory that this rank lends, from construction until `close`.

    Args:
        views: bytes of tensors, which must not change meanwhile.
        across_hosts: whether ranks on other hosts also read; the offer then listens on a port.
        by_mooncake: whether Mooncake may read the views that are in a row in memory, too.
        addresses: of the port, as `PeerService` takes them.
        secret: shared with the readers, who add the token to the description (`share_offers`); None: it is in it.
        is_alone: whether no other process reads; the description is then empty.
    """

    def __init__(
        self,
        views: Sequence[LocalBytes],
        *,
        across_hosts: bool = True,
        by_mooncake: bool = False,
        addresses: Sequence[str] = (),
        secret: bytes | None = None,
        is_alone: bool = False,
    ) -> None:
        self.views = tuple(views)
        spans = [(view.address, view.nbytes) for view in self.views if view.address]
        self._mooncake = MooncakeEngine(spans) if by_mooncake else None
        self._service: PeerService | None = None
        if not is_alone:
            numbered = dict(enumerate(self.views))
            self._service = PeerService(numbered, across_hosts=across_hosts, addresses=addresses, secret=secret)
            self._sign = LendingSign()

    def describe(self) -> dict[str, Any]:
        """Return a JSON description with which other ranks read the offer; with a token, only those may receive it."""
        if self._service is None:
            return {}
        return {
            "host": host_name(),
            "pid": os.getpid(),
            "space": process_space(),
            # A reader looks for the nonce at its address: if this process has ended, its number may be another one's.
            "nonce": self._sign.content.hex(),
            "nonce_address": self._sign.address,
            **self._service.describe(),
            "mooncake": None if self._mooncake is None else self._mooncake.session,
            "views": [[view.address, view.nbytes] for view in self.views],
        }

    def check_unchanged(self) -> None:
        """Raise ContradictionError if torch has counted a change in place of the lent tensors."""
        for index, view in enumerate(self.views):
            if isinstance(view, TensorBytes) and not view.is_unchanged:
                raise ContradictionError(
                    f"tensor {index} of this rank was changed in place while other ranks read it",
                    want="the same values until all ranks have read them",
                    next_step="do not step the optimizer meanwhile, in any thread or hook; then repeat the call",
                )

    @property
    def failure(self) -> Exception | None:
        """The first exception of a read for another rank."""
        return None if self._service is None else self._service.failure

    def close(self) -> None:
        """Stop lending. Ranks that still read get an error. Further calls do nothing."""
        if self._service is not None:
            self._sign.end()  # first: from here on a reader trusts no bytes that it has copied by itself
            self._service.close()
        if self._mooncake is not None:
            self._mooncake.close()


def share_offers(
    team: Team,
    what: str,
    offer: MemoryOffer,
    content: Mapping[str, Any],
    check: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Return the contents of all ranks of a team, each with its offer; `check` runs on the first rank alone."""
    own = json.dumps({**content, "offer": offer.describe()})

    def collect(_: object, texts: Sequence[str]) -> list[str]:
        check()
        return list(texts)

    _, texts = team.agree(what, lambda: own, lambda text: text, collect)
    parts: list[dict[str, Any]] = [json.loads(text) for text in texts]
    for one in parts:  # the store, through which the texts came, must not have the token
        one["offer"]["token"] = derive_token(team.secret, str(one["offer"].get("socket"))).hex()
    return parts


class PeerOffer(Struct, eq=False):
    """Another rank's offer: its description, and the ways in which this process can read it."""

    rank: int
    host: str
    pid: int
    space: str
    nonce: bytes
    nonce_address: int
    place: ServicePlace
    mooncake: str | None
    """Session of its engine."""
    addresses: np.ndarray[tuple[int], np.dtype[np.uint64]]
    """Address of each view; 0 if its bytes are not in a row in memory."""
    nbytes: np.ndarray[tuple[int], np.dtype[np.int64]]
    unreadable: set[int] = field(default_factory=set)
    memory: PeerMemory | None = None
    life: int | None = None
    """A pidfd, if its process can be watched from here."""
    _is_gone: bool = False

    @classmethod
    def from_description(cls, rank: int, description: Mapping[str, Any]) -> PeerOffer:
        """Return the offer of a `MemoryOffer` description; CorruptError if it is invalid."""
        whole = Entry(
            description,
            lambda fault: CorruptError(
                f"the description of the tensors of rank {rank} is invalid",
                rank=rank,
                got=fault,
                want="the description of MemoryOffer.describe",
                next_step="use the same version of xrank on all ranks",
            ),
        )
        mooncake, views = whole.get("mooncake"), whole["views"].value
        if not isinstance(views, list) or not all(map(_is_view, views)):  # plain checks: there are many
            whole["views"].refuse("a list of addresses and sizes")
        return cls(
            rank=rank,
            host=whole["host"].text(),
            pid=whole["pid"].count(low=1, below=1 << 31),
            space=whole["space"].text(),
            nonce=whole["nonce"].digest(),
            nonce_address=whole["nonce_address"].count(below=1 << 64),
            place=ServicePlace.from_entry(whole),
            mooncake=None if mooncake is None else mooncake.text(),
            addresses=np.array([address or 0 for address, _ in views], np.uint64),
            nbytes=np.array([nbytes for _, nbytes in views], np.int64),
        )

    def watch(self, *, direct: bool) -> None:
        """Watch the peer's process if it is on this host; with `direct`, try to read its memory by the kernel.

        On another host or in another namespace, its process number belongs to another process, which is not touched.
        """
        if self.space != process_space():
            return
        try:
            self.life = Peer(self.rank, self.host, self.pid, self.space).open_life()
            if self.life is not None:
                keep_descriptors_free(self.life)
        except ProcessLookupError:
            self._is_gone = True
        if direct:
            # If the kernel refuses, the peer's service sends the bytes.
            with suppress(LendingEndedError, UnreadableMemoryError):
                self.memory = PeerMemory(self.pid, self.nonce_address, self.nonce)

    @property
    def has_ended(self) -> bool:
        """Whether its process is known to have ended."""
        return self._is_gone or (self.life is not None and is_readable(self.life))

    def close(self) -> None:
        """Stop watching the process."""
        if self.life is not None:
            os.close(self.life)
            self.life = None


def _is_view(value: Any) -> bool:
    if type(value) is not list or len(value) != 2:
        return False
    address, nbytes = value
    return (address is None or (type(address) is int and 0 <= address < 1 << 64)) and (
        type(nbytes) is int and 0 <= nbytes < 1 << 63
    )


SpanMemory: TypeAlias = PeerMemory | MooncakeMemory
"""Another process's memory, of which many spans are copied by one call."""
_GRACE_SECONDS = 5.0
"""Wait for the reason after a rank has gone: from the rank itself, or from others that noticed."""
_PAUSE_SECONDS = 0.05
_MAX_IDLE = 64
"""Number of connections kept open, over all peers."""
_CALL = "lending its tensors"
_SAME_CALL = f"let all ranks {AGAIN}, with the same version of xrank"


class PeerSource:
    """Reads records from the memory of ranks; a `Source`, which several threads may use at once.

    The kernel reads a peer on this host if that is proven to work (`PeerMemory`); the peer's service sends the rest.

    Args:
        own: this rank's offer; it stays open while this source is.
        offers: descriptions of the other ranks' offers, by rank.
        record_rank: rank that holds a record, by record; `record_view` is the index of the view in that rank's offer.
        check: raises if a rank is known to have failed; one thread at a time calls it.
        timeout_seconds: time for which a peer may be silent.
        direct: whether the kernel may read other processes' memory.
        grace_seconds: time in which `check` may still give the reason for a peer's end.
        mooncake: copies the spans of peers that lend by Mooncake, in place of the kernel.
    """

    def __init__(
        self,
        own: MemoryOffer,
        rank: int,
        offers: Mapping[int, dict[str, Any]],
        record_rank: Sequence[int],
        record_view: Sequence[int],
        *,
        check: Callable[[], object],
        timeout_seconds: float,
        direct: bool = True,
        grace_seconds: float = _GRACE_SECONDS,
        mooncake: MooncakeEngine | None = None,
    ) -> None:
        self._own, self._rank = own, rank
        self._record_rank, self._record_view = record_rank, record_view
        self._check, self._check_lock = check, threading.Lock()
        self._timeout_seconds, self._grace_seconds = timeout_seconds, grace_seconds
        self._idle: deque[tuple[PeerOffer, PeerConnection]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        others = {other: description for other, description in offers.items() if other != rank}
        self._peers = {other: PeerOffer.from_description(other, one) for other, one in others.items()}
        self._remote: dict[int, MooncakeMemory] = {}
        for peer in self._peers.values():
            peer.watch(direct=direct)
            if mooncake is not None and peer.mooncake is not None:
                self._remote[peer.rank] = MooncakeMemory(mooncake, peer.mooncake)

    @property
    def direct_ranks(self) -> list[int]:
        """Peers whose memory the kernel reads."""
        return sorted(rank for rank, peer in self._peers.items() if peer.memory is not None)

    def find_memory(self, record: int) -> tuple[SpanMemory, int] | None:
        """Return a peer's memory and the address of a record in it; None if nothing copies spans of it."""
        peer, view = self._peers.get(int(self._record_rank[record])), int(self._record_view[record])
        if peer is None or view >= len(peer.nbytes) or not peer.addresses[view]:
            return None
        memory = self._remote.get(peer.rank) or peer.memory
        return None if memory is None else (memory, int(peer.addresses[view]))

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        rank, view = int(self._record_rank[record]), int(self._record_view[record])
        if rank == self._rank:
            self._find_own(view, start, len(into)).read_into(start, into)
            return
        peer = self._peers[rank]
        if view >= len(peer.nbytes) or start < 0 or start + len(into) > peer.nbytes[view]:
            raise _make_mismatch_error(rank, view, start + len(into))
        if not into:
            return
        if peer.memory is not None and peer.addresses[view] and view not in peer.unreadable:
            try:
                peer.memory.read_into(int(peer.addresses[view]) + start, into)
            except UnreadableMemoryError:
                peer.unreadable.add(view)  # for example a device's memory, which its owner can read
            except LendingEndedError:
                raise self._explain_end(peer, "it ended, or its memory is no longer readable") from None
            else:
                return
        self._request(peer, view, start, into)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes in `staging`; bytes of this rank's own memory as a view, if they are in a row."""
        if int(self._record_rank[record]) == self._rank:
            own = self._find_own(int(self._record_view[record]), start, nbytes).find_row(start, nbytes)
            if own is not None:
                return own.toreadonly()
        # Strided or on a device, so it must be copied.
        data = staging[:nbytes]
        self.read_into(record, start, data)
        return data

    def check_unchanged(self) -> None:
        """Raise ContradictionError if this rank's own offer has changed; each rank checks its own."""
        self._own.check_unchanged()

    def close(self) -> None:
        """Close all connections; no read may be under way. Further calls do nothing."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.popleft()[1].close()
        for peer in self._peers.values():
            peer.close()

    def _find_own(self, view: int, start: int, nbytes: int) -> LocalBytes:
        views = self._own.views
        if view >= len(views) or start < 0 or start + nbytes > views[view].nbytes:
            raise _make_mismatch_error(self._rank, view, start + nbytes)
        return views[view]

    def _request(self, peer: PeerOffer, view: int, start: int, into: memoryview) -> None:
        """Read through the peer's service."""
        try:
            connection = read_view(self._take_idle(peer), peer.place, view, start, into, partial(self._tick, peer))
        except PeerGoneError as error:
            raise self._explain_end(peer, str(error)) from None
        except PeerRefusalError as error:
            if error.kind == AnswerKind.FAILED:
                raise FailureRecord(peer.rank, peer.host, peer.pid, str(error), _CALL).to_error() from None
            what = f"rank {peer.rank} offers different views than it described"
            raise ContradictionError(what, rank=peer.rank, got=str(error), next_step=_SAME_CALL) from None
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._idle.append((peer, connection))
            if len(self._idle) > _MAX_IDLE:
                self._idle.popleft()[1].close()

    def _take_idle(self, peer: PeerOffer) -> PeerConnection | None:
        with self._lock:
            for i, (owner, connection) in enumerate(self._idle):
                if owner is peer:
                    del self._idle[i]
                    return connection
        return None

    def _tick(self, peer: PeerOffer, silent_seconds: float) -> None:
        if self._check_lock.acquire(blocking=False):  # the thread that has the lock will raise as well
            try:
                self._check()
            finally:
                self._check_lock.release()
        if peer.has_ended:  # checked because a forked child may keep its connections open
            raise self._explain_end(peer, "its process ended")
        if silent_seconds > self._timeout_seconds:
            raise RankTimeoutError(
                f"rank {peer.rank} has sent no bytes of its tensors for {self._timeout_seconds:g} s",
                rank=peer.rank,
                host=peer.host,
                waiting_for=(peer.rank,),
                got=f"no answer from host {peer.host}, pid {peer.pid}",
                next_step=f"check whether rank {peer.rank} is stopped, or its host cut off; then {AGAIN}, "
                "which resumes",
            )

    def _explain_end(self, peer: PeerOffer, how: str) -> RankFailedError:
        """Return the error for a peer that has gone, unless `check` raises an error with the reason."""
        end = monotonic() + self._grace_seconds
        wait = threading.Event()
        while True:
            with self._check_lock:
                self._check()
            if monotonic() > end:
                cause = "its process ended" if peer.has_ended else how
                return FailureRecord(peer.rank, peer.host, peer.pid, cause, _CALL).to_error()
            wait.wait(_PAUSE_SECONDS)


def _make_mismatch_error(rank: int, view: int, end: int) -> ContradictionError:
    want = f"a view {view} of at least {end:,} bytes"
    return ContradictionError(
        f"rank {rank} offers different tensors than it described", rank=rank, want=want, next_step=_SAME_CALL
    )
