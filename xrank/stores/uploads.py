"""Objects that are uploaded in parts, each confirmed by a checksum, and that appear whole at one instant."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Self, TypeAlias, TypeVar

from xrank.stores.client import Store
from xrank.stores.faults import FaultError, FaultKind

WRITABLE = ("s3", "gs", "az", "abfs")
"""Schemes of the stores that take uploads."""
SMALLEST_PART_NBYTES = 5 << 20
"""Fewest bytes of a part that is not the last (S3 User Guide, "Amazon S3 multipart upload limits")."""
MOST_PARTS = 10_000
"""S3's limit; Azure takes 50,000 (Azure REST reference, "Put Block List")."""
_MIB = 1 << 20

_Result = TypeVar("_Result")
KnownParts: TypeAlias = dict[int, tuple[int, str, int | None]]
"""Number of a part -> its bytes, its etag, and its CRC-32 where the store lists one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part that the store has confirmed."""

    number: int
    """From 1 on."""
    nbytes: int
    etag: str
    """With its quotes; of a store that gives parts none, their MD5."""
    crc32: int


@dataclass(frozen=True, slots=True)
class UploadedObject:
    """An object as the store describes it."""

    nbytes: int
    etag: str
    mark: str | None
    """The stage that has written it."""
    age_seconds: float
    """By the store's clock."""

    @classmethod
    def from_headers(cls, headers: Mapping[str, str], mark_header: str) -> Self:
        """Return the object of an answer, whose mark is in that header."""
        written, now = (headers.get(name) for name in ("last-modified", "date"))
        age = parsedate_to_datetime(now) - parsedate_to_datetime(written) if written and now else timedelta()
        nbytes = int(headers.get("content-length", -1))
        return cls(nbytes, headers.get("etag", ""), headers.get(mark_header), age.total_seconds())


def new_upload_id() -> str:
    """Return an id for stores that give none: when the upload began, in seconds since the epoch, and random bits."""
    return f"{int(time.time()):010x}{secrets.token_hex(6)}"


def part_nbytes_for(nbytes: int) -> int:
    """Return the bytes of each part of an object, in whole MiB: 5 MiB, or more where 10,000 parts would not suffice.

    >>> part_nbytes_for(16 << 30) >> 20, part_nbytes_for(1 << 40) >> 20
    (5, 105)
    """
    return max(SMALLEST_PART_NBYTES, -(-nbytes // (MOST_PARTS * _MIB)) * _MIB)


def count_parts(nbytes: int) -> int:
    """Return the number of parts of an object.

    >>> count_parts(12 << 20)
    3
    """
    return -(-nbytes // part_nbytes_for(nbytes))


class Uploads(ABC):
    """Uploads to one bucket or container; any thread may call it.

    Requests are repeated and counted as those of the `Store`.

    Args:
        store: the bucket.

    Raises (from every method): as `Store`.
    """

    lists_only_own = True
    """Whether the names of parts distinguish xrank's uploads from other programs' in `list_uploads`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @abstractmethod
    def close(self) -> None:
        """Close the connections; no request may be under way."""

    @abstractmethod
    def create(self, key: str, mark: str) -> str:
        """Begin an upload and return its id."""

    @abstractmethod
    def put_part(self, key: str, upload_id: str, number: int, data: bytes | memoryview) -> Part:
        """Upload a part; return when the store has confirmed its bytes by a checksum."""

    @abstractmethod
    def list_parts(self, key: str, upload_id: str) -> KnownParts | None:
        """Return the parts that are in the store; None without such an upload."""

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def head(self, key: str) -> UploadedObject | None:
        """Return an object as the store describes it; None if it is absent."""

    @abstractmethod
    def abort(self, key: str, upload_id: str) -> None:
        """Remove an upload and its parts; it may be gone."""

    @abstractmethod
    def list_uploads(self, prefix: str) -> Iterator[tuple[str, str, float]]:
        """Yield (key, id, age in seconds) of the uploads below a prefix that are neither completed nor aborted."""

    def _publish(self, key: str, send: Callable[[], None], mark: str, nbytes: int, sent_nbytes: int = 0) -> bool:
        """Send a request that makes an object; return whether this stage had made it, as where an answer was lost."""

        def settle() -> bool:
            try:
                send()
                return False
            except FaultError as fault:
                if fault.kind not in (FaultKind.CHANGED, FaultKind.MISSING):
                    raise
                there = self.head(key)
                if there is None:
                    raise
                if (there.mark, there.nbytes) != (mark, nbytes):
                    raise FaultError(FaultKind.EXISTS, "an object that this gather has not written") from None
                return True

        return self._repeat(key, "written", settle, sent_nbytes)

    def _repeat(self, key: str, what: str, send: Callable[[], _Result], sent_nbytes: int = 0) -> _Result:
        return self._store.repeat(key, what, send, written_nbytes=sent_nbytes)


def open_uploads(store: Store, url: str | None = None) -> Uploads:
    """Return uploads to a store; the caller closes them.

    Args:
        store: the bucket or container, of one of the schemes of `WRITABLE`.
        url: the place to write, for errors.

    Raises:
        UsageError: there are no credentials, or the store ignores conditions.
    """
    scheme, url = store.root.partition(":")[0], url or store.root
    if scheme == "s3":
        from xrank.stores.s3_uploads import S3Uploads

        return S3Uploads(store, url)
    if scheme == "gs":
        from xrank.stores.google_uploads import GoogleUploads

        return GoogleUploads(store, url)
    assert scheme in WRITABLE, "the place was checked"
    from xrank.stores.azure_uploads import AzureUploads

    return AzureUploads(store, url)


def make_condition(*, replaces: bool, if_version: str | None) -> dict[str, str]:
    """Return the header that lets a request make an object only in the right place."""
    if if_version is not None:
        return {"If-Match": if_version}
    return {} if replaces else {"If-None-Match": "*"}
