"""Uploads to S3.

Source: Amazon S3 API Reference: CreateMultipartUpload, UploadPart, ListParts, CompleteMultipartUpload,
AbortMultipartUpload, PutObject, HeadObject. Conditions (If-None-Match, If-Match) hold for PutObject and
CompleteMultipartUpload.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from isal import isal_zlib

from xrank.environment import environ
from xrank.errors import UsageError
from xrank.stores.answer_xml import decode_text, find_text, list_texts, need_field, need_number, need_text
from xrank.stores.client import Store
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer
from xrank.stores.s3_connection import S3Connection, crc32_text, find_endpoint
from xrank.stores.uploads import KnownParts, Part, UploadedObject, Uploads, make_condition

MARK = "xrank-stage"
"""Name of the metadata that says which stage has written an object."""


class S3Uploads(Uploads):
    """Uploads to one bucket; see `Uploads`.

    Args:
        store: the bucket.
        url: the place to write, for errors.
    """

    lists_only_own = False

    def __init__(self, store: Store, url: str) -> None:
        super().__init__(store)
        _refuse_google(environ(), url)
        bucket = store.root.partition("://")[2]
        self._connection = S3Connection(bucket, store.settings, environ(), url)

    def close(self) -> None:
        """Close the connections; no request may be under way."""
        self._connection.close()

    def create(self, key: str, mark: str) -> str:
        """Begin an upload and return its id."""
        headers = {f"x-amz-meta-{MARK}": mark, "x-amz-checksum-algorithm": "CRC32"}

        def send() -> str:
            answer = self._connection.send("POST", key, {"uploads": ""}, headers)
            return need_field(answer, "UploadId")

        return self._repeat(key, "written", send)

    def put_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Part:
        """Upload a part; return when the store has confirmed its bytes by a checksum."""
        crc32 = isal_zlib.crc32(data)
        query = {"uploadId": upload_id, "partNumber": str(number)}

        def send() -> Part:
            answer = self._connection.send("PUT", key, query, {"x-amz-checksum-crc32": crc32_text(crc32)}, data)
            etag = answer.headers.get("etag", "")
            _check_confirmed(answer, data, crc32, etag)
            return Part(number, len(data), etag, crc32)

        return self._repeat(key, f"written (part {number})", send, len(data))

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return number -> (bytes, etag, CRC-32 where listed) of the parts there; None without such an upload."""

        def send() -> KnownParts | None:
            found: KnownParts = {}
            query = {"uploadId": upload_id}
            while True:
                try:
                    answer = self._connection.send("GET", key, query)
                except FaultError as fault:
                    if fault.kind is FaultKind.MISSING:
                        return None
                    raise
                for text in list_texts(answer, "Part"):
                    crc32 = find_text(text, "ChecksumCRC32")
                    known = None if crc32 is None else int.from_bytes(base64.b64decode(crc32), "big")
                    found[need_number(text, "PartNumber")] = (
                        need_number(text, "Size"),
                        need_text(text, "ETag"),
                        known,
                    )
                text = decode_text(answer)
                if find_text(text, "IsTruncated") != "true":
                    return found
                query["part-number-marker"] = need_text(text, "NextPartNumberMarker")

        return self._repeat(key, "looked at", send)

    def complete(
        self,
        key: str,
        upload_id: str,
        parts: Sequence[Part],
        mark: str,
        *,
        replaces: bool = False,
        if_version: str | None = None,
    ) -> None:
        """Make the object of the parts, where none is there yet.

        With `replaces`, also in the place of another one; with `if_version`, only in the place of that one.

        Raises:
            OutputExistsError: another object is there.
            IncompleteError: there is no such upload.
        """
        lines = "".join(
            f"<Part><PartNumber>{part.number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
            f"<ChecksumCRC32>{crc32_text(part.crc32)}</ChecksumCRC32></Part>"
            for part in parts
        )
        space = "http://s3.amazonaws.com/doc/2006-03-01/"
        body = f'<CompleteMultipartUpload xmlns="{space}">{lines}</CompleteMultipartUpload>'.encode()
        nbytes = sum(part.nbytes for part in parts)
        headers = make_condition(replaces=replaces, if_version=if_version)

        def send() -> None:
            need_field(self._connection.send("POST", key, {"uploadId": upload_id}, headers, body), "ETag")

        if self._publish(key, send, mark, nbytes):
            self.abort(key, upload_id)

    def put_new(
        self,
        key: str,
        data: bytes | memoryview,
        mark: str,
        *,
        replaces: bool = False,
        if_version: str | None = None,
    ) -> None:
        """Write a small object, where none is there yet; return when the store has confirmed its bytes.

        With `replaces`, also in the place of another one; with `if_version`, only in the place of that one.

        Raises:
            OutputExistsError: another object is there.
        """
        crc32 = isal_zlib.crc32(data)
        headers = {f"x-amz-meta-{MARK}": mark, "x-amz-checksum-crc32": crc32_text(crc32)}
        headers |= make_condition(replaces=replaces, if_version=if_version)

        def send() -> None:
            answer = self._connection.send("PUT", key, None, headers, data)
            _check_confirmed(answer, data, crc32, answer.headers.get("etag", ""))

        self._publish(key, send, mark, len(data), sent_nbytes=len(data))

    def head(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""

        def send() -> UploadedObject | None:
            headers = self._connection.look_at(key)
            return None if headers is None else UploadedObject.from_headers(headers, f"x-amz-meta-{MARK}")

        return self._repeat(key, "looked at", send)

    def abort(self, key: str, upload_id: str) -> None:
        """Remove an upload and its parts; it may be gone."""

        def send() -> None:
            try:
                self._connection.send("DELETE", key, {"uploadId": upload_id})
            except FaultError as fault:
                if fault.kind is not FaultKind.MISSING:
                    raise

        self._repeat(key, "cleaned", send)

    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str, float]]:
        """Yield (key, id, age in seconds) of the uploads below a prefix that are neither completed nor aborted."""
        query = {"uploads": "", "prefix": prefix}

        def send() -> tuple[list[tuple[str, str, float]], dict[str, str]]:
            answer = self._connection.send("GET", "", query)
            text = decode_text(answer)
            found = [_read_upload(answer, upload) for upload in list_texts(answer, "Upload")]
            if find_text(text, "IsTruncated") != "true":
                return found, {}
            markers = need_text(text, "NextKeyMarker"), need_text(text, "NextUploadIdMarker")
            return found, dict(zip(("key-marker", "upload-id-marker"), markers, strict=True))

        while True:
            found, markers = self._repeat(prefix, "listed", send)
            yield from found
            if not markers:
                return
            query |= markers


def _read_upload(answer: Answer, text: str) -> tuple[str, str, float]:
    """Return key, id and age of an upload in a list."""
    try:
        now = parsedate_to_datetime(answer.headers["date"])  # the store's clock, not this host's
        begun = datetime.fromisoformat(need_text(text, "Initiated"))
    except (KeyError, ValueError):
        raise FaultError(FaultKind.PASSING, "an answer without times") from None
    return need_text(text, "Key"), need_text(text, "UploadId"), (now - begun).total_seconds()


def _refuse_google(variables: Mapping[str, str], url: str) -> None:
    """Refuse Google's S3 interface, which ignores the conditions of completions.

    Source: Google Cloud Storage documentation, "XML API multipart uploads", limitations.
    """
    host = urlsplit(find_endpoint(variables) or "").hostname or ""
    if host == "storage.googleapis.com" or host.endswith(".storage.googleapis.com"):
        raise UsageError(
            f"{url}: Google's store completes uploads in the place of any object, also of another gather's",
            file=url,
            want="gs://, or a store that knows If-None-Match for completed uploads",
            next_step="write to gs://, with the credentials that reading it takes",
        )


def _check_confirmed(answer: Answer, data: bytes | memoryview, crc32: int, etag: str) -> None:
    """Raise unless the answer contains the CRC-32 of the data, or their MD5 as etag."""
    confirmed = answer.headers.get("x-amz-checksum-crc32")
    if confirmed is not None:
        if confirmed != crc32_text(crc32):
            raise FaultError(FaultKind.PASSING, "the store received other bytes")
    elif etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
        # Before 2022 S3 knew no CRC-32, and many stores do not: there the etag is the part's MD5.
        raise FaultError(FaultKind.PASSING, "the store confirms neither the CRC-32 nor the MD5 of the bytes")
