"""Memory that ranks lend each other: offers, and a source of the bytes of many ranks."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct, field

from xrank.errors import AGAIN, ContradictionError, CorruptError, RankFailedError, RankTimeoutError, XrankError
from xrank.ranks.byte_service import (
    AnswerKind,
    PeerConnection,
    PeerGoneError,
    PeerRefusalError,
    PeerService,
    Tick,
    connect,
    derive_token,
)
from xrank.ranks.failure import FailureRecord
from xrank.ranks.peer_memory import (
    LendingEndedError,
    LendingSign,
    MooncakeEngine,
    MooncakeMemory,
    PeerMemory,
    UnreadableMemoryError,
)
from xrank.ranks.processes import Peer, is_readable, process_space
from xrank.ranks.tensor_bytes import LocalBytes, TensorBytes
from xrank.storage.entries import Entry
from xrank.system import keep_descriptors_free


class MemoryOffer:
    """The memory that this rank lends, from construction until `close`.

    Args:
        views: bytes of tensors, which must not change meanwhile.
        across_hosts: whether ranks on other hosts also read; the offer then listens on a port.
        by_mooncake: whether Mooncake may read the views that are in a row in memory, too.
        addresses: of the port, as `PeerService` takes them.
        secret: shared with the readers, who add the token to the description (`add_token`); None: it is in it.
    """

    def __init__(
        self,
        views: Sequence[LocalBytes],
        *,
        across_hosts: bool = True,
        by_mooncake: bool = False,
        addresses: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        self.views = tuple(views)
        spans = [(view.address, view.nbytes) for view in self.views if view.address]
        self._mooncake = MooncakeEngine(spans) if by_mooncake else None
        self._service = PeerService(
            dict(enumerate(self.views)), across_hosts=across_hosts, addresses=addresses, secret=secret
        )
        self._sign = LendingSign()

    def describe(self) -> dict[str, Any]:
        """Return a JSON description with which other ranks read the offer; with a token, only those may receive it."""
        return {
            "host": socket.gethostname(),
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
                    f"tensor {index} of those that this rank lends was changed in place while other ranks read it",
                    want="the same values until all ranks have read them",
                    next_step="do not step the optimizer meanwhile, in any thread or hook; then repeat the call",
                )

    @property
    def failure(self) -> Exception | None:
        """The first exception of a read for another rank."""
        return self._service.failure

    def close(self) -> None:
        """Stop lending. Ranks that still read get an error. Further calls do nothing."""
        # The sign first: from here on a reader trusts no bytes that it has copied by itself.
        self._sign.end()
        self._service.close()
        if self._mooncake is not None:
            self._mooncake.close()


def add_token(description: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    """Return an offer's description with the token that its readers derive from their secret."""
    return {**description, "token": derive_token(secret, str(description.get("socket"))).hex()}


class PeerOffer(Struct, eq=False):
    """Another rank's offer: its description, and the ways in which this process can read it."""

    rank: int
    host: str
    pid: int
    space: str
    nonce: bytes
    nonce_address: int
    socket: str
    port: int | None
    hosts: tuple[str, ...]
    token: bytes
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
                f"rank {rank} does not describe what it lends",
                rank=rank,
                got=fault,
                want="the description of MemoryOffer.describe",
                next_step="give all ranks the same version of xrank",
            ),
        )
        port, mooncake = whole.get("port"), whole.get("mooncake")
        views = whole["views"].value
        if not isinstance(views, list) or not all(map(_is_view, views)):  # plain checks: there are many
            whole["views"].refuse("a list of addresses and sizes")
        if len(whole["socket"].text().encode()) > 100:  # unix(7): 107 bytes at most
            whole["socket"].refuse("the name of a socket")
        return cls(
            rank=rank,
            host=whole["host"].text(),
            pid=whole["pid"].count(low=1, below=1 << 31),
            space=whole["space"].text(),
            nonce=whole["nonce"].digest(),
            nonce_address=whole["nonce_address"].count(below=1 << 64),
            socket=whole["socket"].text(),
            port=None if port is None else port.count(below=1 << 16),
            hosts=whole["addresses"].texts(),
            token=whole["token"].digest(),
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
        rank: this rank.
        offers: descriptions of the other ranks' offers, by rank.
        record_rank: rank that holds a record, by record.
        record_view: index of the view in that rank's offer, by record.
        check: raises if a rank is known to have failed; one thread at a time calls it.
        timeout_seconds: time for which a peer may be silent.
        direct: whether the kernel may read other processes' memory.
        grace_seconds: time in which `check` may still give the reason for a peer's end.
        mooncake: copies the spans of peers that lend by Mooncake, in place of the kernel.

    Raises:
        CorruptError: an offer's description is invalid.
        RankFailedError, RankTimeoutError: from `read_into` and `fetch`: a peer failed, ended, or is silent.
        ContradictionError: from those: a record is not in its rank's offer.
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
        self._peers = {
            other: PeerOffer.from_description(other, description)
            for other, description in offers.items()
            if other != rank
        }
        for peer in self._peers.values():
            peer.watch(direct=direct)
        self._remote: dict[int, MooncakeMemory] = {}
        if mooncake is not None:
            self._remote = {
                rank: MooncakeMemory(mooncake, peer.mooncake)
                for rank, peer in self._peers.items()
                if peer.mooncake is not None
            }

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
                raise self._explain_end(peer, "it ended, or no longer lends its memory") from None
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
        tick = self._tick(peer)
        connection = self._idle_connection(peer)
        while True:
            is_fresh = connection is None
            try:
                if connection is None:
                    connection = connect(peer.socket, peer.port, peer.hosts, peer.token, tick)
                connection.read_into(view, start, into, tick)
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, PeerGoneError):
                    # A service with too many connections closes idle ones, and still serves new ones.
                    if error.is_early and not is_fresh:
                        connection = None
                        continue
                    raise self._explain_end(peer, str(error)) from None
                if isinstance(error, PeerRefusalError):
                    raise self._explain_refusal(peer, error) from None
                raise
            self._keep(peer, connection)
            return

    def _idle_connection(self, peer: PeerOffer) -> PeerConnection | None:
        with self._lock:
            for i, (owner, connection) in enumerate(self._idle):
                if owner is peer:
                    del self._idle[i]
                    return connection
        return None

    def _keep(self, peer: PeerOffer, connection: PeerConnection) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._idle.append((peer, connection))
            if len(self._idle) > _MAX_IDLE:
                self._idle.popleft()[1].close()

    def _tick(self, peer: PeerOffer) -> Tick:
        def tick(silent_seconds: float) -> None:
            self._run_check()
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

        return tick

    def _run_check(self) -> None:
        if self._check_lock.acquire(blocking=False):  # the thread that has the lock will raise as well
            try:
                self._check()
            finally:
                self._check_lock.release()

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

    def _explain_refusal(self, peer: PeerOffer, error: PeerRefusalError) -> XrankError:
        if error.kind == AnswerKind.FAILED:
            return FailureRecord(peer.rank, peer.host, peer.pid, str(error), _CALL).to_error()
        return ContradictionError(
            f"rank {peer.rank} lends other views than described", rank=peer.rank, got=str(error), next_step=_SAME_CALL
        )


def _make_mismatch_error(rank: int, view: int, end: int) -> ContradictionError:
    want = f"a view {view} of at least {end:,} bytes"
    return ContradictionError(
        f"rank {rank} lends other tensors than it described", rank=rank, want=want, next_step=_SAME_CALL
    )
