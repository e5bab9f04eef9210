"""torch's store over TCP without torch: a connection to it, and a server in its place where no launcher keeps one.

Both speak the protocol of ``torch.distributed.TCPStore`` (torch/csrc/distributed/c10d/TCPStore.cpp and
TCPStoreBackend.hpp), so that ranks under torchrun meet through the store of its agent. Names and values have their
number of bytes before them; numbers are little-endian.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import TypeAlias
from weakref import finalize

_VALIDATE, _SET, _GET, _ADD, _CHECK, _DELETE, _PING = 0, 1, 3, 4, 5, 8, 13
_MAGIC = 0x3C85F7CE
_NONCE = 1
_LENGTH, _NUMBER, _SMALL = struct.Struct("<Q"), struct.Struct("<q"), struct.Struct("<I")
_READY, _NOT_READY = b"\0", b"\1"
_MOST_NBYTES = 8 << 20
"""Longest name or value, as of torch's own server (TCPStoreLibUvBackend.cpp: MAX_PAYLOAD_LEN)."""
_CHUNK_NBYTES = 1 << 18
_CONNECT_SECONDS = 10.0
_CLOSED = "the store has closed the connection"


class TcpStore:
    """A connection to a store; has the methods of torch's own that a `GroupStore` calls, for any thread.

    Every method raises OSError if the store does not answer, or is gone. `server` is the one in this process, if it
    keeps the store, which lives as long as the last connection that was made with it.
    """

    def __init__(self, host: str, port: int, timeout_seconds: float, server: StoreServer | None = None) -> None:
        self.host, self.port = host, port
        self._timeout_seconds, self._server = timeout_seconds, server
        self._lock, self._is_gone = threading.Lock(), False
        self._socket: socket.socket | None = self._connect()

    def set(self, name: str, value: str) -> None:
        """Set a value."""
        self._ask(bytes([_SET]) + _framed(name) + _framed(value))

    def get(self, name: str) -> bytes:
        """Return a value; nothing for one that another rank has removed meanwhile."""
        return self._ask(bytes([_GET]) + _framed(name), _LENGTH.size, is_framed=True)

    def check(self, names: Sequence[str]) -> bool:
        """Return whether all of these have a value."""
        request = bytes([_CHECK]) + _LENGTH.pack(len(names)) + b"".join(map(_framed, names))
        return self._ask(request, len(_READY)) == _READY

    def add(self, name: str, amount: int) -> int:
        """Count up a number, which begins at 0, and return it."""
        answer = self._ask(bytes([_ADD]) + _framed(name) + _NUMBER.pack(amount), _NUMBER.size)
        return int(_NUMBER.unpack(answer)[0])

    def delete_key(self, name: str) -> bool:
        """Forget a value; return whether it was there."""
        return bool(_NUMBER.unpack(self._ask(bytes([_DELETE]) + _framed(name), _NUMBER.size))[0])

    def clone(self) -> TcpStore:
        """Return another connection to the same store."""
        return TcpStore(self.host, self.port, self._timeout_seconds, self._server)

    def __del__(self) -> None:
        if (connection := getattr(self, "_socket", None)) is not None:
            connection.close()

    def _connect(self) -> socket.socket:
        limit = min(_CONNECT_SECONDS, self._timeout_seconds)
        connection = socket.create_connection((self.host, self.port), timeout=limit)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes([_VALIDATE]) + _SMALL.pack(_MAGIC) + bytes([_PING]) + _SMALL.pack(_NONCE))
            if _receive(connection, _SMALL.size) != _SMALL.pack(_NONCE):
                raise ConnectionError(f"the server at {self.host}:{self.port} is not a torch store")
            connection.settimeout(self._timeout_seconds)
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, request: bytes, nbytes: int = 0, *, is_framed: bool = False) -> bytes:
        """Send a request, and return its answer of so many bytes; of a framed one, what follows its length."""
        with self._lock:
            if self._is_gone:  # another run may keep one there now
                raise ConnectionResetError(_CLOSED)
            # A signal may raise in the midst of an answer, whose rest nobody may take for that of the next request.
            connection, self._socket = self._socket or self._connect(), None
            try:
                connection.sendall(request)
                answer = _receive(connection, nbytes)
                if is_framed:
                    answer = _receive(connection, _LENGTH.unpack(answer)[0])
            except BaseException as error:
                self._is_gone = isinstance(error, OSError)
                connection.close()
                raise
            self._socket = connection
            return answer


def _framed(text: str) -> bytes:
    data = text.encode()
    return _LENGTH.pack(len(data)) + data


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        if not (more := connection.recv(min(nbytes - len(data), _CHUNK_NBYTES))):
            raise ConnectionResetError(_CLOSED)
        data += more
    return bytes(data)


class StoreServer:
    """A store at a port of this host, served by a thread as long as this object lives."""

    def __init__(self, port: int) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=is_dual)
        ours, theirs = socket.socketpair()
        threading.Thread(target=_serve, args=(listener, theirs), name="xrank store", daemon=True).start()
        finalize(self, ours.close)


_Steps: TypeAlias = Generator[int | bytes, bytes, None]
"""Yields a number of bytes to be sent that many, and bytes to send them."""


class _Connection:
    """A rank's connection as the server sees it."""

    def __init__(self, connection: socket.socket, values: dict[bytes, bytes]) -> None:
        self.socket = connection
        self._received, self._to_send = bytearray(), bytearray()
        self._steps = _answer(values)
        self._wanted = next(self._steps)

    def go_on(self, ready: int) -> int:
        """Receive requests and send answers, and return the events to wait for; OSError at its end."""
        if ready & selectors.EVENT_READ:
            if not (data := self.socket.recv(_CHUNK_NBYTES)):
                raise ConnectionResetError
            self._received += data
            while isinstance(self._wanted, int) and len(self._received) >= self._wanted:
                taken = bytes(memoryview(self._received)[: self._wanted])
                del self._received[: self._wanted]
                self._wanted = self._steps.send(taken)
                while isinstance(self._wanted, bytes):
                    self._to_send += self._wanted
                    self._wanted = next(self._steps)
        if self._to_send:
            with suppress(BlockingIOError):
                del self._to_send[: self.socket.send(self._to_send)]
        # A rank that does not read its answers is not answered further.
        return selectors.EVENT_WRITE if self._to_send else selectors.EVENT_READ


def _serve(listener: socket.socket, end: socket.socket) -> None:
    """Serve all ranks until the other side of `end` is closed."""
    values: dict[bytes, bytes] = {}
    with listener, end, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        for one in (listener, end):
            selector.register(one, selectors.EVENT_READ)
        while True:
            for key, ready in selector.select():
                if key.fileobj is end:
                    for other in list(selector.get_map().values()):
                        if other.data is not None:
                            other.data.socket.close()
                    return
                if key.fileobj is listener:
                    with suppress(OSError):  # it has gone again
                        connection, _ = listener.accept()
                        connection.setblocking(False)
                        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        selector.register(connection, selectors.EVENT_READ, _Connection(connection, values))
                    continue
                try:
                    selector.modify(key.fileobj, key.data.go_on(ready), key.data)
                except (OSError, ValueError):  # it has ended, or is no rank
                    selector.unregister(key.fileobj)
                    key.data.socket.close()


def _answer(values: dict[bytes, bytes]) -> _Steps:
    """Answer the requests of one connection; ValueError if they are not those of a rank."""
    if (yield 1 + _SMALL.size) != bytes([_VALIDATE]) + _SMALL.pack(_MAGIC):
        raise ValueError("not a rank")
    while True:
        kind = (yield 1)[0]
        if kind == _PING:
            yield (yield _SMALL.size)
        elif kind == _SET:
            name = yield from _take()
            values[name] = yield from _take()
        elif kind == _GET:
            value = values.get((yield from _take()), b"")
            yield _LENGTH.pack(len(value)) + value
        elif kind == _ADD:
            name = yield from _take()
            number = int(values.get(name, b"0")) + _NUMBER.unpack((yield _NUMBER.size))[0]
            values[name] = b"%d" % number
            yield _NUMBER.pack(number)
        elif kind == _CHECK:
            found = True
            for _ in range(_LENGTH.unpack((yield _LENGTH.size))[0]):
                found &= (yield from _take()) in values
            yield _READY if found else _NOT_READY
        elif kind == _DELETE:
            yield _NUMBER.pack(values.pop((yield from _take()), None) is not None)
        else:
            raise ValueError(f"a request of an unknown kind: {kind}")


def _take() -> Generator[int | bytes, bytes, bytes]:
    """Return a name or value of a request."""
    nbytes = _LENGTH.unpack((yield _LENGTH.size))[0]
    if nbytes > _MOST_NBYTES:
        raise ValueError(f"{nbytes:,} bytes at once")
    return (yield nbytes)
