"""The stores of this process, opened once each, by the client of their kind."""

from __future__ import annotations

import os
import threading

from xrank.environment import environ
from xrank.errors import (
    UsageError,
)
from xrank.storage.client import Backend, ObjectStore, StoreSettings
from xrank.storage.url import split_url

_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "GCS_", "HF_", "XRANK_")
_stores: dict[tuple[object, ...], ObjectStore] = {}
_opening = threading.Lock()


def open_store(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a cleaned URL, and the key in it.

    Stores are kept for the life of the process, one for each bucket and environment. A forked process opens its own:
    threads and connections of a client do not survive a fork.

    Raises:
        UsageError: a package is missing, plain http is not allowed, or a setting is wrong.
    """
    place = split_url(url)
    variables = environ()
    known = (item for item in variables.items() if item[0].startswith(_PREFIXES))
    identity = (os.getpid(), place.root, *known)
    with _opening:
        store = _stores.get(identity)
        if store is None:
            settings = StoreSettings.from_environment(variables)
            try:
                backend = _open_backend(place.scheme, place.root, settings)
            except UsageError as error:
                error.rename(place.root, url)  # the path that the user gave
                raise
            store = _stores[identity] = ObjectStore(place.root, backend, settings)
    return store, place.key


def _open_backend(scheme: str, root: str, settings: StoreSettings) -> Backend:
    if scheme == "s3":
        from xrank.storage.s3 import open_s3

        return open_s3(root, settings)
    if scheme in ("gs", "az", "abfs", "http", "https"):
        from xrank.storage.obstore_backend import open_obstore

        return open_obstore(root, settings)
    from xrank.storage.obstore_backend import open_fsspec

    return open_fsspec(scheme, root, settings)
