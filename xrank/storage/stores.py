"""The stores of this process, opened once each, by the client of their kind."""

from __future__ import annotations

import os
import re
import threading
from typing import Any

from xrank.environment import environ
from xrank.errors import UsageError, require
from xrank.storage.client import Backend, ObjectStore, StoreSettings, check_https, make_credentials_error
from xrank.storage.url import split_url

_CAUSE = re.compile(r"\b(?:Missing|Invalid|Open|Decode|Unknown|Unable)[A-Z]\w+")
"""object_store's name of what an environment lacks."""
_AZURE = "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY as Azure shows it or another credential"
_NEXT_STEPS = {
    "gs": "let GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT name a file of credentials",
    "az": _AZURE,
    "abfs": _AZURE,
}
_PREFIXES = ("AWS_", "AZURE_", "AZURITE_", "GOOGLE_", "GCS_", "HF_", "XRANK_")
_stores: dict[tuple[object, ...], ObjectStore] = {}
_opening = threading.Lock()


def open_store(url: str) -> tuple[ObjectStore, str]:
    """Return the store of a cleaned URL, and the key in it.

    Stores are kept for the life of the process, one for each bucket and environment. A forked process opens its own:
    threads and connections of a client do not survive a fork. UsageError if a package is missing, plain http is not
    allowed, or a setting is wrong.
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
                    backend = _open_obstore(place.root, settings)
                else:
                    from xrank.storage.obstore_backend import open_fsspec

                    backend = open_fsspec(place.scheme, place.root, settings)
            except UsageError as error:
                error.rename(place.root, url)  # the path that the user gave
                raise
            store = _stores[identity] = ObjectStore(place.root, backend, settings)
    return store, place.key


def _open_obstore(root: str, settings: StoreSettings) -> Backend:
    """Return the backend of a bucket, container or host; UsageError as of `open_store`."""
    require("obstore", f"reading {root}")
    from obstore.exceptions import BaseError
    from obstore.store import AzureStore, GCSStore, HTTPStore

    from xrank.storage.azure import AzureBackend, find_endpoint
    from xrank.storage.google import GoogleBackend
    from xrank.storage.obstore_backend import ObstoreBackend

    scheme, _, place = root.partition("://")
    variables = environ()
    endpoint = {"gs": variables.get("GOOGLE_BASE_URL") or "", "http": root, "https": root}.get(scheme)
    if endpoint is None:
        endpoint = find_endpoint(variables, "")
    check_https(endpoint, root, allow_http=settings.allow_http)
    client: dict[str, Any] = {"timeout": f"{settings.answer_seconds}s", "allow_http": settings.allow_http}
    options: dict[str, Any] = {"client_options": client, "retry_config": {"max_retries": 0}}
    try:
        if scheme == "gs":
            return GoogleBackend(GCSStore(place, **options), root, settings)
        if scheme in ("http", "https"):
            return ObstoreBackend(HTTPStore.from_url(root, **options))
        container, _, account = place.partition("@")
        if account:
            options["account_name"] = account.partition(".")[0]
        return AzureBackend(AzureStore(container, **options), root, settings)
    except BaseError as error:
        # A name, as the text may contain more of the environment.
        cause = " ".join(_CAUSE.findall(str(error))[:1]) or type(error).__name__
        raise make_credentials_error(root, _NEXT_STEPS.get(scheme, "correct the URL"), cause) from None
