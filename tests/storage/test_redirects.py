"""No redirect to another host is followed: it would carry a key or a signature there."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from tests.storage.closing_server import ClosingServer
from tests.storage.servers import KEY_ID, SECRET, Bucket
from xrank.errors import UsageError
from xrank.storage.places import open_store

TOKEN = "marked-session-token"


class _Server(ClosingServer):
    """Answers every request with a redirect, or with four bytes, and keeps the headers it got."""

    target = ""

    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__(("127.0.0.1", 0), _Handler)


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
        server.close()


@pytest.fixture
def variables(servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(f"http://127.0.0.1:{servers[0].server_address[1]}", "bucket")
    for name, value in (bucket.environment() | {"XRANK_STORE_TIMEOUT": "2"}).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("variables")
@pytest.mark.parametrize("token", [None, TOKEN])
def test_no_redirect_is_followed_with_a_key(
    servers: tuple[_Server, _Server], monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    first, other = servers
    if token is not None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    store, key = open_store("s3://bucket/run/a")
    with pytest.raises(UsageError, match="in another region") as refused:
        store.read(key, 0, 4)
    assert any((token or KEY_ID) in headers for headers in first.seen)
    assert not other.seen
    assert SECRET not in str(refused.value.to_dict()) and TOKEN not in str(refused.value.to_dict())
