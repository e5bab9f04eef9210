"""Uploads to Google Cloud Storage: parts that are objects of their own, and one request that composes the object.

The parts of KEY are .xrank-parts/KEY/UPLOAD-NUMBER-MD5 in its bucket, so that no reader of a folder finds them, and a
list of them says all that a later run must know. Each is written where none is, with its MD5, which the store compares:
a name has one content. Uploads begin without a request of their own.

A request composes at most 32 objects, so that the parts of a large object are joined in steps. Each request names the
generations of its sources: those that were listed, with their sizes. The last one has the condition on the object.

Google's own uploads in parts are no way: their last request knows no condition, and replaces any object.

Source: Cloud Storage documentation, XML API: "Upload an object", "Compose objects", "List objects", "Request
preconditions", "XML API multipart uploads" (limitations).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from xml.sax.saxutils import escape

from isal import isal_zlib

from xrank.environment import environ
from xrank.stores.answer_xml import decode_text, find_text, list_texts, need_number, need_text
from xrank.stores.client import Store
from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.google_connection import CONDITION, GENERATION, GoogleConnection
from xrank.stores.uploads import KnownParts, Part, UploadedObject, Uploads, new_upload_id

PARTS = ".xrank-parts"
"""Prefix in the bucket of all parts."""
_MARK = "x-goog-meta-xrank-stage"
_MOST_SOURCES = 32
_MOST_LISTS = 4
"""Lists of an object's parts until one of them is empty."""
_SENDERS = 8
"""Requests at once that join or delete parts."""
_PART = re.compile(r"([0-9a-f]{22})-(\d{5})-([0-9a-f]{32})")
"""Upload (when it began, in seconds since the epoch; random bits), number, MD5."""
_LISTED = re.compile(rf"{re.escape(PARTS)}/(.+)/([0-9a-f]{{22}})-(?:\d{{5}}|joined)-[0-9a-f]{{32}}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Source:
    """An object that is to become a piece of another one."""

    key: str
    nbytes: int
    generation: str | None
    """None where the store lists none."""


class GoogleUploads(Uploads):
    """Uploads to one bucket; see `Uploads`.

    Args:
        store: the bucket.
        url: the place to write, for errors.
    """

    def __init__(self, store: Store, url: str) -> None:
        super().__init__(store)
        self._connection = GoogleConnection(store.root, store.settings, environ(), url)

    def close(self) -> None:
        """Close the connections; no request may be under way."""
        self._connection.close()

    def create(self, key: str, mark: str) -> str:
        """Return a new id; the upload begins with its first part."""
        return new_upload_id()

    def put_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Part:
        """Upload a part; the store refuses it if its MD5 is another."""
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        part = Part(number, len(data), f'"{md5}"', isal_zlib.crc32(data))
        name = _part_key(key, upload_id, part)

        def send() -> Part:
            try:
                self._connection.put(name, data, {CONDITION: "0"})
            except FaultError as fault:
                if fault.kind is not FaultKind.CHANGED:
                    raise
                there = self._connection.look_at(name)  # an answer was lost; an object of this name has this content
                if there is None or there.get("content-length") != str(len(data)):
                    raise FaultError(FaultKind.PASSING, fault.text) from None
            return part

        return self._repeat(key, f"written (part {number})", send, len(data))

    def list_parts(self, key: str, upload_id: str) -> KnownParts:
        """Return the parts that are in the store: none of an upload that has only its id."""
        found: KnownParts = {}
        for source in self._list(f"{PARTS}/{key}/{upload_id}-"):
            match = _PART.fullmatch(source.key.rpartition("/")[2])
            if match is not None:
                found[int(match[2])] = (source.nbytes, f'"{match[3]}"', None)
        return found

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
        """Make the object of the parts, and remove them."""
        there = {source.key: source for source in self._list(f"{PARTS}/{key}/{upload_id}-")}
        names = [_part_key(key, upload_id, part) for part in parts]
        sources = [there.get(name) for name in names]
        known = [s for s, part in zip(sources, parts, strict=True) if s is not None and s.nbytes == part.nbytes]
        is_whole = len(known) == len(parts)
        if is_whole:
            known = self._join(f"{PARTS}/{key}/{upload_id}", known)

        def send() -> None:
            if not is_whole:  # they go once the object is there: this stage may have made it
                raise FaultError(FaultKind.MISSING, f"{len(known)} of {len(parts)} parts")
            condition = self._connection.find_condition(key, replaces=replaces, if_version=if_version)
            self._compose(key, known, {_MARK: mark, **condition})

        self._publish(key, send, mark, sum(part.nbytes for part in parts))
        # A damaged record may have left parts of other uploads. Readers see the object, so nothing needs them.
        self._clear(key, f"{PARTS}/{key}/", names)

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

        def send() -> None:
            condition = self._connection.find_condition(key, replaces=replaces, if_version=if_version)
            self._connection.put(key, data, {_MARK: mark, **condition})

        self._publish(key, send, mark, len(data), sent_nbytes=len(data))

    def head(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""

        def send() -> UploadedObject | None:
            headers = self._connection.look_at(key)
            return None if headers is None else UploadedObject.from_headers(headers, _MARK)

        return self._repeat(key, "looked at", send)

    def abort(self, key: str, upload_id: str) -> None:
        """Remove the parts of an upload; they may be gone."""
        self._clear(key, f"{PARTS}/{key}/{upload_id}-", ())

    def _clear(self, key: str, prefix: str, known: Sequence[str]) -> None:
        """Delete the known parts of an object, and all others that lie below a prefix."""
        for _ in range(_MOST_LISTS):  # a list that arrived damaged may lack some
            matches = [_LISTED.fullmatch(source.key) for source in self._list(prefix)]
            names = {*known, *(match[0] for match in matches if match is not None and match[1] == key)}
            if not names:
                return
            with ThreadPoolExecutor(_SENDERS, thread_name_prefix="xrank-clean") as pool:
                for _ in pool.map(self._delete, names):
                    pass
            known = ()

    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str, float]]:
        """Yield (key, id, age in seconds) of the uploads below a prefix."""
        matches = [_LISTED.fullmatch(source.key) for source in self._list(f"{PARTS}/{prefix}")]
        for key, upload_id in dict.fromkeys((match[1], match[2]) for match in matches if match is not None):
            yield key, upload_id, time.time() - int(upload_id[:10], 16)

    def _join(self, stem: str, sources: list[_Source]) -> list[_Source]:
        """Join neighbours until one request can compose the rest."""
        while len(sources) > _MOST_SOURCES:
            groups = [sources[start : start + _MOST_SOURCES] for start in range(0, len(sources), _MOST_SOURCES)]
            with ThreadPoolExecutor(_SENDERS, thread_name_prefix="xrank-join") as pool:
                sources = list(pool.map(lambda group: self._join_group(stem, group), groups))
        return sources

    def _join_group(self, stem: str, sources: Sequence[_Source]) -> _Source:
        """Compose an object whose name says of which sources, where it is not there from an interrupted run."""
        if len(sources) == 1:
            return sources[0]
        names = "\n".join(source.key for source in sources)
        key = f"{stem}-joined-{hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()}"
        nbytes = sum(source.nbytes for source in sources)

        def send() -> _Source:
            try:
                self._compose(key, sources, {CONDITION: "0"})
            except FaultError as fault:
                if fault.kind is not FaultKind.CHANGED:
                    raise
            there = self._connection.look_at(key)
            if there is None or there.get("content-length") != str(nbytes):
                raise FaultError(FaultKind.PASSING, "the store has not joined the parts")
            return _Source(key, nbytes, there.get(GENERATION))

        return self._repeat(key, "joined", send)

    def _compose(self, key: str, sources: Sequence[_Source], headers: Mapping[str, str]) -> None:
        pieces = "".join(
            f"<Component><Name>{escape(one.key)}</Name>"
            + (f"<Generation>{one.generation}</Generation>" if one.generation else "")
            + "</Component>"
            for one in sources
        )
        body = f"<ComposeRequest>{pieces}</ComposeRequest>".encode()
        self._connection.put(key, body, headers, {"compose": ""})

    def _list(self, prefix: str) -> list[_Source]:
        found: list[_Source] = []
        query = {"list-type": "2", "prefix": prefix}

        def send() -> tuple[list[_Source], str | None]:
            answer = self._connection.send("GET", "", query)
            page = [
                _Source(need_text(text, "Key"), need_number(text, "Size"), find_text(text, "Generation"))
                for text in list_texts(answer, "Contents")
            ]
            text = decode_text(answer)
            is_last = find_text(text, "IsTruncated") != "true"
            return page, None if is_last else need_text(text, "NextContinuationToken")

        while True:
            page, token = self._repeat(prefix, "listed", send)
            found += page
            if token is None:
                return found
            query["continuation-token"] = token

    def _delete(self, key: str) -> None:
        self._repeat(key, "cleaned", lambda: self._connection.delete(key))


def _part_key(key: str, upload_id: str, part: Part) -> str:
    return f"{PARTS}/{key}/{upload_id}-{part.number:05}-{part.etag.strip(chr(34))}"
