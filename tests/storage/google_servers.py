"""Buckets of Google Cloud Storage for tests, on a small server of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.storage.fault_proxy import FaultProxy
from tests.storage.small_google import PARTS, TOKEN, SmallGoogle


@dataclass(frozen=True)
class GoogleBucket:
    """An empty bucket on a server; what `tests.storage.servers.Bucket` is for S3."""

    server: str
    """The server's address."""
    name: str

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which obstore and xrank find the server."""
        return {"GOOGLE_BASE_URL": self.server, "GOOGLE_BEARER_TOKEN": TOKEN, "XRANK_ALLOW_HTTP": "1"}

    def behind(self, proxy: FaultProxy) -> GoogleBucket:
        """Return this bucket as clients of the proxy see it."""
        return replace(self, server=proxy.url)

    def client(self) -> Any:
        """Return obstore's client, to look at the bucket and to fill it."""
        from obstore.store import GCSStore

        options: Any = {"client_options": {"allow_http": True}}
        return GCSStore(self.name, base_url=self.server, bearer_token=TOKEN, **options)

    def put(self, key: str, data: bytes) -> str:
        """Write an object and return its URL."""
        self.client().put(key, data, use_multipart=False)
        return f"{self.url}/{key}"

    def put_folder(self, folder: Path, key: str) -> str:
        """Write all files of a folder and return its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"{self.url}/{key}"

    def read_all(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of all objects below a prefix, by key, without parts of uploads."""
        client = self.client()
        keys = [row["path"] for page in client.list(prefix or None) for row in page]
        return {key: bytes(client.get(key).bytes()) for key in keys if not key.startswith(PARTS)}

    def list_parts(self) -> set[tuple[str, str]]:
        """Return (key, name) of the parts that are in the bucket."""
        keys = [row["path"] for page in self.client().list(PARTS) for row in page]
        pairs = [key.removeprefix(PARTS).rpartition("/") for key in keys]
        return {(key, name) for key, _, name in pairs}


@pytest.fixture(scope="session")
def small_google() -> Iterator[SmallGoogle]:
    """The small server."""
    pytest.importorskip("google.auth", reason="pip install xrank[google]")
    server = SmallGoogle()
    yield server
    server.close()
