"""Single HTTP requests to one host, for what obstore hides: the parts of uploads, and their checksums.

Redirects are not followed, so that no other host gets the credentials.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self
from urllib.parse import quote

from xrank import system
from xrank.stores.faults import FaultError, FaultKind

_REQUEST_SECONDS = 60.0
MOST_NBYTES = 32 << 20
"""Most bytes of an answer that is not an object's: a page of a list, an error."""
_STEP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer; names of headers are lower case."""

    headers: Mapping[str, str]
    body: bytes
    status: int = 200
    reason: str = ""
    is_in_place: bool = False
    """Whether the body is in the caller's buffer; `body` is empty then."""


class HttpConnection:
    """Sends requests to one host; any thread may call it. Idle connections are kept until `close`.

    Args:
        host: host and port.
        is_plain: whether without TLS.
        timeout_seconds: patience for one answer, from the request to its last byte.
    """

    def __init__(self, host: str, *, is_plain: bool, timeout_seconds: float) -> None:
        self.host = host
        self._timeout_seconds = min(_REQUEST_SECONDS, timeout_seconds)
        self._total_seconds = timeout_seconds
        self._idle: list[http.client.HTTPConnection] = []
        self._tls = None if is_plain else ssl.create_default_context()

        # Not closed: the parent's connections stay the parent's.
        system.after_fork_in_child(self._idle.clear)

    def close(self) -> None:
        """Close all connections; no request may be under way."""
        while self._idle:
            self._idle.pop().close()

    def exchange(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | memoryview,
        into: memoryview | None = None,
        *,
        most_nbytes: int = MOST_NBYTES,
    ) -> Answer:
        """Send one request and return its answer, whatever its status is.

        The body of a good answer that has as many bytes as `into` is received there.

        Args:
            method: of the request.
            target: of the request.
            headers: of the request.
            body: of the request.
            into: a buffer for the answer's body.
            most_nbytes: most bytes of another body.

        Raises:
            FaultError: no whole answer came in time, or a longer one.
        """
        connection = self._connect()
        try:
            with _Watch(connection, self._total_seconds) as watch:
                connection.request(method, target, body or None, {**headers, "Content-Length": str(len(body))})
                response = connection.getresponse()
                is_in_place = _receive_into(response, into)
                content = b"" if is_in_place else _receive(response, most_nbytes)
                watch.check()
        except (OSError, http.client.HTTPException) as error:
            # The next request connects again: this connection may still carry the rest of an answer.
            connection.close()
            raise FaultError(FaultKind.PASSING, _describe(error)) from None
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            self._idle.append(connection)
        found = {name.lower(): value for name, value in response.getheaders()}
        return Answer(found, content, response.status, response.reason, is_in_place)

    def _connect(self) -> http.client.HTTPConnection:
        with suppress(IndexError):
            return self._idle.pop()
        if self._tls is None:
            return http.client.HTTPConnection(self.host, timeout=self._timeout_seconds)
        return http.client.HTTPSConnection(self.host, timeout=self._timeout_seconds, context=self._tls)


class _Watch:
    """Ends a connection that carries one request for too long: its own time-out is for each read of some bytes."""

    def __init__(self, connection: http.client.HTTPConnection, seconds: float) -> None:
        if connection.sock is None:
            connection.connect()
        # The socket itself: a connection gives it away once an answer says that it is the last.
        self._socket: socket.socket = connection.sock
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._is_over = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def check(self) -> None:
        """Raise if the time was over, as the end of the connection may look like the end of an answer."""
        if self._is_over:
            raise TimeoutError

    def _end(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _receive(response: http.client.HTTPResponse, most_nbytes: int) -> bytes:
    """Return a body of at most so many bytes, whatever the answer says of its length."""
    if response.length is not None and response.length <= most_nbytes:
        return response.read()
    parts, nbytes = [], 0
    while part := response.read(_STEP_NBYTES):
        parts.append(part)
        nbytes += len(part)
        if nbytes > most_nbytes:
            raise http.client.HTTPException(f"more than {most_nbytes:,} bytes")
    return b"".join(parts)


def _receive_into(response: http.client.HTTPResponse, into: memoryview | None) -> bool:
    if into is None or response.status not in (200, 206) or response.length != len(into):
        return False
    if response.readinto(into) != len(into):
        raise http.client.IncompleteRead(b"")
    return True


def encode_path(path: str) -> str:
    """Return a path, with its slashes, as stores expect it in a request and in its signature."""
    return quote(path, safe="/-._~")


def encode_query(query: Mapping[str, str]) -> str:
    """Return a query as stores expect it in a request and in its signature: sorted, all else encoded."""
    return "&".join(f"{quote(name, safe='-._~')}={quote(query[name], safe='-._~')}" for name in sorted(query))


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is not valid: {error.verify_message}"
    if isinstance(error, ConnectionRefusedError):
        return "no connection"
    if type(error) is http.client.HTTPException:
        return str(error)
    return "the connection broke"
