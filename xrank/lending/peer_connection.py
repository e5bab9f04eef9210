"""A connection to the service of a rank that lends bytes, as the rank that asks for them holds it."""

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

from xrank.lending.peer_wire import (
    NONCE_NBYTES,
    PART,
    PROOF_NBYTES,
    REQUEST,
    Part,
    lender_proof,
    reader_proof,
)

__all__ = ["PeerConnection", "PeerGoneError", "PeerRefusalError", "Tick", "connect"]

Tick: TypeAlias = Callable[[float], None]
"""Called every `SLICE_SECONDS` while nothing comes, with the seconds for which nothing has; raises to end it."""

SLICE_SECONDS = 0.2
_PLACE_SECONDS = 3.0
"""For one of several addresses, most of which may lead nowhere."""
_PAUSE_SECONDS = 0.02
_MOMENT = Struct("@ll")  # struct timeval


class PeerGoneError(Exception):
    """The other side closed the connection, or is not there; the text says how that was seen."""

    def __init__(self, how: str, *, is_early: bool = False) -> None:
        super().__init__(how)
        self.is_early = is_early
        """Whether nothing of an answer had come yet."""


class _SilentPlaceError(Exception):
    """Nothing is heard from a place, while there may be others."""


class PeerRefusalError(Exception):
    """The other side says why it does not send what it was asked for."""

    def __init__(self, why: str, kind: Part) -> None:
        super().__init__(why)
        self.kind = kind


class PeerConnection:
    """One connection that both sides have proven themselves on; one thread at a time may use it.

    Args:
        sock: connected; it is closed with this, and if this cannot be made.
        token: the lender's.
        tick: see `Tick`.

    Raises:
        PeerGoneError: whoever answers there is not the one, or does not know this one.
    """

    def __init__(self, sock: socket.socket, token: bytes, tick: Tick) -> None:
        self._socket = sock
        try:
            _set_up(sock)
            challenge = self._receive(NONCE_NBYTES, tick)
            nonce = secrets.token_bytes(NONCE_NBYTES)
            self._send(nonce + reader_proof(token, challenge, nonce), tick)
            if not secrets.compare_digest(self._receive(PROOF_NBYTES, tick), lender_proof(token, challenge, nonce)):
                raise PeerGoneError("another process than the one that lends answers there")
        except BaseException:
            sock.close()
            raise

    def read_into(self, view: int, start: int, into: memoryview, tick: Tick) -> None:
        """Fill `into` with a view's bytes from `start` on.

        Raises:
            PeerGoneError: the connection ended.
            PeerRefusalError: the lender says why not. Whatever is raised, this connection is of no more use.
        """
        self._send(REQUEST.pack(view, start, len(into)), tick)
        is_early = True
        while into:
            kind, nbytes = PART.unpack(self._receive(PART.size, tick, is_early=is_early))
            is_early = False
            if kind != Part.DATA:
                why = self._receive(min(nbytes, 2000), tick).decode(errors="replace")
                raise PeerRefusalError(why, Part.REFUSED if kind == Part.REFUSED else Part.FAILED)
            if not 0 < nbytes <= len(into):
                raise PeerGoneError(f"it sends {nbytes:,} bytes where {len(into):,} are left")
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
                raise PeerGoneError(_said(error), is_early=is_early) from None
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
                raise PeerGoneError(_said(error), is_early=True) from None


def _set_up(sock: socket.socket) -> None:
    moment = _MOMENT.pack(0, int(SLICE_SECONDS * 1e6))
    try:
        sock.setblocking(True)
        # The kernel, not Python, wakes a waiting call: then one call receives all of an answer.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, moment)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, moment)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise PeerGoneError(_said(error)) from None


def connect(name: str, port: int | None, addresses: Sequence[str], token: bytes, tick: Tick) -> PeerConnection:
    """Return a connection to the service that told this: within the host where it can be, else by the network.

    Raises:
        PeerGoneError: nothing that knows the token answers anywhere.
    """
    since = monotonic()
    places: list[tuple[int, str | tuple[str, int]]] = [(socket.AF_UNIX, f"\0{name}")]
    if port is not None:
        places += [(socket.AF_INET6 if ":" in address else socket.AF_INET, (address, port)) for address in addresses]

    def tick_here(seconds: float) -> None:
        tick(monotonic() - since)
        if seconds > _PLACE_SECONDS:
            raise _SilentPlaceError("no answer")

    while True:
        said = []
        is_silent = False
        for family, place in places:
            begun = monotonic()
            try:
                return PeerConnection(_connected(family, place, tick_here), token, tick_here)
            except (_SilentPlaceError, PeerGoneError) as error:  # no OSError: what `tick` raises may be one
                # A service gives up on who is slow to prove itself, as one is that was itself stopped for a while.
                is_slow = monotonic() > begun + _PLACE_SECONDS
                is_silent = is_silent or is_slow or isinstance(error, _SilentPlaceError)
                shown = "on this host" if isinstance(place, str) else f"at {place[0]} port {place[1]}"
                said.append(f"{shown}: {error}")
        if not is_silent:
            raise PeerGoneError("; ".join(said))


def _connected(family: int, place: str | tuple[str, int], tick: Tick) -> socket.socket:
    """Return a connected socket.

    Raises:
        PeerGoneError: something says no.
    """
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # a kernel without IPv6
        raise PeerGoneError(_said(error)) from None
    try:
        sock.setblocking(False)
        since = monotonic()
        poller = select.poll()
        while (number := sock.connect_ex(place)) == errno.EAGAIN:  # a Unix socket's listener has too many to accept
            poller.poll(1000 * _PAUSE_SECONDS)
            tick(monotonic() - since)
        poller.register(sock, select.POLLOUT)
        while number == errno.EINPROGRESS:
            if poller.poll(1000 * SLICE_SECONDS):
                number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            else:
                tick(monotonic() - since)
        if number:
            raise PeerGoneError(_said(OSError(number, os.strerror(number))))
    except BaseException:
        sock.close()
        raise
    return sock


def _said(error: OSError) -> str:
    known = {errno.ECONNREFUSED: "nothing listens", errno.ECONNRESET: "it closed the connection"}
    return known.get(error.errno or 0) or error.strerror or str(error)
