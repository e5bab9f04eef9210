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
            backend: Backend
            try:
                if place.scheme == "s3":
                    from xrank.storage.s3 import open_s3

                    backend = open_s3(place.root, settings)
                elif place.scheme in ("gs", "az", "abfs", "http", "https"):
                    from xrank.storage.obstore_backend import open_obstore

                    backend = open_obstore(place.root, settings)
                else:
                    from xrank.storage.obstore_backend import open_fsspec

                    backend = open_fsspec(place.scheme, place.root, settings)
            except UsageError as error:
                error.rename(place.root, url)  # the path that the user gave
                raise
            store = _stores[identity] = ObjectStore(place.root, backend, settings)
    return store, place.key
