"""A service of bytes over sockets, its readers, and large values between ranks that share no memory."""

from __future__ import annotations

import errno
import hmac
import json
import mmap
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash
from msgspec import Struct

from xrank.errors import CorruptError, IncompleteError, UsageError
from xrank.ranks.directory_messages import make_receipt_error
from xrank.ranks.memory import LocalBytes, MemoryBytes, explain_no_memory, row_major_bytes
from xrank.ranks.memory_messages import align, new_buffer
from xrank.storage.entries import Entry
from xrank.system import close_read, descriptor_limit, keep_descriptors_free

if TYPE_CHECKING:
    import torch


_GET_ADDRESS = 0x8915  # linux/sockios.h: SIOCGIFADDR
_GLOBAL_SCOPE = "00"
_LOOPBACK = "127.0.0.1"


def used_addresses(store_host: str | None, environ: Mapping[str, str]) -> list[str]:
    """Return the addresses of this host at which the other hosts of a job reach it.

    These are the addresses of the interfaces that gloo was told to use; else the one from which this host reaches the
    ranks' store; else, as where the store is on this host and known by a loopback address, all.
    """
    named = [name.strip() for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",")]
    if found := [address for name, address in _interfaces() if name in named and not _is_loopback(address)]:
        return found
    places: list[tuple[Any, ...]] = []
    with suppress(OSError):
        places += [] if store_host is None else socket.getaddrinfo(store_host, 9, type=socket.SOCK_DGRAM)
    for family, _, _, _, place in places:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it asks the kernel for the route
            address: str = probe.getsockname()[0]
            if not _is_loopback(address):
                return [address]
    return host_addresses()


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "::ffff:127.")) or address == "::1"


def host_addresses() -> list[str]:
    """Return the numeric addresses of this host's interfaces, IPv4 first; loopback only without any other."""
    return [address for _, address in _interfaces() if not _is_loopback(address)] or [_LOOPBACK]


def _interfaces() -> list[tuple[str, str]]:
    """Return names and numeric addresses of this host's interfaces, IPv4 first."""
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                # struct ifreq (netdevice(7)): 16 bytes of name, family and port, then the address.
                request = struct.pack("256s", name.encode()[:15])
                found.append((name, socket.inet_ntoa(fcntl.ioctl(any_socket, _GET_ADDRESS, request)[20:24])))
    with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as lines:  # no such file: no IPv6
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL_SCOPE:
                found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


NONCE_NBYTES = PROOF_NBYTES = TOKEN_NBYTES = 32
HELLO_NBYTES = NONCE_NBYTES + PROOF_NBYTES
REQUEST = struct.Struct("<QQQ")
PART = struct.Struct("<BQ")


class AnswerKind(IntEnum):
    """The content of a part of an answer."""

    DATA = 0
    REFUSED = 1
    """Reason of a refusal: the requested bytes do not exist."""
    FAILED = 2
    """Reason why no more can be sent: reading the bytes failed."""


def derive_token(secret: bytes, name: str) -> bytes:
    """Return the token of the service of that name, for processes that share a secret."""
    return hmac.digest(secret, b"service" + name.encode(), "sha256")


def reader_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return the answer to a lender's challenge that requires the token."""
    return hmac.digest(token, b"reader" + challenge + nonce, "sha256")


def lender_proof(token: bytes, challenge: bytes, nonce: bytes) -> bytes:
    """Return the answer to a reader's nonce that requires the token."""
    return hmac.digest(token, b"lender" + challenge + nonce, "sha256")


Tick: TypeAlias = Callable[[float], None]
"""Called every `SLICE_SECONDS` of silence, with the seconds of silence so far; raises to end the wait."""

SLICE_SECONDS = 0.2
_PLACE_SECONDS = 3.0
"""Time limit for one of several addresses, most of which may lead nowhere."""
_PAUSE_SECONDS = 0.02
_TRIES = 5
"""Times to connect to a service that closes the connection before either side has proven itself: it drops some of the
strangers that come at once."""
_MOMENT = struct.Struct("@ll")  # struct timeval


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

    If the proof fails, the constructor closes the socket and raises PeerGoneError.
    """

    def __init__(self, sock: socket.socket, token: bytes, tick: Tick) -> None:
        self._socket = sock
        moment = _MOMENT.pack(0, int(SLICE_SECONDS * 1e6))
        try:
            try:
                sock.setblocking(True)
                # With a kernel timeout the socket stays blocking, so that one call receives all of an answer.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, moment)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, moment)
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                raise PeerGoneError(_describe(error)) from None
            challenge = self._receive(NONCE_NBYTES, tick)
            nonce = os.urandom(NONCE_NBYTES)
            self._send(nonce + reader_proof(token, challenge, nonce), tick)
            if not hmac.compare_digest(self._receive(PROOF_NBYTES, tick), lender_proof(token, challenge, nonce)):
                raise PeerGoneError("a different process answers there")
        except BaseException:
            sock.close()
            raise

    def read_into(self, view: int, start: int, into: memoryview, tick: Tick) -> None:
        """Fill `into` with a view's bytes from `start` on; PeerGoneError and PeerRefusalError end the connection."""
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


def connect(name: str, port: int | None, addresses: Sequence[str], token: bytes, tick: Tick) -> PeerConnection:
    """Return a connection to a service that knows the token: within the host if possible, else by the network.

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
    """Return a connected socket; UsageError if this process may not open another file."""
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


class ServicePlace(Struct, frozen=True):
    """Where a service is found, and what proves that a reader may read."""

    socket: str
    port: int | None
    addresses: tuple[str, ...]
    token: bytes

    @classmethod
    def from_entry(cls, described: Entry, secret: bytes | None = None) -> ServicePlace:
        """Return the place of a `PeerService` description, whose token the readers may derive from their secret."""
        name, port = described["socket"].text(), described.get("port")
        if len(name.encode()) > 100:  # unix(7): 107 bytes at most
            described["socket"].refuse("the name of a socket")
        return cls(
            name,
            None if port is None else port.count(below=1 << 16),
            described["addresses"].texts(),
            described["token"].digest() if secret is None else derive_token(secret, name),
        )


def read_view(
    connection: PeerConnection | None, place: ServicePlace, view: int, start: int, into: memoryview, tick: Tick
) -> PeerConnection:
    """Fill `into` over a connection to a service, or a new one; return the connection, which any error closes."""
    while True:
        is_fresh = connection is None
        try:
            if connection is None:
                connection = connect(place.socket, place.port, place.addresses, place.token, tick)
            connection.read_into(view, start, into, tick)
            return connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            # A service with too many connections closes idle ones, and still serves new ones.
            if is_fresh or not isinstance(error, PeerGoneError) or not error.is_early:
                raise
            connection = None


def _describe(error: OSError) -> str:
    known = {errno.ECONNREFUSED: "nothing listens", errno.ECONNRESET: "it closed the connection"}
    return known.get(error.errno or 0) or error.strerror or str(error)


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
        views: Mapping[int, LocalBytes],
        *,
        across_hosts: bool,
        addresses: Sequence[str] = (),
        secret: bytes | None = None,
    ) -> None:
        self.failure: Exception | None = None
        """The first exception of a read for another rank; this rank would not notice it otherwise."""
        self._views = views
        self._name = f"xrank-{os.urandom(16).hex()}"
        self._is_told = secret is None
        self._token = os.urandom(TOKEN_NBYTES) if secret is None else derive_token(secret, self._name)
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
                elif (guest := self._guests.get(fd)) is not None:
                    self._attend(guest, events)

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
            guest.is_replying = True
            guest.view = self._views.get(number)
            if guest.view is None:
                guest.refuse(AnswerKind.REFUSED, f"there is no view {number} among {len(self._views)}")
            elif guest.end > guest.view.nbytes:
                guest.refuse(AnswerKind.REFUSED, f"view {number} has {guest.view.nbytes:,} bytes, not {guest.end:,}")
            self._reply(guest)
            return True
        nonce, proof = content[:NONCE_NBYTES], content[NONCE_NBYTES:]
        if not hmac.compare_digest(proof, reader_proof(self._token, guest.challenge, nonce)):
            return False
        if len(self._guests) > self._most_guests:
            idle = [one for one in self._guests.values() if one.is_known and not one.is_replying and not one.received]
            if idle:  # the reader connects again if necessary
                self._drop(min(idle, key=lambda one: one.came_at))
        del self._strangers[guest]
        guest.is_known = True
        guest.socket.send(lender_proof(self._token, guest.challenge, nonce), _NO_WAIT)
        return True

    def _reply(self, guest: _Guest) -> None:
        """Send one part of an answer at most, as far as the socket takes it: the thread serves all guests."""
        if not guest.pending and guest.position < guest.end:
            self._bring(guest)
        try:
            count = guest.socket.sendmsg(guest.pending, (), _NO_WAIT) if guest.pending else 0
        except BlockingIOError:
            count = 0
        while guest.pending and count >= len(guest.pending[0]):
            count -= len(guest.pending.pop(0))
        if guest.pending and count:
            guest.pending[0] = guest.pending[0][count:]
        if guest.staged_nbytes:  # other guests get the buffer: bytes that the socket did not take are read again
            unsent = len(guest.pending.pop()) if guest.pending else 0
            guest.position -= unsent
            guest.part_left += unsent
            taken, guest.staged_nbytes = guest.staged_nbytes - unsent, 0
            guest.room = min(_STAGED_NBYTES, max(_LEAST_STAGED_NBYTES, taken if unsent else 2 * taken))
        guest.is_replying = bool(guest.pending) or guest.position < guest.end
        events = int(select.EPOLLOUT if guest.is_replying else select.EPOLLIN)
        if guest.watched != events:
            guest.watched = events
            self._events.modify(guest.socket.fileno(), events)

    def _bring(self, guest: _Guest) -> None:
        """Prepare the next bytes of an answer: a part, or what its reader's socket did not take of one."""
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


class _Guest:
    """One connection with its request and its answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.challenge = os.urandom(NONCE_NBYTES)
        self.came_at = monotonic()
        """Time of its last request."""
        self.is_known = False
        self.received = b""
        self.watched = int(select.EPOLLIN)
        self.is_replying = False
        self.view: LocalBytes | None = None
        self.position = self.end = 0
        self.part_left = 0
        """Bytes from `position` on that belong to a part whose beginning was sent."""
        self.pending: list[memoryview] = []
        self.staged_nbytes = 0
        """Bytes of the service's buffer that were read for the last of `pending`."""
        self.room = _STAGED_NBYTES
        """Bytes that the socket is likely to take at once."""

    def refuse(self, kind: AnswerKind, why: str) -> None:
        """End the answer with a text."""
        text = why.encode()[:2000]
        self.pending = [memoryview(PART.pack(kind, len(text)) + text)]
        self.position = self.end


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


class SocketMessages:
    """A `MessageWorkspace` for one thread at a time.

    Args:
        check: raises if a rank is known to have failed; called while a writer is silent.
        secret: shared by the ranks alone; None: receipts contain the token, and must go only to ranks of the job.
        across_hosts: whether readers may be on other hosts, so that this rank needs a port.
        addresses: returns the addresses of the port, as `PeerService` takes them.
    """

    patience_seconds = 20.0
    """A message is visible at once, or its writer has ended. Another host knows of that after ten to fourteen seconds
    (`xrank.ranks.waits`)."""

    def __init__(
        self,
        check: Callable[[], None] = lambda: None,
        *,
        secret: bytes | None = None,
        across_hosts: bool = True,
        addresses: Callable[[], Sequence[str]] = lambda: (),
    ) -> None:
        self._check = check
        self._secret, self._across_hosts, self._addresses = secret, across_hosts, addresses
        self._contents: dict[int, MemoryBytes] = {}
        self._num_published = 0
        self._service: PeerService | None = None
        self._connections: dict[str, PeerConnection] = {}
        self._pid = os.getpid()

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Copy a message, and serve the copy; see `MessageWorkspace`."""
        sizes = [*(tensor.nbytes for tensor in tensors), len(head := header.encode())]
        places, _ = align(sizes)
        nbytes = sum(places[-1])
        with explain_no_memory("a message", nbytes, "free memory, or give workspace_path"):
            content = new_buffer(nbytes)
        for (start, _), tensor in zip(places, tensors, strict=False):
            content[start : start + tensor.nbytes] = row_major_bytes(tensor).data
        content[places[-1][0] :] = head
        if self._service is None:
            addresses = self._addresses() if self._across_hosts else ()
            self._service = PeerService(
                self._contents, across_hosts=self._across_hosts, addresses=addresses, secret=self._secret
            )
        self._num_published += 1
        self._contents[self._num_published] = MemoryBytes(content)
        return json.dumps(
            {
                "service": self._service.describe(),
                "number": self._num_published,
                "sizes": sizes,
                "digest": xxhash.xxh3_128_hexdigest(content),
            }
        )

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`."""
        message = _Receipt.from_json(receipt, rank, self._secret)
        places, _ = align(message.sizes)
        content = new_buffer(sum(places[-1]))
        try:
            self._read(rank, message, content)
        except (PeerGoneError, PeerRefusalError) as error:
            raise _missing_error(rank, message, str(error)) from None
        digest = xxhash.xxh3_128_hexdigest(content)
        if digest != message.digest:
            raise CorruptError(
                f"the bytes of rank {rank}'s message differ from those it sent",
                rank=rank,
                got=f"checksum {digest}",
                want=f"checksum {message.digest}",
                next_step="gather again; if it happens again, check the network, and the memory of both hosts",
            )
        parts = [content[start : start + nbytes] for start, nbytes in places]
        return bytes(parts.pop()).decode(), parts

    def _read(self, rank: int, message: _Receipt, into: memoryview) -> None:
        def tick(silent_seconds: float) -> None:
            self._check()
            if silent_seconds > self.patience_seconds:
                raise _missing_error(rank, message, f"no answer for {silent_seconds:.0f} s")

        known = self._connections.pop(message.place.socket, None)
        self._connections[message.place.socket] = read_view(known, message.place, message.number, 0, into, tick)

    def retire(self, receipt: str) -> None:
        """Release a message of this rank after its reader has fetched it."""
        self._contents.pop(_Receipt.from_json(receipt, -1, self._secret).number, None)

    def close(self) -> None:
        """Release all messages, and close all connections. Fetched messages stay valid. A second call does nothing."""
        if os.getpid() != self._pid:  # the service's thread is the parent's
            return
        if self._service is not None:
            self._service.close()
        self._contents.clear()
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


class _Receipt(Struct, frozen=True):
    """A receipt's fields."""

    place: ServicePlace
    number: int
    sizes: tuple[int, ...]
    """Bytes of each tensor, and of the header."""
    digest: str
    """XXH3-128 of the whole message in hexadecimal digits."""

    @classmethod
    def from_json(cls, text: str, rank: int, secret: bytes | None) -> _Receipt:
        fields = Entry.parse(text, lambda fault: make_receipt_error(text, rank))
        sizes = fields["sizes"].counts()
        if not sizes:
            fields["sizes"].refuse("sizes")
        place = ServicePlace.from_entry(fields["service"], secret)
        return cls(place, fields["number"].count(), sizes, fields["digest"].text())


def _missing_error(rank: int, message: _Receipt, got: str) -> IncompleteError:
    place = message.place
    places = ", ".join(f"{address} port {place.port}" for address in place.addresses) or "a socket of this host"
    return IncompleteError(
        f"the message of rank {rank} cannot be read from it",
        rank=rank,
        got=got[:500],
        want=f"an answer of rank {rank} at {places}",
        next_step=f"check that rank {rank} still runs, and that its host accepts connections on any port; else give "
        "workspace_path, a directory that all hosts mount",
    )
