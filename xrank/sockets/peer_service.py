"""The service of a rank that others read from: one thread answers all readers over sockets.

Thousands of readers may ask, and a stopped reader must not delay the others. So one thread serves all of them and never
waits for a single one; it sleeps until a reader asks.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import select
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from time import monotonic
from typing import Any, Protocol

from xrank.sockets.host_addresses import host_addresses
from xrank.sockets.peer_wire import (
    HELLO_NBYTES,
    NONCE_NBYTES,
    PART,
    REQUEST,
    TOKEN_NBYTES,
    AnswerKind,
    derive_token,
    lender_proof,
    reader_proof,
)
from xrank.system import close_read, keep_descriptors_free

_STAGED_NBYTES = 1 << 20
_LEAST_STAGED_NBYTES = 1 << 16
"""Bytes that are not in a row are read into one buffer, between these sizes at once. What a reader's socket does not
take is read again when it has room, so no reader keeps the buffer from others."""
_DIRECT_NBYTES = 4 << 20
"""Bytes of one part of an answer from memory; then the next reader has its turn."""
_STRANGER_SECONDS = 10.0
_MAX_STRANGERS = 256
_FEW_STRANGERS = 4
"""Strangers beyond `_most_guests`."""
_BACKLOG = 1024
_NO_WAIT = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


class ServedBytes(Protocol):
    """Bytes that a service sends."""

    nbytes: int

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place; None if they are not in a row in this process's memory."""

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""


class PeerService:
    """Serves bytes to other processes from construction until `close`.

    Args:
        views: the bytes, by the number under which readers request them. The caller may add and remove entries.
        across_hosts: whether to listen also on a port of this host's network, where any process may connect; otherwise
            only processes of this host can.
        addresses: of this host, on which the port is; empty: all, except loopback.
        secret: shared with the readers, who derive the token from it; None: the description has the token.
    """

    def __init__(
        self,
        views: Mapping[int, ServedBytes],
        *,
        across_hosts: bool,
        addresses: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        self.failure: Exception | None = None
        """The first exception of a read for another rank; this rank would not notice it otherwise."""
        self._views = views
        self._name = f"xrank-{secrets.token_hex(16)}"
        self._is_told = secret is None
        self._token = secrets.token_bytes(TOKEN_NBYTES) if secret is None else derive_token(secret, self._name)
        self._guests: dict[int, _Guest] = {}
        self._strangers: dict[_Guest, None] = {}
        """Guests that have not yet proven knowledge of the token, in the order in which they came."""
        self._most_guests = sys.maxsize
        """Guests that leave a quarter of the descriptors free, once that many came and the limit cannot grow."""
        self._stage = memoryview(mmap.mmap(-1, _STAGED_NBYTES))  # no page until used
        self._listeners: dict[int, socket.socket] = {}
        self._port: int | None = None
        self._addresses: list[str] = []
        self._ends = False
        with ExitStack() as undo:
            unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            undo.callback(unix.close)
            unix.bind(f"\0{self._name}")
            self._listen(unix)
            if across_hosts:
                self._addresses = [*dict.fromkeys(addresses)] or host_addresses()
                for tcp in _port_sockets(self._addresses):
                    undo.callback(tcp.close)
                    self._port = tcp.getsockname()[1]
                    self._listen(tcp)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            undo.callback(close_read, self._wake)
            self._events = select.epoll()
            undo.callback(self._events.close)
            for fd in (self._wake, *self._listeners):
                self._events.register(fd, select.EPOLLIN)
            self._thread = threading.Thread(target=self._serve, name="xrank lender", daemon=True)
            self._thread.start()
            self._close_all = undo.pop_all()

    def _listen(self, listener: socket.socket) -> None:
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listeners[listener.fileno()] = listener

    def describe(self) -> dict[str, Any]:
        """Return a JSON description with which others reach this service."""
        token = {"token": self._token.hex()} if self._is_told else {}
        return {"socket": self._name, "port": self._port, "addresses": self._addresses, **token}

    def close(self) -> None:
        """Stop serving; the bytes are not touched afterwards. Further calls do nothing."""
        if self._ends:
            return
        self._ends = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for guest in list(self._guests.values()):
            self._drop(guest)
        self._close_all.close()
        self._views = {}

    def _serve(self) -> None:
        while not self._ends:
            while (first := next(iter(self._strangers), None)) and monotonic() > first.came_at + _STRANGER_SECONDS:
                self._drop(first)
            for fd, events in self._events.poll(1.0 if self._strangers else None):
                if fd in self._listeners:
                    self._admit(self._listeners[fd])
                elif (guest_now := self._guests.get(fd)) is not None:
                    self._attend(guest_now, events)

    def _admit(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and not self._drop_stranger():
                select.select([], [], [], 0.05)
            return
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not keep_descriptors_free(sock.fileno()):
            self._most_guests = min(self._most_guests, len(self._guests))
        # Strangers give way to strangers only, however many come.
        while len(self._strangers) >= _MAX_STRANGERS or len(self._guests) >= self._most_guests + _FEW_STRANGERS:
            if not self._drop_stranger():
                break
        guest = self._guests[sock.fileno()] = _Guest(sock)
        self._strangers[guest] = None
        self._events.register(sock.fileno(), select.EPOLLIN)
        try:
            sock.send(guest.challenge, _NO_WAIT)
        except OSError:
            self._drop(guest)

    def _drop_stranger(self) -> bool:
        """Close the connection of the stranger that came first, and return whether there was one."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop_idle(self) -> None:
        """Close the known connection that has been idle longest; its reader connects again if necessary."""
        idle = [guest for guest in self._guests.values() if guest.is_idle]
        if idle:
            self._drop(min(idle, key=lambda guest: guest.came_at))

    def _drop(self, guest: _Guest) -> None:
        # Before the socket is closed, which frees its number for the next connection.
        del self._guests[guest.socket.fileno()]
        self._strangers.pop(guest, None)
        guest.socket.close()  # this also removes it from epoll

    def _attend(self, guest: _Guest, events: int) -> None:
        """Do the work for a guest that does not wait."""
        try:
            if guest.is_replying and not events & (select.EPOLLHUP | select.EPOLLERR):
                self._reply(guest)
            elif guest.is_replying or not self._receive(guest):
                self._drop(guest)
        except Exception:  # the guest is gone or failed; the other guests are still served
            self._drop(guest)

    def _receive(self, guest: _Guest) -> bool:
        """Receive a guest's bytes, and return whether it may stay connected."""
        # No byte of the next request: it waits in the socket until this one is answered.
        wanted = REQUEST.size if guest.is_known else HELLO_NBYTES
        try:
            received = guest.socket.recv(wanted - len(guest.received))
        except BlockingIOError:
            return True
        guest.received += received
        if len(guest.received) < wanted:
            return bool(received)
        content, guest.received = guest.received, b""
        guest.came_at = monotonic()
        if guest.is_known:
            number, guest.position, nbytes = REQUEST.unpack(content)
            guest.end = guest.position + nbytes
            self._begin(guest, number)
            return True
        nonce, proof = content[:NONCE_NBYTES], content[NONCE_NBYTES:]
        if not secrets.compare_digest(proof, reader_proof(self._token, guest.challenge, nonce)):
            return False
        if len(self._guests) > self._most_guests:
            self._drop_idle()
        del self._strangers[guest]
        guest.is_known = True
        guest.socket.send(lender_proof(self._token, guest.challenge, nonce), _NO_WAIT)
        return True

    def _begin(self, guest: _Guest, number: int) -> None:
        guest.is_replying = True
        guest.view = self._views.get(number)
        if guest.view is None:
            guest.refuse(AnswerKind.REFUSED, f"there is no view {number} among {len(self._views)}")
        elif guest.end > guest.view.nbytes:
            guest.refuse(AnswerKind.REFUSED, f"view {number} has {guest.view.nbytes:,} bytes, not {guest.end:,}")
        self._reply(guest)

    def _reply(self, guest: _Guest) -> None:
        """Send one part of an answer at most, as far as the socket takes it: the thread serves all guests."""
        if not guest.pending and guest.position < guest.end:
            self._bring(guest)
        try:
            count = guest.socket.sendmsg(guest.pending, (), _NO_WAIT) if guest.pending else 0
        except BlockingIOError:
            count = 0
        guest.discard_sent(count)
        if guest.staged_nbytes:
            guest.leave_stage()
        guest.is_replying = bool(guest.pending) or guest.position < guest.end
        self._watch(guest, select.EPOLLOUT if guest.is_replying else select.EPOLLIN)

    def _bring(self, guest: _Guest) -> None:
        """Prepare the next bytes of an answer: a part, or what its reader's socket did not take of one.

        Raises:
            Exception: bytes of a part that has begun cannot be read.
        """
        view = guest.view
        assert view is not None
        left = guest.part_left or guest.end - guest.position
        data = view.find_row(guest.position, min(left, _DIRECT_NBYTES))
        if data is None:
            data = self._stage[: min(left, guest.room)]
            try:
                view.read_into(guest.position, data)
            except Exception as error:  # any error goes to the reader: it would be lost in this thread
                self.failure = self.failure or error
                if guest.part_left:
                    raise
                guest.refuse(AnswerKind.FAILED, f"{type(error).__name__}: {error}")
                return
            guest.staged_nbytes = len(data)
        guest.pending = [data] if guest.part_left else [memoryview(PART.pack(AnswerKind.DATA, len(data))), data]
        guest.part_left = max(0, guest.part_left - len(data))
        guest.position += len(data)

    def _watch(self, guest: _Guest, events: int) -> None:
        if guest.watched != events:
            guest.watched = events
            self._events.modify(guest.socket.fileno(), events)


class _Guest:
    """One connection with its request and its answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.challenge = secrets.token_bytes(NONCE_NBYTES)
        self.came_at = monotonic()
        """Time of its last request."""
        self.is_known = False
        self.received = b""
        self.watched = int(select.EPOLLIN)
        self.is_replying = False
        self.view: ServedBytes | None = None
        self.position = self.end = 0
        self.part_left = 0
        """Bytes from `position` on that belong to a part whose beginning was sent."""
        self.pending: list[memoryview] = []
        self.staged_nbytes = 0
        """Bytes of the service's buffer that were read for the last of `pending`."""
        self.room = _STAGED_NBYTES
        """Bytes that the socket is likely to take at once."""

    @property
    def is_idle(self) -> bool:
        """Whether it has proven itself and has no open request."""
        return self.is_known and not self.is_replying and not self.received

    def refuse(self, kind: AnswerKind, why: str) -> None:
        """End the answer with a text."""
        text = why.encode()[:2000]
        self.pending = [memoryview(PART.pack(kind, len(text)) + text)]
        self.position = self.end

    def leave_stage(self) -> None:
        """Leave the buffer to other guests: bytes that the socket did not take are to be read again."""
        unsent = len(self.pending.pop()) if self.pending else 0
        self.position -= unsent
        self.part_left += unsent
        taken, self.staged_nbytes = self.staged_nbytes - unsent, 0
        self.room = min(_STAGED_NBYTES, max(_LEAST_STAGED_NBYTES, taken if unsent else 2 * taken))

    def discard_sent(self, count: int) -> None:
        """Remove the bytes that the socket took from those pending."""
        while self.pending and count >= len(self.pending[0]):
            count -= len(self.pending.pop(0))
        if self.pending and count:
            self.pending[0] = self.pending[0][count:]


def _port_sockets(addresses: Sequence[str]) -> list[socket.socket]:
    """Return sockets bound to one free port of each of these addresses of this host."""
    while True:
        with ExitStack() as undo:
            made: list[socket.socket] = []
            for address in addresses:
                sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
                undo.callback(sock.close)
                try:
                    sock.bind((address, made[0].getsockname()[1] if made else 0))
                except OSError as error:
                    if made and error.errno == errno.EADDRINUSE:  # by another process, on this address alone
                        break
                    raise
                made.append(sock)
            else:
                undo.pop_all()
                return made
