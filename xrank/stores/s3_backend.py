"""One S3 bucket through `s3_connection`, which follows no redirect.

object_store 0.14 sends a session token along to the host that a redirect names. Beside that, reading by it takes more
memory: its threads, and each body twice.
"""

from __future__ import annotations

from isal import isal_zlib

from xrank.stores.answer_xml import decode_text, find_text, list_texts, need_text
from xrank.stores.backend import Folder, ObjectStatus
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer
from xrank.stores.s3_connection import S3Connection, crc32_text

_ERROR_NBYTES = 64 << 10
_MOST_DIGITS = 18
"""Of an object's size in bytes."""


class S3Backend:
    """One bucket; see `Backend`.

    Args:
        connection: sends the requests.
    """

    fills_memory = True

    def __init__(self, connection: S3Connection) -> None:
        self._connection = connection

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""
        answer = self._connection.send("HEAD", key)
        return _status(answer, answer.headers.get("content-length", ""))

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, into: memoryview | None = None
    ) -> tuple[memoryview, ObjectStatus]:
        """Return bytes [start, end) of an object, in `into` if it is given, and its status with this answer."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if status is not None and status.is_etag and status.version:
            headers["If-Match"] = status.version
        most_nbytes = max(end - start, _ERROR_NBYTES)
        answer = self._connection.send("GET", key, headers=headers, into=into, most_nbytes=most_nbytes)
        nbytes = answer.headers.get("content-range", "").rpartition("/")[2]
        view = into if into is not None and answer.is_in_place else memoryview(answer.body)
        return view, _status(answer, nbytes)

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key."""
        objects: dict[str, ObjectStatus] = {}
        folders: set[str] = set()
        query = {"list-type": "2", "delimiter": "/", "prefix": f"{key}/" if key else ""}
        while True:
            answer = self._connection.send("GET", "", query)
            for text in list_texts(answer, "Contents"):
                name = need_text(text, "Key").rpartition("/")[2]
                if name:  # an object of the folder's own name, which some tools make
                    objects[name] = ObjectStatus(int(need_text(text, "Size")), need_text(text, "ETag"))
            for text in list_texts(answer, "CommonPrefixes"):
                folders.add(need_text(text, "Prefix").rstrip("/").rpartition("/")[2])
            text = decode_text(answer)
            if find_text(text, "IsTruncated") != "true":
                return Folder(objects, frozenset(folders))
            query["continuation-token"] = need_text(text, "NextContinuationToken")

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Write an object at one instant and return its version."""
        headers = {"x-amz-checksum-crc32": crc32_text(isal_zlib.crc32(data))}
        if if_absent:
            headers["If-None-Match"] = "*"
        elif if_version is not None:
            headers["If-Match"] = if_version
        return self._connection.send("PUT", key, headers=headers, body=data).headers.get("etag", "")

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._connection.send("DELETE", key)


def _status(answer: Answer, nbytes: str) -> ObjectStatus:
    if not nbytes.isdecimal() or len(nbytes) > _MOST_DIGITS:
        raise FaultError(FaultKind.PASSING, "an answer without the object's size")
    etag = answer.headers.get("etag", "")
    is_strong = bool(etag) and not etag.startswith("W/")
    return ObjectStatus(int(nbytes), etag or answer.headers.get("last-modified", ""), is_etag=is_strong)
