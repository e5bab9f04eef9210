"""Uploads to Azure's blob storage: blocks that no reader sees until a list of them makes the blob.

A block's name contains its upload, number and MD5, so that a list of the blocks in the store says all that a later run
must know, and two uploads to one blob never mix. Blocks begin without a request of their own.

Source: Azure Storage REST reference: Put Block, Put Block List, Get Block List, Put Blob, List Blobs, Delete Blob,
"Specifying conditional headers for Blob service operations". Azure removes blocks that no list has taken after a week.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Sequence

from isal import isal_zlib

from xrank.environment import environ
from xrank.stores.answer_xml import decode_text, find_text, list_texts, need_number, need_text
from xrank.stores.azure_connection import AzureConnection
from xrank.stores.client import Store
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.uploads import KnownParts, Part, UploadedObject, Uploads, make_condition, new_upload_id

_MARK = "x-ms-meta-xrank_stage"
_BLOCK = re.compile(r"([0-9a-f]{10}[0-9a-f]{12})-(\d{5})-([0-9a-f]{32})")
"""Upload (when it began, in seconds since the epoch; random bits), number, MD5; all blocks of a blob need names of
one length, of at most 64 characters."""


class AzureUploads(Uploads):
    """Uploads to one container; see `Uploads`.

    Args:
        store: the container.
        url: the place to write, for errors.
    """

    def __init__(self, store: Store, url: str) -> None:
        super().__init__(store)
        self._connection = AzureConnection(store.root, store.settings, environ(), url)

    def close(self) -> None:
        """Close the connections; no request may be under way."""
        self._connection.close()

    def create(self, key: str, mark: str) -> str:
        """Return a new id; the upload begins with its first part."""
        return new_upload_id()

    def put_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Part:
        """Upload a part; the store refuses it if its MD5 is another."""
        md5 = hashlib.md5(data, usedforsecurity=False)
        part = Part(number, len(data), f'"{md5.hexdigest()}"', isal_zlib.crc32(data))
        query = {"comp": "block", "blockid": _block_name(upload_id, part)}

        def send() -> Part:
            self._connection.send_checked("PUT", key, query, {}, data, base64.b64encode(md5.digest()).decode())
            return part

        return self._repeat(key, f"written (part {number})", send, len(data))

    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return the parts that are in the store; None where none is."""
        return self._list_blocks(key).get(upload_id)

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
        """Make the object of the parts; the store forgets all other blocks of that name."""
        names = "".join(f"<Uncommitted>{_block_name(upload_id, part)}</Uncommitted>" for part in parts)
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{names}</BlockList>'.encode()
        headers = {_MARK: mark, **make_condition(replaces=replaces, if_version=if_version)}

        def send() -> None:
            self._connection.send_checked("PUT", key, {"comp": "blocklist"}, headers, body)

        self._publish(key, send, mark, sum(part.nbytes for part in parts))

    def put_new(
        self,
        key: str,
        data: bytes | memoryview,
        mark: str,
        *,
        replaces: bool = False,
        if_version: str | None = None,
    ) -> None:
        """Write a small object; the store refuses it if its MD5 is another."""
        headers = {_MARK: mark, **make_condition(replaces=replaces, if_version=if_version)}

        def send() -> None:
            self._connection.put(key, data, headers)

        self._publish(key, send, mark, len(data), sent_nbytes=len(data))

    def head(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent, or of uncommitted blocks only."""

        def send() -> UploadedObject | None:
            headers = self._connection.look_at(key)
            return None if headers is None else UploadedObject.from_headers(headers, _MARK)

        return self._repeat(key, "looked at", send)

    def abort(self, key: str, upload_id: str) -> None:
        """Remove the blocks of a blob that is nothing but blocks of uploads; Azure has no other way to remove blocks.

        Beside a blob that readers see they stay for a week, and Azure removes them.
        """
        if upload_id not in self._list_blocks(key) or self.head(key) is not None:
            return

        def send() -> None:
            try:
                self._connection.send("DELETE", key)
            except FaultError as fault:
                if fault.kind is not FaultKind.MISSING:
                    raise

        self._repeat(key, "cleaned", send)

    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str, float]]:
        """Yield (key, id, age in seconds) of the uploads below a prefix to blobs that no reader sees."""
        query = {"restype": "container", "comp": "list", "include": "uncommittedblobs", "prefix": prefix}

        def send() -> tuple[list[str], str | None]:
            answer = self._connection.send("GET", "", query)
            blobs = [(need_text(text, "Name"), text) for text in list_texts(answer, "Blob")]
            empty = [key for key, text in blobs if find_text(text, "Content-Length") == "0"]
            return empty, find_text(decode_text(answer), "NextMarker")

        while True:
            empty, marker = self._repeat(prefix, "listed", send)
            for key in empty:
                if self.head(key) is None:
                    for upload_id in self._list_blocks(key):
                        yield key, upload_id, time.time() - int(upload_id[:10], 16)
            if not marker:
                return
            query["marker"] = marker

    def _list_blocks(self, key: str) -> dict[str, KnownParts]:
        """Return the blocks of each upload to a blob that no list has taken; none of other programs."""

        def send() -> dict[str, KnownParts]:
            found: dict[str, KnownParts] = {}
            try:
                answer = self._connection.send("GET", key, {"comp": "blocklist", "blocklisttype": "uncommitted"})
            except FaultError as fault:
                if fault.kind is FaultKind.MISSING:
                    return {}
                raise
            for text in list_texts(answer, "Block"):
                name = base64.b64decode(need_text(text, "Name")).decode(errors="replace")
                match = _BLOCK.fullmatch(name)
                if match is not None:
                    known = found.setdefault(match[1], {})
                    known[int(match[2])] = (need_number(text, "Size"), f'"{match[3]}"', None)
            return found

        return self._repeat(key, "looked at", send)


def _block_name(upload_id: str, part: Part) -> str:
    return base64.b64encode(f"{upload_id}-{part.number:05}-{part.etag.strip(chr(34))}".encode()).decode()
