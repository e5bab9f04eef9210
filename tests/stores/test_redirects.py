"""A redirect to another host carries neither a key nor a signature there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.stores.servers import KEY_ID, SECRET, Bucket
from xrank.errors import XrankError
from xrank.stores.client import open_store

TOKEN = "marked-session-token"


class _Server(ThreadingHTTPServer):
    """Answers every request with a redirect, or with four bytes, and keeps the headers it got."""

    daemon_threads = True
    target = ""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.seen.append(f"{self.path}\n{self.headers}")
        self.send_response(307 if self.server.target else 206)
        if self.server.target:
            self.send_header("Location", self.server.target + self.path)
        self.send_header("Content-Range", "bytes 0-3/4")
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 00:00:00 GMT")
        self.send_header("Content-Length", "0" if self.server.target else "4")
        self.end_headers()
        if not self.server.target:
            self.wfile.write(b"1234")


@pytest.fixture
def servers() -> Iterator[tuple[_Server, _Server]]:
    first, other = _Server(), _Server()
    first.target = f"http://localhost:{other.server_address[1]}"  # another host by its name
    yield first, other
    for server in (first, other):
        server.shutdown()
        server.server_close()


def test_credentials_stay_with_their_host(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = servers
    bucket = Bucket(f"http://127.0.0.1:{first.server_address[1]}", "bucket")
    for name, value in (bucket.environment() | {"AWS_SESSION_TOKEN": TOKEN, "XRANK_STORE_TIMEOUT": "2"}).items():
        monkeypatch.setenv(name, value)
    store, key = open_store("s3://bucket/run/a")
    try:
        store.read(key, 0, 4)
    except XrankError as error:
        assert SECRET not in str(error.to_dict()) and TOKEN not in str(error.to_dict())  # refusing it is right, too
    assert any(KEY_ID in headers for headers in first.seen)
    # object_store 0.14 leaves out Authorization alone: a session token goes along, which opens nothing without its key.
    assert other.seen and not any(secret in headers for headers in other.seen for secret in (KEY_ID, SECRET))
