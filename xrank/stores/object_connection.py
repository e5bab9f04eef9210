"""Requests for single objects that connections to all stores share: to look at one, and to delete one."""

from __future__ import annotations

import base64
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping

from xrank.stores.faults import FaultError, FaultKind
from xrank.stores.http_connection import Answer, HttpConnection


class ObjectConnection(ABC):
    """Sends requests to one bucket or container; any thread may call it. Idle connections are kept until `close`.

    Raises (from every method but `close`):
        FaultError: the request failed.
    """

    _http: HttpConnection

    @abstractmethod
    def send(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | memoryview = b"",
    ) -> Answer:
        """Send one request and return its answer."""

    def look_at(self, key: str) -> Mapping[str, str] | None:
        """Return what the store says of an object; None if it is absent."""
        try:
            return self.send("HEAD", key).headers
        except FaultError as fault:
            if fault.kind is FaultKind.MISSING:
                return None
            raise

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent. A 404 is believed when a second request finds nothing, too."""
        try:
            self.send("DELETE", key)
        except FaultError as fault:
            if fault.kind is not FaultKind.MISSING:
                raise
            if self.look_at(key) is not None:
                raise FaultError(FaultKind.PASSING, fault.text) from None

    def close(self) -> None:
        """Close all connections; no request may be under way."""
        self._http.close()


def md5_text(data: bytes | memoryview) -> str:
    """Return the MD5 of a body as the header Content-MD5 has it."""
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
