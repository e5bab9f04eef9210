"""One container of Azure's blob storage: obstore reads it, and `azure_connection` writes.

obstore would send no checksum along, so that a body that arrives damaged would be stored. It deletes by a batch, whose
body names the object: if that arrived damaged, another object would go, or none.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from xrank.environment import environ
from xrank.stores.azure_connection import AzureConnection
from xrank.stores.obstore_backend import ObstoreBackend
from xrank.stores.settings import StoreSettings
from xrank.stores.uploads import make_condition

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class AzureBackend(ObstoreBackend):
    """One container; see `Backend`.

    Args:
        store: reads it.
        root: ``az://container`` or ``abfs://container@account``.
        settings: patience, and whether plain http is allowed.
    """

    def __init__(self, store: ObjectStore, root: str, settings: StoreSettings) -> None:
        super().__init__(store)
        self._root, self._settings = root, settings

    def put(self, key: str, data: bytes | memoryview, *, if_absent: bool, if_version: str | None) -> str:
        """Write an object at one instant and return its version."""
        condition = make_condition(replaces=not if_absent, if_version=if_version)
        return self._connection.put(key, data, condition).headers.get("etag", "")

    def delete(self, key: str) -> None:
        """Delete an object; it may be absent."""
        self._connection.delete(key)

    @cached_property
    def _connection(self) -> AzureConnection:
        """Reading needs none."""
        return AzureConnection(self._root, self._settings, environ(), self._root)
