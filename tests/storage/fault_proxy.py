"""A proxy between a client and an S3 server that records requests and injects faults: a network on a bad day."""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.storage.closing_server import ClosingServer

FaultKind = Literal[
    "latency",  # the answer comes late
    "reset",  # the connection is reset in the middle of the answer's body
    "lost",  # the server did what was asked, and its answer is lost
    "short",  # the body ends before the promised length
    "wrong",  # a byte of the answer's body is another; of the request's where that has one
    "stall",  # the body stops, and the connection stays open
    "forbidden",  # 403
    "gone",  # 404
    "changed",  # 412
    "throttled",  # 429
    "broken",  # 500
    "storm",  # 503, for this request and those of the next half second
]

STATUSES: dict[str, tuple[int, str]] = {
    "forbidden": (403, "AccessDenied"),
    "gone": (404, "NoSuchKey"),
    "changed": (412, "PreconditionFailed"),
    "throttled": (429, "TooManyRequests"),
    "broken": (500, "InternalError"),
    "storm": (503, "SlowDown"),
}

TEMPORARY: tuple[FaultKind, ...] = ("latency", "reset", "lost", "short", "throttled", "broken", "storm")
"""Faults after which a client that tries again succeeds."""

EVERY: tuple[FaultKind, ...] = (*TEMPORARY, "wrong", "stall", "forbidden", "gone", "changed")

_LATENCY_SECONDS = 0.02
_HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "expect", "server", "date"}
)


@dataclass(frozen=True)
class Request:
    """A request as the proxy saw it."""

    number: int
    """From 1 on."""
    method: str
    path: str
    """With the query."""
    headers: dict[str, str]
    nbytes: int
    """Bytes of its body."""
    status: int
    answered_nbytes: int
    fault: FaultKind | None = None


Chooser = Callable[[int, str, str], FaultKind | None]
"""Number, method and path of a request -> the fault to inject."""


def choose_by_seed(seed: int, rate: float, kinds: Iterable[FaultKind] = EVERY) -> Chooser:
    """Return a chooser that gives a request, by its number, one of these faults at that rate."""
    chosen = tuple(kinds)

    def choose(number: int, method: str, path: str) -> FaultKind | None:
        dice = random.Random(f"{seed} {number}")
        return dice.choice(chosen) if dice.random() < rate else None

    return choose


def choose_at(faults: dict[int, FaultKind]) -> Chooser:
    """Return a chooser of these faults by the request's number."""
    return lambda number, method, path: faults.get(number)


def no_fault(number: int, method: str, path: str) -> FaultKind | None:
    """Choose no fault."""
    return None


class FaultProxy(ClosingServer):
    """Forwards to a server.

    Args:
        target: the server's address.
        choose: decides each request's fault; may be set later.
        latency_seconds: added to every request.

    ``requests`` records all, in the order of their answers. ``kill(pid, number, when)`` kills that process as soon as
    it has sent its request of that number: before the server sees it, or after the server has answered.
    """

    def __init__(self, target: str, choose: Chooser = no_fault, *, latency_seconds: float = 0.0) -> None:
        parts = urlsplit(target)
        self.target = (parts.hostname or "", parts.port or 80)
        self.choose = choose
        self.latency_seconds = latency_seconds
        self.stall_seconds = 30.0
        self.storm_seconds = 0.5
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._count = 0
        self._storm_until = 0.0
        self._kill: tuple[Callable[[], int], int, str] | None = None
        self._closed = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)

    def kill(self, pid: Callable[[], int], number: int, when: Literal["before", "after"]) -> None:
        """Kill a process at its request of that number, counted from now."""
        with self._lock:
            self._count = 0
            self._kill = (pid, number, when)

    def restart(self, choose: Chooser = no_fault) -> None:
        """Forget all requests, count from 1 again, and choose faults by another chooser."""
        with self._lock:
            self._count, self._kill, self.choose, self._storm_until = 0, None, choose, 0.0
            self.requests = []  # a request of an earlier program that ends now is not counted

    def close(self) -> None:
        """Stop serving, and end all waits."""
        self._closed.set()
        super().close()

    def begin(self, method: str, path: str) -> tuple[int, FaultKind | None]:
        with self._lock:
            self._count += 1
            number = self._count
            fault = self.choose(number, method, path)
            now = time.monotonic()
            if fault == "storm":
                self._storm_until = now + self.storm_seconds
            elif now < self._storm_until:
                fault = "storm"
        return number, fault

    def record(self, request: Request, requests: list[Request]) -> None:
        with self._lock:
            requests.append(request)

    def kill_at(self, number: int, when: str) -> bool:
        """Kill the process if this is its moment; return whether it was."""
        with self._lock:
            if self._kill is None or (number, when) != self._kill[1:]:
                return False
            pid = self._kill[0]
            self._kill = None
        os.kill(pid(), signal.SIGKILL)
        return True

    def wait(self, seconds: float) -> None:
        """Wait, but not for longer than the proxy serves."""
        self._closed.wait(seconds)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: FaultProxy
    _upstream: http.client.HTTPConnection | None = None

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        """Ask for the body at once, not with the answer: until then the client waits."""
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        body = self._read_body()
        proxy = self.server
        self._requests = proxy.requests
        number, fault = proxy.begin(self.command, self.path)
        if proxy.kill_at(number, "before"):
            self.close_connection = True
            return
        proxy.wait(proxy.latency_seconds + (_LATENCY_SECONDS if fault == "latency" else 0.0))
        if fault in STATUSES:
            status, code = STATUSES[fault]
            answer = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
            self._record(number, body, status, len(answer), fault)
            self._answer(status, {"Content-Type": "application/xml"}, answer)
            return
        sent = _flip(body, number) if fault == "wrong" and body else body
        status, headers, answer = self._forward(sent)
        self._record(number, body, status, len(answer), fault)
        if proxy.kill_at(number, "after"):
            self.close_connection = True
            return
        if fault == "wrong" and not body and self.command == "GET":
            answer = _flip(answer, number)
        match fault:
            case "lost":
                self._reset()
            case "reset" | "short" | "stall":
                self._answer(status, headers, answer, sent_nbytes=len(answer) // 2)
                if fault == "stall":
                    proxy.wait(proxy.stall_seconds)
                if fault == "reset":
                    self._reset()
                self.close_connection = True
            case _:
                self._answer(status, headers, answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815  http.server's names

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            nbytes = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(nbytes)
            if len(body) != nbytes:
                raise ConnectionError("the client broke off")
            return body
        chunks = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        dropped = _HOP_HEADERS - {"date"}  # signed by clients of Azure
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        headers["Content-Length"] = str(len(body))
        for attempt in (1, 2):
            if self._upstream is None:
                self._upstream = http.client.HTTPConnection(*self.server.target, timeout=60)
                self._upstream.connect()
                self._upstream.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._upstream.request(self.command, self.path, body, headers)
                response = self._upstream.getresponse()
                answer = response.read()
            except (http.client.HTTPException, OSError):
                # The server may have closed a connection that was idle.
                self._upstream.close()
                self._upstream = None
                if attempt == 2:
                    raise
            else:
                kept = {n: v for n, v in response.getheaders() if n.lower() not in _HOP_HEADERS - {"date"}}
                if self.command == "HEAD":
                    kept["Content-Length"] = response.getheader("Content-Length") or "0"
                return response.status, kept, answer
        raise AssertionError("unreachable")

    def _answer(self, status: int, headers: dict[str, str], answer: bytes, *, sent_nbytes: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if not any(name.lower() == "content-length" for name in headers) and status not in (204, 304):
            self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer[:sent_nbytes])
        self.wfile.flush()

    def _reset(self) -> None:
        """Close the connection with a reset, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _record(self, number: int, body: bytes, status: int, nbytes: int, fault: FaultKind | None) -> None:
        request = Request(number, self.command, self.path, dict(self.headers), len(body), status, nbytes, fault)
        self.server.record(request, self._requests)

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        super().finish()


def _flip(data: bytes, seed: int) -> bytes:
    """Return the data with one bit of one byte changed."""
    if not data:
        return data
    at = random.Random(seed).randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
