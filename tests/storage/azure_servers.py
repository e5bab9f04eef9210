"""Containers of Azure's blob storage for tests: on a small server of our own, and on Azurite where npm has it."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.storage.fault_proxy import FaultProxy
from tests.storage.small_azure import ACCOUNT, SmallAzure

KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published key of Azurite's account; it may appear in no output."""


@dataclass(frozen=True)
class Container:
    """An empty container on a server; what `tests.storage.servers.Bucket` is for S3."""

    server: str
    """The server's address."""
    name: str

    @property
    def url(self) -> str:
        return f"az://{self.name}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which obstore and xrank find the server."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{self.server}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
            "XRANK_ALLOW_HTTP": "1",
        }

    def behind(self, proxy: FaultProxy) -> Container:
        """Return this container as clients of the proxy see it."""
        return replace(self, server=proxy.url)

    def client(self) -> Any:
        """Return obstore's client, to look at the container and to fill it."""
        from obstore.store import AzureStore

        return AzureStore(
            self.name,
            account_name=ACCOUNT,
            account_key=KEY,
            endpoint=f"{self.server}/{ACCOUNT}",
            client_options={"allow_http": True},
        )

    def put(self, key: str, data: bytes) -> str:
        """Write a blob and return its URL."""
        self.client().put(key, data, use_multipart=False)
        return f"{self.url}/{key}"

    def put_folder(self, folder: Path, key: str) -> str:
        """Write all files of a folder and return its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self.put(f"{key}/{path.relative_to(folder).as_posix()}", path.read_bytes())
        return f"{self.url}/{key}"

    def read_all(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of all blobs below a prefix, by key."""
        client = self.client()
        keys = [row["path"] for page in client.list(prefix or None) for row in page]
        return {key: bytes(client.get(key).bytes()) for key in keys}

    def list_parts(self) -> set[tuple[str, str]]:
        """Return (key, block) of what was uploaded and is in no blob that readers see."""
        connection = self._connect()
        keys = [blob.name for blob in connection.list_blobs(include=["uncommittedblobs"])]
        lists = ((key, connection.get_blob_client(key).get_block_list("uncommitted")[1]) for key in keys)
        return {(key, base64.b64encode(block.id.encode()).decode()) for key, blocks in lists for block in blocks}

    def make(self) -> None:
        """Make the container."""
        self._connect().create_container()

    def _connect(self) -> Any:
        from azure.core.credentials import AzureNamedKeyCredential
        from azure.storage.blob import ContainerClient

        account = f"{self.server}/{ACCOUNT}"
        credential = AzureNamedKeyCredential(ACCOUNT, KEY)
        return ContainerClient(account, self.name, credential=credential, api_version="2023-11-03")


def make_container(server: str, name: str) -> Container:
    """Make a container."""
    container = Container(server, name)
    container.make()
    return container


@pytest.fixture(scope="session")
def azurite_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Azurite, which npm installs where it can: set AZURITE to its program to use another."""
    program = os.environ.get("AZURITE") or shutil.which("azurite-blob") or _install(tmp_path_factory)
    log = tmp_path_factory.mktemp("azurite") / "log"
    command = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", "0", "--disableTelemetry"]
    with log.open("wb") as out, subprocess.Popen([*command, "--silent"], stdout=out, stderr=out) as child:
        try:
            deadline = time.monotonic() + 60
            while (found := re.search(r"listens on (http://\S+)", log.read_text())) is None:
                assert child.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield found[1]
        finally:
            child.kill()


def _install(tmp_path_factory: pytest.TempPathFactory) -> str:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm, which installs Azurite, is not here")
    folder = tmp_path_factory.mktemp("npm")
    done = subprocess.run([npm, "install", "azurite@3"], cwd=folder, capture_output=True, timeout=300, check=False)
    if done.returncode != 0:
        pytest.skip("npm cannot install Azurite here")
    return str(folder / "node_modules/.bin/azurite-blob")


@pytest.fixture(scope="session")
def small_azure() -> Iterator[SmallAzure]:
    """The small server."""
    pytest.importorskip("azure.storage.blob", reason="pip install xrank[azure]")
    server = SmallAzure()
    yield server
    server.close()
