"""A small server of Azure's blob storage, in memory: fast enough for kills at every request, where Azurite is not.

It serves what the Azure Storage REST reference describes of: ranges, conditional requests, listings, blocks, block
lists and MD5s. As Azure, it shows no blob that has blocks only, and forgets all other blocks when a blob is written.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import threading
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.storage.closing_server import ClosingServer
from tests.storage.small_s3 import RefusalError
from tests.storage.stored_objects import StoredObject

ACCOUNT = "devstoreaccount1"
Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Blob:
    """A name in a container: what readers see, and blocks that they do not."""

    seen: StoredObject | None = None
    blocks: dict[str, bytes] = field(default_factory=dict)


class SmallAzure(ClosingServer):
    """The server; ``blobs`` is for tests to look at."""

    def __init__(self) -> None:
        self.blobs: dict[tuple[str, str], Blob] = {}
        self.lock = threading.RLock()
        self.etags = itertools.count(1)
        super().__init__(("127.0.0.1", 0), _Handler)

    def read_all(self, container: str) -> dict[str, bytes]:
        """Return the bytes of a container's blobs by key."""
        with self.lock:
            return {key: blob.seen.body for (name, key), blob in self.blobs.items() if name == container and blob.seen}

    def list_blocks(self, container: str) -> dict[tuple[str, str], bytes]:
        """Return the blocks that no blob has taken by key and name."""
        with self.lock:
            found = [(key, blob) for (name, key), blob in self.blobs.items() if name == container]
            return {(key, name): data for key, blob in found for name, data in blob.blocks.items()}

    def forget(self, container: str) -> None:
        """Drop all blobs of a container."""
        with self.lock:
            self.blobs = {place: blob for place, blob in self.blobs.items() if place[0] != container}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: SmallAzure

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        account, _, place = parts.path.lstrip("/").partition("/")
        assert account == ACCOUNT
        self.container, _, key = place.partition("/")
        self.key = unquote(key)
        nbytes = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(nbytes)
        if len(self.body) != nbytes:
            raise ConnectionError("the client broke off")
        md5 = self.headers.get("Content-MD5")
        try:
            if md5 is not None and base64.b64decode(md5) != hashlib.md5(self.body).digest():
                raise RefusalError(400, "Md5Mismatch")
            answer = {"PUT": self._put, "DELETE": self._delete}.get(self.command, self._get)
            with self.server.lock:
                status, headers, body = answer()
        except RefusalError as refusal:
            status, headers, body = refusal.status, {"x-ms-error-code": refusal.code}, b""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_PUT = do_DELETE = _serve  # noqa: N815  http.server's names

    def _blob(self) -> Blob:
        return self.server.blobs.get((self.container, self.key)) or Blob()

    def _get(self) -> Answer:
        blob = self._blob()
        if self.query.get("comp") == "list":
            return self._list()
        if self.query.get("comp") == "blocklist":
            return self._list_blocks(blob)
        found = blob.seen
        if found is None:
            raise RefusalError(404, "BlobNotFound")
        if self.headers.get("If-Match") not in (None, "*", found.etag):
            raise RefusalError(412, "ConditionNotMet")
        size = len(found.body)
        headers = {"ETag": found.etag, "Last-Modified": found.modified, "x-ms-blob-type": "BlockBlob"}
        headers |= {f"x-ms-meta-{name}": value for name, value in found.metadata.items()}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("x-ms-range") or self.headers.get("Range", ""))
        if wanted is None:
            return 200, headers | {"Content-Length": str(size)}, found.body
        start = int(wanted[1]) if wanted[1] else max(0, size - int(wanted[2]))
        end = min(int(wanted[2] or size - 1), size - 1) if wanted[1] else size - 1
        if start >= size:
            raise RefusalError(416, "InvalidRange")
        return 206, headers | {"Content-Range": f"bytes {start}-{end}/{size}"}, found.body[start : end + 1]

    def _list(self) -> Answer:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        with_blocks = "uncommittedblobs" in self.query.get("include", "")
        found, folders = [], set()
        for (container, key), blob in sorted(self.server.blobs.items()):
            if container != self.container or not key.startswith(prefix) or not (blob.seen or with_blocks):
                continue
            inner = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if inner[1]:
                folders.add(prefix + inner[0] + delimiter)
                continue
            seen = blob.seen or StoredObject(b"", '""')
            found.append(
                f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{seen.modified}</Last-Modified>"
                f"<Etag>{seen.etag.strip(chr(34))}</Etag><Content-Length>{len(seen.body)}</Content-Length>"
                "<Content-Type>application/octet-stream</Content-Type><BlobType>BlockBlob</BlobType></Properties>"
                "</Blob>"
            )
        names = "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders))
        text = f"<EnumerationResults><Blobs>{''.join(found)}{names}</Blobs><NextMarker/></EnumerationResults>"
        return 200, {"Content-Type": "application/xml"}, b'\xef\xbb\xbf<?xml version="1.0"?>' + text.encode()

    def _list_blocks(self, blob: Blob) -> Answer:
        if blob.seen is None and not blob.blocks:
            raise RefusalError(404, "BlobNotFound")
        rows = "".join(
            f"<Block><Name>{name}</Name><Size>{len(data)}</Size></Block>" for name, data in blob.blocks.items()
        )
        text = f"<BlockList><CommittedBlocks/><UncommittedBlocks>{rows}</UncommittedBlocks></BlockList>"
        return 200, {"Content-Type": "application/xml"}, b"\xef\xbb\xbf" + text.encode()

    def _put(self) -> Answer:
        if self.query.get("restype") == "container":
            return 201, {}, b""  # every container exists
        blob = self.server.blobs.setdefault((self.container, self.key), Blob())
        md5 = {"Content-MD5": base64.b64encode(hashlib.md5(self.body).digest()).decode()}
        if self.query.get("comp") == "block":
            name = self.query["blockid"]
            if len({len(one) for one in (*blob.blocks, name)}) != 1 or len(base64.b64decode(name)) > 64:
                raise RefusalError(400, "InvalidBlobOrBlock")
            blob.blocks[name] = self.body
            return 201, md5, b""
        body = self.body
        self._check_conditions(blob)
        if self.query.get("comp") == "blocklist":
            names = re.findall(r"<Latest>(.*?)</Latest>", body.decode())
            if any(name not in blob.blocks for name in names):
                raise RefusalError(400, "InvalidBlockList")
            body = b"".join(blob.blocks[name] for name in names)
        prefix = "x-ms-meta-"
        metadata = {k.lower()[len(prefix) :]: v for k, v in self.headers.items() if k.lower().startswith(prefix)}
        etag = f'"0x{next(self.server.etags):X}"'
        blob.seen = StoredObject(body, etag, metadata, formatdate(usegmt=True))
        blob.blocks.clear()
        return 201, {**md5, "ETag": etag, "Last-Modified": blob.seen.modified}, b""

    def _check_conditions(self, blob: Blob) -> None:
        if self.headers.get("If-None-Match") == "*" and blob.seen is not None:
            raise RefusalError(409, "BlobAlreadyExists")
        wanted = self.headers.get("If-Match")
        if wanted is not None and (blob.seen is None or wanted != blob.seen.etag):
            raise RefusalError(412, "ConditionNotMet")

    def _delete(self) -> Answer:
        blob = self.server.blobs.pop((self.container, self.key), None)
        if blob is None:
            raise RefusalError(404, "BlobNotFound")
        return 202, {}, b""
