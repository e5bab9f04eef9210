"""A hub of models in this process: lists a repository, and redirects files' ranges to another host, as the Hub does."""

from __future__ import annotations

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.storage.closing_server import ClosingServer

COMMIT = "a" * 40


class FakeHub(ClosingServer):
    """Serves the files of one repository, ``org/name``; its large files come from the same server as ``localhost``."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.exists = True
        self.large: dict[str, bytes] = {}
        """Content of large files by SHA-256, uploaded before the commit."""
        self.commits: list[dict[str, Any]] = []
        """Header of each commit."""
        self.fails = 0
        """Number of uploads of large files to refuse."""
        self.seen: list[tuple[str, str, str | None]] = []
        """(method, path, Authorization) of each request."""
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def head(self) -> str:
        """The last commit."""
        return f"{len(self.commits):040x}" if self.commits else COMMIT

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
            if not self.server.exists:
                return self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            if rest[0] in ("", "revision"):
                siblings = [{"rfilename": one} for one in self.server.files]
                return self._send(200, {"id": "org/name", "sha": self.server.head, "siblings": siblings})
            if rest[0] == "preupload":
                return self._answer_preupload(json.loads(body))
            if rest[0] == "commit":
                return self._commit([json.loads(line) for line in body.splitlines()])
            if rest[0] == "tree":
                folder = "/".join(rest[2:])
                return self._send(200, [self.server.entry(one) for one in sorted(self.server.files) if not folder])
            if rest[0] == "paths-info":
                wanted = json.loads(body).get("paths", []) if body.startswith(b"{") else []
                return self._send(200, [self.server.entry(one) for one in wanted if one in self.server.files])
        if path == "/api/whoami-v2":
            return self._send(200, {"type": "user", "name": "org"})
        if path == "/api/repos/create":
            self.server.exists = True
            return self._send(200, {"url": f"{self.server.url}/org/name"})
        if path == "/api/validate-yaml":
            return self._send(200, {"errors": [], "warnings": []})
        if path == "/org/name.git/info/lfs/objects/batch":
            return self._answer_batch(json.loads(body))
        if path.startswith("/lfs/"):
            if self.server.fails:
                self.server.fails -= 1
                return self._send(403, {"error": "no"})
            self.server.large[path.removeprefix("/lfs/")] = body
            return self._send(200, {})
        if path.startswith("/org/name/resolve/"):
            self.send_response(302)
            self.send_header("Location", f"{self.server.other_url}/cdn/{path.split('/', 5)[5]}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if path.startswith("/cdn/"):
            return self._send_file(self.server.files.get(path.removeprefix("/cdn/")))
        return self._send(404, {"error": "not found"})

    def _answer_preupload(self, question: dict[str, Any]) -> None:
        modes = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular"}
            for one in question["files"]
        ]
        return self._send(200, {"files": [{**one, "shouldIgnore": False} for one in modes]})

    def _answer_batch(self, question: dict[str, Any]) -> None:
        objects = []
        for one in question["objects"]:
            actions = {"upload": {"href": f"{self.server.other_url}/lfs/{one['oid']}"}}
            objects.append(
                {**one, "authenticated": True, **({} if one["oid"] in self.server.large else {"actions": actions})}
            )
        return self._send(200, {"transfer": "basic", "objects": objects})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, self.server.head):
            return self._send(412, {"error": "A commit has happened since"})
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.server.files[value["path"]]
        self.server.commits.append(header)
        url = f"{self.server.url}/org/name/commit/{self.server.head}"
        return self._send(200, {"success": True, "commitUrl": url, "commitOid": self.server.head, "hookOutput": ""})

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815  http.server's names

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, content in (headers or {}).items():
            self.send_header(name, content)
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
