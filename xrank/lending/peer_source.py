"""Bytes of a model that lies in the memory of many ranks: what each lends, and a `Source` over all of it.

Every rank makes a `MemoryOffer`, tells the others what its `told` returns, and reads by a `PeerSource` of what all say.
All close their sources before any offer is closed, and change nothing of what they lend until then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Any

from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError, XrankError
from xrank.lending.local_bytes import LocalBytes
from xrank.lending.memory_offer import MemoryOffer, PeerOffer
from xrank.lending.peer_connection import PeerConnection, PeerGoneError, PeerRefusalError, Tick, connect
from xrank.lending.peer_memory import LendingEndedError, UnreadableMemoryError, memory_at
from xrank.lending.peer_wire import Part
from xrank.ranks.failure import FailureRecord

__all__ = ["MemoryOffer", "PeerSource"]

_GRACE_SECONDS = 5.0
"""How long, once a rank has gone, it is waited for what it said of why, or what others saw."""
_PAUSE_SECONDS = 0.05
_MAX_IDLE = 64
"""Connections kept open, of all peers together."""
_CALL = "lending its tensors"


class PeerSource:
    """Reads records that lie in the memory of ranks; a `Source`, which several threads may use at once.

    A peer of this host is read by the kernel where that is proven to work (`PeerMemory`), any other by its service.

    Args:
        own: what this rank lends; it stays open as long.
        rank: this one.
        offers: what the others' `MemoryOffer.told` returned, by rank.
        record_rank: by record, in whose memory it lies.
        record_view: by record, which view of that rank's offer it is.
        check: raises if a rank is known to have failed; called by one of this source's threads at a time.
        timeout_seconds: how long a peer may send nothing.
        direct: whether other processes' memory is read by the kernel where that can be done.

    Raises:
        CorruptError: an offer is none.
        RankFailedError, RankTimeoutError: from `read_into` and `fetch`, a peer failed, ended, or sends nothing.
        ContradictionError: from those, a record is not of what its rank lends.
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
    ) -> None:
        self._own, self._rank = own, rank
        self._record_rank, self._record_view = record_rank, record_view
        self._check, self._check_lock = check, threading.Lock()
        self._timeout_seconds = timeout_seconds
        self._idle: deque[tuple[PeerOffer, PeerConnection]] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._peers = {other: PeerOffer.of(other, told) for other, told in offers.items() if other != rank}
        for peer in self._peers.values():
            peer.watch(direct=direct)

    @property
    def direct_ranks(self) -> list[int]:
        """The peers whose memory the kernel reads."""
        return sorted(rank for rank, peer in self._peers.items() if peer.memory is not None)

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        rank, view = int(self._record_rank[record]), int(self._record_view[record])
        if rank == self._rank:
            self._own_view(view, start, len(into)).read_into(start, into)
            return
        peer = self._peers[rank]
        if view >= len(peer.nbytes) or start < 0 or start + len(into) > peer.nbytes[view]:
            raise _not_lent(rank, view, start + len(into))
        if not into:
            return
        if peer.memory is not None and peer.addresses[view] and view not in peer.unreadable:
            try:
                peer.memory.read_into(int(peer.addresses[view]) + start, into)
            except UnreadableMemoryError:
                peer.unreadable.add(view)  # memory of a device, say: its owner can read it
            except LendingEndedError:
                raise self._gone(peer, "it ended, or took back what it lent") from None
            else:
                return
        self._request(peer, view, start, into)

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Return the record's bytes: in `staging`, or of this rank's own a view where they already are."""
        if int(self._record_rank[record]) == self._rank:
            address = self._own_view(int(self._record_view[record]), start, nbytes).address
            if address is not None:
                return memory_at(address + start, nbytes).toreadonly()
        data = staging[:nbytes]
        self.read_into(record, start, data)
        return data

    def check_unchanged(self) -> None:
        """See that what this rank lends was not changed; each rank answers for its own.

        Raises:
            ContradictionError: it was.
        """
        self._own.check_unchanged()

    def close(self) -> None:
        """Close all connections; no read may be under way. Twice is once."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.popleft()[1].close()
        for peer in self._peers.values():
            peer.close()

    def _own_view(self, view: int, start: int, nbytes: int) -> LocalBytes:
        views = self._own.views
        if view >= len(views) or start < 0 or start + nbytes > views[view].nbytes:
            raise _not_lent(self._rank, view, start + nbytes)
        return views[view]

    def _request(self, peer: PeerOffer, view: int, start: int, into: memoryview) -> None:
        """Read by the peer's service."""
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
                    # A service closes connections that lie idle when it has too many: that is no end of it.
                    if error.is_early and not is_fresh:
                        connection = None
                        continue
                    raise self._gone(peer, str(error)) from None
                if isinstance(error, PeerRefusalError):
                    raise self._refused(peer, error) from None
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
            self._ask_check()
            if peer.has_ended:  # a child that it forked may hold its connections
                raise self._gone(peer, "its process ended")
            if silent_seconds > self._timeout_seconds:
                raise RankTimeoutError(
                    f"rank {peer.rank} has sent nothing of what it lends for {self._timeout_seconds:g} s",
                    rank=peer.rank,
                    host=peer.host,
                    waiting_for=(peer.rank,),
                    got=f"no answer from host {peer.host}, pid {peer.pid}",
                    next_step=f"see whether rank {peer.rank} is stopped, or its host cut off; then make the same call "
                    "again, which goes on",
                )

        return tick

    def _ask_check(self) -> None:
        if self._check_lock.acquire(blocking=False):  # another thread that asks will raise as well
            try:
                self._check()
            finally:
                self._check_lock.release()

    def _gone(self, peer: PeerOffer, how: str) -> RankFailedError:
        """Return what to raise for a peer that is no more there, unless `check` knows why and raises that."""
        end = monotonic() + _GRACE_SECONDS
        wait = threading.Event()
        while True:
            with self._check_lock:
                self._check()
            if monotonic() > end:
                cause = "its process ended" if peer.has_ended else how
                return FailureRecord(peer.rank, peer.host, peer.pid, cause, _CALL).to_error()
            wait.wait(_PAUSE_SECONDS)

    def _refused(self, peer: PeerOffer, error: PeerRefusalError) -> XrankError:
        if error.kind == Part.FAILED:
            return FailureRecord(peer.rank, peer.host, peer.pid, str(error), _CALL).to_error()
        return ContradictionError(f"rank {peer.rank} does not lend what it told", rank=peer.rank, got=str(error))


def _not_lent(rank: int, view: int, end: int) -> ContradictionError:
    return ContradictionError(
        f"rank {rank} lends other tensors than it described", rank=rank, want=f"a view {view} of at least {end:,} bytes"
    )
