"""A hub of models in this process: lists a repository, and redirects files' ranges to another host, as the Hub does."""

from __future__ import annotations

import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.stores.closing_server import ClosingServer

COMMIT = "a" * 40


class FakeHub(ClosingServer):
    """Serves the files of one repository, ``org/name``; its large files come from the same server as ``localhost``."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.seen: list[tuple[str, str, str | None]] = []
        """(method, path, Authorization) of each request."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def other_url(self) -> str:
        return f"http://localhost:{self.server_address[1]}"

    def entry(self, path: str) -> dict[str, Any]:
        """Return a file as the Hub lists it."""
        data = self.files[path]
        oid = hashlib.sha1(data).hexdigest()
        return {"type": "file", "path": path, "size": len(data), "oid": oid}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeHub

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append((self.command, path, self.headers.get("Authorization")))
        if path.startswith("/api/models/org/name"):
            rest = path.removeprefix("/api/models/org/name").strip("/").split("/")
            if rest[0] in ("", "revision"):
                return self._send(200, {"id": "org/name", "sha": COMMIT, "siblings": []})
            if rest[0] == "tree":
                folder = "/".join(rest[2:])
                return self._send(200, [self.server.entry(one) for one in sorted(self.server.files) if not folder])
            if rest[0] == "paths-info":
                wanted = json.loads(body).get("paths", []) if body.startswith(b"{") else []
                return self._send(200, [self.server.entry(one) for one in wanted if one in self.server.files])
        if path.startswith("/org/name/resolve/"):
            self.send_response(302)
            self.send_header("Location", f"{self.server.other_url}/cdn/{path.split('/', 5)[5]}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if path.startswith("/cdn/"):
            return self._send_file(self.server.files.get(path.removeprefix("/cdn/")))
        return self._send(404, {"error": "not found"})

    do_GET = do_HEAD = do_POST = _serve  # noqa: N815  http.server's names

    def _send(self, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _send_file(self, data: bytes | None) -> None:
        if data is None:
            return self._send(404, {"error": "not found"})
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last or len(data) - 1) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)
        return None
