"""A small server of Google Cloud Storage's XML API, in memory: what its reference describes of objects and composing.

Ranges, conditional requests, listings by pages, MD5s, generations; a request composes at most 32 objects. As Google, it
gives composed objects no MD5, and knows no etag as a condition on writing.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from email.utils import formatdate
from html import unescape
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.closing_server import ClosingServer
from tests.storage.small_s3 import RefusalError
from tests.storage.stored_objects import StoredObject

TOKEN = "ya29.marked-token-3f9a0c77"
"""The token of every test: it may appear in no output."""
PARTS = ".xrank-parts/"
Answer = tuple[int, dict[str, str], bytes]


class SmallGoogle(ClosingServer):
    """The server; every bucket exists. ``page_nkeys`` is the number of keys in an answer to a listing."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], tuple[StoredObject, int]] = {}
        """Bucket and key -> the object and its generation."""
        self.composed: list[int] = []
        """Numbers of the sources of each request that composed."""
        self.page_nkeys = 1000
        self.lock = threading.RLock()
        self.generations = itertools.count(1_700_000_000_000_001)
        super().__init__(("127.0.0.1", 0), _Handler)

    def read_all(self, bucket: str) -> dict[str, bytes]:
        """Return the bytes of a bucket's objects by key, without parts of uploads."""
        with self.lock:
            found = [(key, one) for (name, key), (one, _) in self.objects.items() if name == bucket]
            return {key: bytes(one.body[:]) for key, one in found if not key.startswith(PARTS)}

    def list_parts(self, bucket: str) -> set[str]:
        """Return the keys of the parts of uploads."""
        with self.lock:
            return {key for name, key in self.objects if name == bucket and key.startswith(PARTS)}

    def forget(self, bucket: str) -> None:
        """Drop all objects of a bucket."""
        with self.lock:
            self.objects = {place: one for place, one in self.objects.items() if place[0] != bucket}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: SmallGoogle

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.bucket, _, key = parts.path.lstrip("/").partition("/")
        self.key = unquote(key)
        nbytes = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(nbytes)
        if len(self.body) != nbytes:
            raise ConnectionError("the client broke off")
        md5 = self.headers.get("Content-MD5")
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise RefusalError(401, "AuthenticationRequired")
            if md5 is not None and base64.b64decode(md5) != hashlib.md5(self.body).digest():
                raise RefusalError(400, "BadDigest")
            answer = {"PUT": self._put, "DELETE": self._delete}.get(self.command, self._get)
            with self.server.lock:
                status, headers, body = answer()
        except RefusalError as refusal:
            body = f"<?xml version='1.0'?><Error><Code>{refusal.code}</Code></Error>".encode()
            status, headers = refusal.status, {"Content-Type": "application/xml"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_DELETE = _serve  # noqa: N815  http.server's names

    def _get(self) -> Answer:
        if not self.key:
            return self._list()
        if (self.bucket, self.key) not in self.server.objects:
            raise RefusalError(404, "NoSuchKey")
        found, generation = self.server.objects[self.bucket, self.key]
        if self.headers.get("If-Match") not in (None, "*", found.etag):
            raise RefusalError(412, "PreconditionFailed")
        size = len(found.body)
        headers = {"ETag": found.etag, "Last-Modified": found.modified, "x-goog-generation": str(generation)}
        headers |= {f"x-goog-meta-{name}": value for name, value in found.metadata.items()}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return 200, headers | {"Content-Length": str(size)}, bytes(found.body[:])
        start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        end = min(int(wanted[2] or size - 1), size - 1) if wanted[1] else size - 1
        if start >= size:
            raise RefusalError(416, "InvalidRange")
        return 206, headers | {"Content-Range": f"bytes {start}-{end}/{size}"}, bytes(found.body[start : end + 1])

    def _list(self) -> Answer:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        rows, folders, after = [], set(), self.query.get("continuation-token", "")
        for (bucket, key), (found, generation) in sorted(self.server.objects.items()):
            if bucket != self.bucket or not key.startswith(prefix) or key <= after:
                continue
            inner = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if inner[1]:
                folders.add(prefix + inner[0] + delimiter)
                continue
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Generation>{generation}</Generation>"
                f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{escape(found.etag)}</ETag>"
                f"<Size>{len(found.body)}</Size></Contents>"
            )
            if len(rows) == self.server.page_nkeys:
                rows.append(f"<NextContinuationToken>{escape(key)}</NextContinuationToken>")
                break
        is_cut = "true" if rows and rows[-1].startswith("<Next") else "false"
        names = "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders))
        text = f"{''.join(rows)}{names}<IsTruncated>{is_cut}</IsTruncated>"
        head = "<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, f"{head}{text}</ListBucketResult>".encode()

    def _put(self) -> Answer:
        condition = self.headers.get("x-goog-if-generation-match")
        there = self.server.objects.get((self.bucket, self.key))
        if condition is not None and int(condition) != (there[1] if there else 0):
            raise RefusalError(412, "PreconditionFailed")
        is_composed = "compose" in self.query
        body = self._compose() if is_composed else self.body
        generation = next(self.server.generations)
        md5 = hashlib.md5(body)
        etag = f'"-{generation:x}"' if is_composed else f'"{md5.hexdigest()}"'
        prefix = "x-goog-meta-"
        metadata = {k.lower()[len(prefix) :]: v for k, v in self.headers.items() if k.lower().startswith(prefix)}
        found = StoredObject(memoryview(body), etag, metadata, formatdate(usegmt=True))
        self.server.objects[self.bucket, self.key] = found, generation
        headers = {"ETag": etag, "x-goog-generation": str(generation), "x-goog-hash": "crc32c=AAAAAA=="}
        if not is_composed:
            headers["x-goog-hash"] += f",md5={base64.b64encode(md5.digest()).decode()}"
        return 200, headers, b""

    def _compose(self) -> bytes:
        text = self.body.decode(errors="replace")
        pieces = re.findall(
            r"<Component><Name>([^<]+)</Name><Generation>(\d+)</Generation></Component>",
            text,
        )
        if not 1 <= len(pieces) <= 32 or len(pieces) != text.count("<Component>"):
            raise RefusalError(400, "InvalidRequest")
        self.server.composed.append(len(pieces))
        sources = [self.server.objects.get((self.bucket, unescape(name))) for name, _ in pieces]
        if any(one is None or one[1] != int(generation) for one, (_, generation) in zip(sources, pieces, strict=True)):
            raise RefusalError(404, "NoSuchKey")
        return b"".join(one[0].body[:] for one in sources if one)

    def _delete(self) -> Answer:
        if self.server.objects.pop((self.bucket, self.key), None) is None:
            raise RefusalError(404, "NoSuchKey")
        return 204, {}, b""
