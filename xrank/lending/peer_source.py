"""A `Source` of a model's bytes in the memory of many ranks.

Every rank makes a `MemoryOffer`, sends its description to the others, and reads by a `PeerSource` of all descriptions.
All ranks close their sources before any rank closes its offer, and do not change what they lend until then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any, TypeAlias

from xrank.errors import AGAIN, ContradictionError, RankFailedError, RankTimeoutError, XrankError
from xrank.lending.local_bytes import LocalBytes
from xrank.lending.memory_offer import MemoryOffer, PeerOffer
from xrank.lending.mooncake_memory import MooncakeEngine, MooncakeMemory
from xrank.lending.peer_memory import LendingEndedError, PeerMemory, UnreadableMemoryError
from xrank.ranks.failure import FailureRecord
from xrank.sockets.peer_connection import PeerConnection, PeerGoneError, PeerRefusalError, Tick, connect
from xrank.sockets.peer_wire import AnswerKind

__all__ = ["MemoryOffer", "PeerSource", "SpanMemory"]

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
        """Check that this rank's own offer has not changed; each rank checks its own.

        Raises:
            ContradictionError: it has changed.
        """
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
    return ContradictionError(
        f"rank {rank} lends other tensors than it described",
        rank=rank,
        want=f"a view {view} of at least {end:,} bytes",
        next_step=_SAME_CALL,
    )
