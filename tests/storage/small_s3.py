"""A small S3 server of its own, in memory: the second one beside moto's, and fast enough for thousands of kills.

It serves what the S3 API reference describes of: ranges, conditional requests, listings, multipart uploads, checksums.
Unlike moto it refuses bodies whose Content-MD5 or x-amz-checksum-crc32 is another's, as Amazon's does. Bodies are
received into place and sent from there; with `is_cheap` it leaves out the hashes, too, for measurements of clients.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import re
import threading
import time
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from isal import isal_zlib

from tests.storage.closing_server import ClosingServer
from tests.storage.stored_objects import Joined, StoredObject, Upload


class RefusalError(Exception):
    """An error that S3 answers with."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class SmallS3(ClosingServer):
    """The server; ``objects`` and ``uploads`` are for tests to look at."""

    def __init__(self) -> None:
        self.smallest_part_nbytes = 5 << 20
        self.compares_sums = True
        self.is_cheap = False
        """Whether etags are made of CRCs, and no hashes compared: those of a real store cost its clients nothing."""
        self.busy_share = 0.0
        """Share of requests that are answered with 503."""
        self._random = random.Random(0)
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self.lock = threading.RLock()
        self.latency_seconds = 0.0
        self._numbers = itertools.count(1)
        super().__init__(("127.0.0.1", 0), _Handler)

    def read_all(self, bucket: str) -> dict[str, bytes]:
        """Return the bytes of a bucket's objects by key."""
        with self.lock:
            return {key: bytes(one.body[:]) for (name, key), one in self.objects.items() if name == bucket}

    def list_uploads(self, bucket: str) -> list[Upload]:
        """Return the uploads of a bucket with parts that are neither completed nor aborted."""
        with self.lock:
            return [one for one in self.uploads.values() if one.bucket == bucket and one.parts]

    def forget(self, bucket: str) -> None:
        """Drop all objects and uploads of a bucket."""
        with self.lock:
            self.objects = {place: one for place, one in self.objects.items() if place[0] != bucket}
            self.uploads = {name: one for name, one in self.uploads.items() if one.bucket != bucket}

    def is_busy(self) -> bool:
        """Return whether the next request is refused with 503."""
        return self.busy_share > 0 and self._random.random() < self.busy_share

    def new_upload(self, upload: Upload) -> str:
        identifier = f"upload-{next(self._numbers)}"
        self.uploads[identifier] = upload
        return identifier


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: SmallS3

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def handle_expect_100(self) -> bool:
        """Ask for the body at once, not with the answer: until then the client waits."""
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def _serve(self) -> None:
        answer = {"PUT": self._put, "POST": self._post, "DELETE": self._delete}.get(self.command, self._get)
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.bucket, _, key = parts.path.lstrip("/").partition("/")
        self.key = unquote(key)
        self.body = memoryview(self._read_body())
        time.sleep(self.server.latency_seconds)
        body: bytes | memoryview
        try:
            if self.server.is_busy():
                raise RefusalError(503, "SlowDown")
            self._check_sums()
            with self.server.lock:
                status, headers, body = answer()
        except RefusalError as refusal:
            status, headers = refusal.status, {}
            body = _xml("Error", f"<Code>{refusal.code}</Code><Message>{refusal.code}</Message>")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers and status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _read_body(self) -> bytes | bytearray:
        body = bytearray(int(self.headers.get("Content-Length") or 0))
        if self.rfile.readinto(body) != len(body):  # type: ignore[attr-defined]  it is a BufferedReader
            raise ConnectionError("the client broke off")
        if "aws-chunked" not in self.headers.get("Content-Encoding", "") and not self.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING"):
            return body
        # Chunks of the signature's own encoding: size;chunk-signature=..., CRLF, bytes, CRLF, then trailers.
        found, rest = [], bytes(body)
        while rest:
            line, _, rest = rest.partition(b"\r\n")
            size = int(line.partition(b";")[0], 16)
            if not size:
                break
            found.append(rest[:size])
            rest = rest[size + 2 :]
        return b"".join(found)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815  http.server's names

    # Objects

    def _get(self) -> tuple[int, dict[str, str], bytes | memoryview]:
        if "uploadId" in self.query:
            return self._list_parts()
        if "uploads" in self.query:
            return self._list_uploads()
        if not self.key:
            return self._list()
        found = self._object()
        if self.headers.get("If-Match") not in (None, "*", found.etag):
            raise RefusalError(412, "PreconditionFailed")
        if self.headers.get("If-None-Match") in ("*", found.etag):
            raise RefusalError(304, "NotModified")
        size = len(found.body)
        headers = {"ETag": found.etag, "Last-Modified": found.modified, "Accept-Ranges": "bytes"}
        headers |= {f"x-amz-meta-{name}": value for name, value in found.metadata.items()}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            body = b"" if self.command == "HEAD" else found.body[:]
            return 200, headers | {"Content-Length": str(size)}, body
        if wanted[1]:
            start, end = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
        else:
            start, end = max(0, size - int(wanted[2])), size - 1
        if start >= size:
            raise RefusalError(416, "InvalidRange")
        piece = found.body[start : end + 1]
        headers["Content-Range"] = f"bytes {start}-{end}/{size}"
        return 206, headers | {"Content-Length": str(len(piece))}, piece

    def _object(self) -> StoredObject:
        found = self.server.objects.get((self.bucket, self.key))
        if found is None:
            raise RefusalError(404, "NoSuchKey")
        return found

    def _list(self) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        start = self.query.get("continuation-token") or self.query.get("start-after", "")
        limit = int(self.query.get("max-keys", 1000))
        entries: dict[str, str] = {}
        for (bucket, key), found in sorted(self.server.objects.items()):
            if bucket != self.bucket or not key.startswith(prefix):
                continue
            inner = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if inner[1]:
                name = prefix + inner[0] + delimiter
                text = f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            else:
                name = key
                text = (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{escape(found.etag)}</ETag><Size>{len(found.body)}</Size>"
                    "<StorageClass>STANDARD</StorageClass></Contents>"
                )
            if name > start:
                entries[name] = text
        names = sorted(entries)
        more = len(names) > limit
        token = f"<NextContinuationToken>{escape(names[limit - 1])}</NextContinuationToken>" if more else ""
        return self._answer_xml(
            "ListBucketResult",
            f"<Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{min(limit, len(names))}</KeyCount>"
            f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            + "".join(entries[name] for name in names[:limit]),
        )

    def _put(self) -> tuple[int, dict[str, str], bytes]:
        if not self.key:
            return 200, {}, b""  # every bucket exists
        crc32 = isal_zlib.crc32(self.body)
        etag = f'"{crc32:032x}"' if self.server.is_cheap else f'"{hashlib.md5(self.body).hexdigest()}"'
        headers = {"ETag": etag, "x-amz-checksum-crc32": _crc32_text(crc32)}
        if "uploadId" in self.query:
            self._upload().parts[int(self.query["partNumber"])] = StoredObject(
                self.body, etag, crc32=_crc32_text(crc32)
            )
            return 200, headers, b""
        self._check_conditions()
        self.server.objects[self.bucket, self.key] = StoredObject(self.body, etag, self._metadata())
        return 200, headers, b""

    def _check_sums(self) -> None:
        if not self.server.compares_sums:
            return
        sha256 = self.headers.get("x-amz-content-sha256", "")
        is_hash = re.fullmatch("[0-9a-f]{64}", sha256) and not self.server.is_cheap
        if is_hash and sha256 != hashlib.sha256(self.body).hexdigest():
            raise RefusalError(400, "XAmzContentSHA256Mismatch")
        md5, crc32 = self.headers.get("Content-MD5"), self.headers.get("x-amz-checksum-crc32")
        if md5 is not None and not self.server.is_cheap and base64.b64decode(md5) != hashlib.md5(self.body).digest():
            raise RefusalError(400, "BadDigest")
        if crc32 is not None and crc32 != _crc32_text(isal_zlib.crc32(self.body)):
            raise RefusalError(400, "BadDigest")

    def _check_conditions(self) -> None:
        found = self.server.objects.get((self.bucket, self.key))
        if self.headers.get("If-None-Match") == "*" and found is not None:
            raise RefusalError(412, "PreconditionFailed")
        wanted = self.headers.get("If-Match")
        if wanted is not None:
            if found is None:
                raise RefusalError(404, "NoSuchKey")
            if wanted.strip('"') != found.etag.strip('"'):
                raise RefusalError(412, "PreconditionFailed")

    def _metadata(self) -> dict[str, str]:
        prefix = "x-amz-meta-"
        return {k.lower()[len(prefix) :]: v for k, v in self.headers.items() if k.lower().startswith(prefix)}

    def _delete(self) -> tuple[int, dict[str, str], bytes]:
        if "uploadId" in self.query:
            self._upload()
            del self.server.uploads[self.query["uploadId"]]
        else:
            if self.headers.get("If-Match") is not None:
                self._check_conditions()
            self.server.objects.pop((self.bucket, self.key), None)
        return 204, {}, b""

    # Multipart uploads

    def _upload(self) -> Upload:
        upload = self.server.uploads.get(self.query["uploadId"])
        if upload is None or (upload.bucket, upload.key) != (self.bucket, self.key):
            raise RefusalError(404, "NoSuchUpload")
        return upload

    def _post(self) -> tuple[int, dict[str, str], bytes]:
        if "delete" in self.query:
            keys = re.findall(r"<Key>(.*?)</Key>", str(self.body, "utf-8"), re.DOTALL)
            for key in keys:
                self.server.objects.pop((self.bucket, _unescape(key)), None)
            return self._answer_xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))
        place = f"<Bucket>{self.bucket}</Bucket><Key>{escape(self.key)}</Key>"
        if "uploads" in self.query:
            identifier = self.server.new_upload(Upload(self.bucket, self.key, self._metadata()))
            return self._answer_xml("InitiateMultipartUploadResult", f"{place}<UploadId>{identifier}</UploadId>")
        upload = self._upload()
        chosen = []
        for text in re.findall(r"<Part>(.*?)</Part>", str(self.body, "utf-8"), re.S):
            number, etag = re.search(r"<PartNumber>(\d+)<", text), re.search(r"<ETag>(.*?)<", text)
            assert number is not None
            assert etag is not None
            part = upload.parts.get(int(number[1]))
            if part is None or _unescape(etag[1]).strip('"') != part.etag.strip('"'):
                raise RefusalError(400, "InvalidPart")
            chosen.append((int(number[1]), part))
        if not chosen or [n for n, _ in chosen] != sorted({n for n, _ in chosen}):
            raise RefusalError(400, "InvalidPartOrder")
        if any(len(part.body) < self.server.smallest_part_nbytes for _, part in chosen[:-1]):
            raise RefusalError(400, "EntityTooSmall")
        self._check_conditions()
        joined = hashlib.md5(b"".join(bytes.fromhex(part.etag.strip('"')) for _, part in chosen)).hexdigest()
        etag_text = f'"{joined}-{len(chosen)}"'
        body = Joined([part.body[:] for _, part in chosen])
        self.server.objects[self.bucket, self.key] = StoredObject(body, etag_text, upload.metadata)
        del self.server.uploads[self.query["uploadId"]]
        return self._answer_xml("CompleteMultipartUploadResult", f"{place}<ETag>{escape(etag_text)}</ETag>")

    def _list_parts(self) -> tuple[int, dict[str, str], bytes]:
        upload = self._upload()
        after, limit = int(self.query.get("part-number-marker") or 0), int(self.query.get("max-parts", 1000))
        numbers = sorted(n for n in upload.parts if n > after)
        shown = numbers[:limit]
        text = "".join(
            f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(upload.parts[n].etag)}</ETag>"
            f"<Size>{len(upload.parts[n].body)}</Size><ChecksumCRC32>{upload.parts[n].crc32}</ChecksumCRC32>"
            "</Part>"
            for n in shown
        )
        more = len(numbers) > limit
        marker = f"<NextPartNumberMarker>{shown[-1]}</NextPartNumberMarker>" if more else ""
        return self._answer_xml("ListPartsResult", f"<IsTruncated>{str(more).lower()}</IsTruncated>{marker}{text}")

    def _list_uploads(self) -> tuple[int, dict[str, str], bytes]:
        prefix = self.query.get("prefix", "")
        text = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{identifier}</UploadId>"
            f"<Initiated>{upload.begun}</Initiated></Upload>"
            for identifier, upload in self.server.uploads.items()
            if upload.bucket == self.bucket and upload.key.startswith(prefix)
        )
        return self._answer_xml("ListMultipartUploadsResult", f"<IsTruncated>false</IsTruncated>{text}")

    def _answer_xml(self, root: str, inner: str) -> tuple[int, dict[str, str], bytes]:
        return 200, {"Content-Type": "application/xml"}, _xml(root, inner)


def _xml(root: str, inner: str) -> bytes:
    space = "" if root == "Error" else ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}{space}>{inner}</{root}>'.encode()


def _crc32_text(crc32: int) -> str:
    return base64.b64encode(crc32.to_bytes(4, "big")).decode()


def _unescape(text: str) -> str:
    for name, character in (("&quot;", '"'), ("&#34;", '"'), ("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&")):
        text = text.replace(name, character)
    return text
