"""The reader's connection to a rank's service of bytes."""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
from collections.abc import Callable, Sequence
from struct import Struct
from time import monotonic
from typing import TypeAlias

from xrank.errors import UsageError
from xrank.sockets.peer_wire import (
    NONCE_NBYTES,
    PART,
    PROOF_NBYTES,
    REQUEST,
    AnswerKind,
    lender_proof,
    reader_proof,
)
from xrank.system import descriptor_limit, keep_descriptors_free

Tick: TypeAlias = Callable[[float], None]
"""Called every `SLICE_SECONDS` of silence, with the seconds of silence so far; raises to end the wait."""

SLICE_SECONDS = 0.2
_PLACE_SECONDS = 3.0
"""Time limit for one of several addresses, most of which may lead nowhere."""
_PAUSE_SECONDS = 0.02
_TRIES = 5
"""Times to connect to a service that closes the connection before either side has proven itself: it drops some of the
strangers that come at once."""
_MOMENT = Struct("@ll")  # struct timeval


class PeerGoneError(Exception):
    """The other side closed the connection, or does not answer; the text describes how this was noticed."""

    def __init__(self, how: str, *, is_early: bool = False) -> None:
        super().__init__(how)
        self.is_early = is_early
        """Whether no part of an answer had arrived."""


class _SilentPlaceError(Exception):
    """A place does not answer, and other places may."""


class PeerRefusalError(Exception):
    """The other side sends a reason in place of the bytes."""

    def __init__(self, why: str, kind: AnswerKind) -> None:
        super().__init__(why)
        self.kind = kind


class PeerConnection:
    """One connection on which both sides have proven themselves; one thread at a time may use it.

    Args:
        sock: a connected socket; it is closed with this connection, and if the constructor fails.
        token: the lender's token.
        tick: see `Tick`.

    Raises:
        PeerGoneError: another process answers there, or the lender rejects this one.
    """

    def __init__(self, sock: socket.socket, token: bytes, tick: Tick) -> None:
        self._socket = sock
        try:
            _set_up(sock)
            challenge = self._receive(NONCE_NBYTES, tick)
            nonce = secrets.token_bytes(NONCE_NBYTES)
            self._send(nonce + reader_proof(token, challenge, nonce), tick)
            if not secrets.compare_digest(self._receive(PROOF_NBYTES, tick), lender_proof(token, challenge, nonce)):
                raise PeerGoneError("another process than the lender answers there")
        except BaseException:
            sock.close()
            raise

    def read_into(self, view: int, start: int, into: memoryview, tick: Tick) -> None:
        """Fill `into` with a view's bytes from `start` on. After any error, this connection is unusable.

        Raises:
            PeerGoneError: the connection ended.
            PeerRefusalError: the lender refuses.
        """
        self._send(REQUEST.pack(view, start, len(into)), tick)
        is_early = True
        while into:
            kind, nbytes = PART.unpack(self._receive(PART.size, tick, is_early=is_early))
            is_early = False
            if kind != AnswerKind.DATA:
                why = self._receive(min(nbytes, 2000), tick).decode(errors="replace")
                raise PeerRefusalError(why, AnswerKind.REFUSED if kind == AnswerKind.REFUSED else AnswerKind.FAILED)
            if not 0 < nbytes <= len(into):
                raise PeerGoneError(f"it sends {nbytes:,} bytes instead of the remaining {len(into):,}")
            self._fill(into[:nbytes], tick)
            into = into[nbytes:]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _receive(self, nbytes: int, tick: Tick, *, is_early: bool = False) -> bytes:
        content = bytearray(nbytes)
        self._fill(memoryview(content), tick, is_early=is_early)
        return bytes(content)

    def _fill(self, into: memoryview, tick: Tick, *, is_early: bool = False) -> None:
        since = monotonic()
        while into:
            try:
                count = self._socket.recv_into(into, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                tick(monotonic() - since)
                continue
            except OSError as error:
                raise PeerGoneError(_describe(error), is_early=is_early) from None
            if count == 0:
                raise PeerGoneError("it closed the connection", is_early=is_early)
            into, is_early, since = into[count:], False, monotonic()

    def _send(self, content: bytes, tick: Tick) -> None:
        left, since = memoryview(content), monotonic()
        while left:
            try:
                left = left[self._socket.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                tick(monotonic() - since)
            except OSError as error:
                raise PeerGoneError(_describe(error), is_early=True) from None


def _set_up(sock: socket.socket) -> None:
    moment = _MOMENT.pack(0, int(SLICE_SECONDS * 1e6))
    try:
        sock.setblocking(True)
        # With a kernel timeout the socket stays blocking, so that one call receives all of an answer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, moment)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, moment)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise PeerGoneError(_describe(error)) from None


def connect(name: str, port: int | None, addresses: Sequence[str], token: bytes, tick: Tick) -> PeerConnection:
    """Return a connection to the service of a description: within the host if possible, else by the network.

    Raises:
        PeerGoneError: no process that knows the token answers at any address.
    """
    since = monotonic()
    places: list[tuple[int, str | tuple[str, int]]] = [(socket.AF_UNIX, f"\0{name}")]
    if port is not None:
        places += [(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port)) for address in addresses]

    def tick_here(seconds: float) -> None:
        tick(monotonic() - since)
        if seconds > _PLACE_SECONDS:
            raise _SilentPlaceError("no answer")

    # Places that are silent are tried again, until `tick` ends the wait.
    tries = 0
    while True:
        attempts = []
        is_silent = is_dropped = False
        for family, place in places:
            begun = monotonic()
            sock = None
            try:
                sock = _open_socket(family, place, tick_here)
                return PeerConnection(sock, token, tick_here)
            except (_SilentPlaceError, PeerGoneError) as error:  # not OSError: `tick` may raise one
                # A service drops a reader that is slow to prove itself, as this process is after it was stopped.
                is_slow = monotonic() > begun + _PLACE_SECONDS
                is_silent = is_silent or is_slow or isinstance(error, _SilentPlaceError)
                is_dropped = is_dropped or sock is not None
                shown = "on this host" if isinstance(place, str) else f"at {place[0]} port {place[1]}"
                attempts.append(f"{shown}: {error}")
        tries += is_dropped
        if not is_silent and (not is_dropped or tries == _TRIES):
            raise PeerGoneError("; ".join(attempts))
        if is_dropped:
            select.poll().poll(1000 * _PAUSE_SECONDS)
            tick(monotonic() - since)


def _open_socket(family: int, place: str | tuple[str, int], tick: Tick) -> socket.socket:
    """Return a connected socket.

    Raises:
        PeerGoneError: the connection was refused or failed.
        UsageError: this process may not open another file.
    """
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise UsageError(
                "this process has too many open files to connect to another rank",
                got=f"a limit of {descriptor_limit():,} open files",
                want="a free descriptor for each rank of the other side, and some for the program itself",
                next_step="raise the hard limit (ulimit -Hn) in the shell or the container of this job",
            ) from None
        raise PeerGoneError(_describe(error)) from None  # a kernel without IPv6
    try:
        keep_descriptors_free(sock.fileno())
        sock.setblocking(False)
        since = monotonic()
        poller = select.poll()
        while (number := sock.connect_ex(place)) == errno.EAGAIN:  # the backlog of the Unix socket is full
            poller.poll(1000 * _PAUSE_SECONDS)
            tick(monotonic() - since)
        poller.register(sock, select.POLLOUT)
        while number == errno.EINPROGRESS:
            if poller.poll(1000 * SLICE_SECONDS):
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            else:
                tick(monotonic() - since)
        if number:
            raise PeerGoneError(_describe(OSError(number, os.strerror(number))))
    except BaseException:
        sock.close()
        raise
    return sock


def _describe(error: OSError) -> str:
    known = {errno.ECONNREFUSED: "nothing listens", errno.ECONNRESET: "it closed the connection"}
    return known.get(error.errno or 0) or error.strerror or str(error)
