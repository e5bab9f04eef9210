"""A rank of the other job, or of the same one, as this process sees it: its status, and whether it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import monotonic, sleep
from typing import Any
from zlib import crc32

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError
from xrank.lending.memory_offer import PeerOffer
from xrank.lending.peer_memory import LendingEndedError, UnreadableMemoryError
from xrank.refit.outcome import OUTCOME_HEAD
from xrank.refit.status import STATUS_NBYTES, Phase, Status
from xrank.sockets.peer_connection import PeerConnection, PeerGoneError, PeerRefusalError, connect

_SILENT_SECONDS = 1.5
"""Longest silence of a rank over a socket: a stopped rank is to be named within 2 seconds."""
_LOOK_SECONDS = 0.25
"""Time between two looks at the state of a process of this host."""
_STOPPED = ("T", "t")
"""proc(5), /proc/pid/stat: stopped by a signal, or by a tracer."""
_PAUSE_SECONDS = 0.0005
_MAX_WAIT_SECONDS = 2.0
_DAMAGED_SECONDS = 1.5
"""Longest time in which an owner may write its status: on a busy machine the kernel may pause it meanwhile."""


class PeerRank:
    """Reads the status of a rank: by the kernel on this host, else over a socket.

    Args:
        role: the rank in words, such as ``"trainer rank 3"``.
        rank: its number.
        description: of its `MemoryOffer`, whose last view is its status.

    Raises:
        CorruptError: the description is invalid.
        RankFailedError: its process has ended.
    """

    def __init__(self, role: str, rank: int, description: Mapping[str, Any]) -> None:
        self.role, self.rank = role, rank
        self._offer = PeerOffer.from_description(rank, description)
        if self._offer.nbytes[-1:].tolist() != [STATUS_NBYTES]:
            raise CorruptError(
                f"{role} does not describe its status",
                rank=rank,
                got=f"views of {self._offer.nbytes[-3:].tolist()} bytes",
                want=f"a last one of {STATUS_NBYTES} bytes",
                next_step="use the same version of xrank in both jobs",
            )
        self._offer.watch(direct=True)
        self._view = len(self._offer.nbytes) - 1
        self._connection: PeerConnection | None = None
        self._looked_at = -_LOOK_SECONDS
        self._stopped_since: float | None = None
        self._content = bytearray(STATUS_NBYTES)
        self._last: tuple[bytes, Status] | None = None
        self._lock = threading.Lock()
        self.may_return = False
        """Whether the last error was that the rank is stopped or silent, and not that it ended."""
        self.has_answered = False
        """Whether its status could be read the last time."""

    @property
    def place(self) -> str:
        """The host and the process, for errors."""
        return f"host {self._offer.host}, pid {self._offer.pid}"

    def read(self) -> Status:
        """Return its status.

        Raises:
            RankFailedError: its process ended, no longer lends its memory, or is stopped.
            RankTimeoutError: it does not answer over the network.
        """
        with self._lock:
            self.may_return = self.has_answered = False
            if self._offer.has_ended:
                raise self.make_error("its process ended")
            end = monotonic() + _DAMAGED_SECONDS
            while True:
                self._bring(self._view, memoryview(self._content))
                status = self._decode()
                self._look()
                if status is not None:
                    self.has_answered = True
                    return status
                if monotonic() > end:
                    break
                if self._offer.has_ended:
                    raise self.make_error("its process ended")
                sleep(_PAUSE_SECONDS)
        raise self.make_error("its status is damaged")

    @property
    def last(self) -> Status | None:
        """The status that was read last, also of a rank that is stopped since; None if it was damaged."""
        return None if self._last is None else self._last[1]

    def read_outcome(self) -> bytes:
        """Return the text of the outcome that a trainer rank keeps beside its status; errors as `read`."""
        head = bytearray(OUTCOME_HEAD.size)
        with self._lock:
            end = monotonic() + _DAMAGED_SECONDS
            while monotonic() < end:
                self._bring(self._view - 1, memoryview(head))
                checksum, length = OUTCOME_HEAD.unpack(head)
                text = bytearray(len(head) + min(length, int(self._offer.nbytes[self._view - 1]) - len(head)))
                self._bring(self._view - 1, memoryview(text))
                if text.startswith(head) and crc32(text[len(head) :]) == checksum:
                    return bytes(text[len(head) :])
                sleep(_PAUSE_SECONDS)
        raise self.make_error("its outcome is damaged")

    def _decode(self) -> Status | None:
        """Return the status that was read; most looks find the bytes of the last one."""
        if self._last is not None and self._last[0] == self._content:
            return self._last[1]
        content = bytes(self._content)
        status = Status.from_bytes(content)
        self._last = None if status is None else (content, status)
        return status

    def make_error(self, cause: str) -> RankFailedError:
        """Return the error that names this rank."""
        return make_failure(self.role, self.rank, cause, self._offer.host, self._offer.pid)

    def close(self) -> None:
        """Close the connection, and stop watching the process."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._offer.close()

    def _bring(self, view: int, into: memoryview) -> None:
        memory, address = self._offer.memory, int(self._offer.addresses[view])
        if memory is not None:
            try:
                memory.read_into(address, into)
            except LendingEndedError:
                raise self.make_error("its process ended, or no longer lends its memory") from None
            except UnreadableMemoryError:
                self._offer.memory = None
            else:
                return
        while True:
            is_fresh = self._connection is None
            try:
                if self._connection is None:
                    offer = self._offer
                    self._connection = connect(offer.socket, offer.port, offer.hosts, offer.token, self._tick)
                self._connection.read_into(view, 0, into, self._tick)
            except BaseException as error:
                if self._connection is not None:
                    self._connection.close()
                    self._connection = None
                # A service with too many connections closes idle ones, and still serves new ones.
                if isinstance(error, PeerGoneError) and error.is_early and not is_fresh:
                    continue
                if isinstance(error, PeerGoneError | PeerRefusalError):
                    raise self.make_error(str(error)) from None
                raise
            return

    def _tick(self, silent_seconds: float) -> None:
        if self._offer.has_ended:
            raise self.make_error("its process ended")
        self._look()
        if silent_seconds > _SILENT_SECONDS:
            self.may_return = True
            raise RankTimeoutError(
                f"{self.role} has not answered for {silent_seconds:.1f} s",
                rank=self.rank,
                host=self._offer.host,
                waiting_for=(self.rank,),
                got=f"no answer from {self.place}",
                next_step=f"check whether {self.role} is stopped, or its host cut off; then repeat the call",
            )

    def _look(self) -> None:
        """Raise if its process has been stopped for two looks.

        Raises:
            RankFailedError: it is stopped.
        """
        now = monotonic()
        if self._offer.life is None:
            return
        if now >= self._looked_at + _LOOK_SECONDS:
            self._looked_at = now
            if not _is_stopped(self._offer.pid):
                self._stopped_since = None
            elif self._stopped_since is None:
                self._stopped_since = now
        if self._stopped_since is not None and self._looked_at >= self._stopped_since + _LOOK_SECONDS:
            self.may_return = True
            raise self.make_error("its process is stopped (SIGSTOP)")


def make_failure(role: str, rank: int, cause: str, host: str | None = None, pid: int | None = None) -> RankFailedError:
    """Return the error that names a rank, and its process if that is known."""
    return RankFailedError(
        f"{role} failed: {cause}",
        rank=rank,
        host=host,
        pid=pid,
        cause=cause,
        got=cause if host is None else f"{cause}; host {host}, pid {pid}",
        next_step=f"look at {role}'s own error first, start it again if it ended, then repeat the call",
    )


def check_phase(peer: PeerRank, status: Status) -> None:
    """Raise if a rank reports that it has failed or ended.

    Raises:
        RankFailedError: it names the rank and its cause.
    """
    if status.phase in (Phase.FAILED, Phase.LATE):
        raise peer.make_error(status.cause)
    if status.phase is Phase.ENDED:
        raise peer.make_error(f"it has closed its side{f' after {status.cause}' if status.cause else ''}")


def wait_until_done(peers: Sequence[PeerRank], needs: Callable[[Status], bool]) -> None:
    """Wait, for a moment at most, until no rank needs this one any more: it is about to close.

    Args:
        peers: the other ranks of this side.
        needs: whether a rank of that status still looks for this one. Ranks that have failed need nothing.
    """
    end, waiting = monotonic() + _MAX_WAIT_SECONDS, list(peers)
    while waiting and monotonic() < end:
        for peer in list(waiting):
            try:
                if needs(peer.read()):
                    continue
            except (RankFailedError, RankTimeoutError):
                pass
            waiting.remove(peer)
        if waiting:
            sleep(_PAUSE_SECONDS)


def _is_stopped(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name of the program, in parentheses, may contain anything (proc(5)).
            return file.read().rpartition(")")[2].split()[0] in _STOPPED
    except (OSError, IndexError):
        return False
