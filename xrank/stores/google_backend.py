"""One bucket of Google Cloud Storage: obstore reads it, and `google_connection` writes what has a condition.

obstore would send no checksum along, and Google's condition is a generation, which obstore's listings do not show.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from xrank.environment import environ
from xrank.stores.google_connection import GoogleConnection
from xrank.stores.obstore_backend import ObstoreBackend
from xrank.stores.settings import StoreSettings

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class GoogleBackend(ObstoreBackend):
    """One bucket; see `Backend`.

    Args:
        store: reads it.
        root: ``gs://bucket``.
        settings: patience, and whether plain http is allowed.
    """

    def __init__(self, store: ObjectStore, root: str, settings: StoreSettings) -> None:
        super().__init__(store)
        self._root, self._settings = root, settings

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Write an object at one instant and return its version."""
        condition = self._connection.find_condition(key, replaces=not if_absent, if_version=if_version)
        return self._connection.put(key, data, condition).headers.get("etag", "")

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
        self._connection.delete(key)

    @cached_property
    def _connection(self) -> GoogleConnection:
        """Reading needs none, and obstore finds credentials without google-auth."""
        return GoogleConnection(self._root, self._settings, environ(), self._root)
