"""The protocol of backends: one request each, without repetitions, whose failures are `FaultError`s."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ObjectStatus:
    """Size and version of an object when it was listed or looked at, to detect later changes."""

    nbytes: int
    version: str
    """The store's etag, or its time of change where it gives none; empty if it gives neither."""
    is_etag: bool = True
    """Whether requests may demand this version (``If-Match``)."""

    @property
    def st_size(self) -> int:
        """The size under the name that `os.stat_result` gives it."""
        return self.nbytes


@dataclass(frozen=True, slots=True)
class Folder:
    """The objects and folders directly below a key."""

    objects: Mapping[str, ObjectStatus] = field(default_factory=dict)
    """Name -> status."""
    folders: frozenset[str] = frozenset()
    """Names."""


class Backend(Protocol):
    """Sends requests to one bucket, host or repository; any thread may call it.

    A store is not trusted to end an answer. A read receives not much more than the bytes that were asked for, whatever
    the answer says of its length. A read into the caller's memory ends within `StoreSettings.timeout_seconds`, and so
    does a write; `Store` leaves other requests behind after that time.

    Raises (from every method):
        FaultError: the request failed.
    """

    fills_memory: bool
    """Whether `read` receives bytes in the caller's memory."""

    def head(self, key: str) -> ObjectStatus:
        """Return the status of an object."""

    def read(
        self, key: str, start: int, end: int, status: ObjectStatus | None, into: memoryview | None = None
    ) -> tuple[memoryview, ObjectStatus]:
        """Return bytes [start, end) of an object, and its status with this answer.

        Args:
            key: the object.
            start: first byte.
            end: one past the last.
            status: the wanted version; None: any.
            into: a buffer of that size, which a backend that fills memory fills and returns; others leave it.
        """

    def list_folder(self, key: str) -> Folder:
        """Return what lies directly below a key; an empty folder if nothing does."""

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Write an object at one instant and return its version."""

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
