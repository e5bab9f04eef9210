"""Servers of stores for tests: small ones of our own, moto's and Azurite; places on them; a proxy that injects faults.

A test asks for ``bucket`` to run on both servers, for ``small_bucket`` to run on the fast one alone, and makes a
``FaultProxy(bucket.server)`` to stand between. ``bucket.environment()`` is what a client needs, here or in a child.
"""

from __future__ import annotations

import base64
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pytest

from tests.storage.fault_proxy import Chooser, FaultProxy, no_fault
from tests.storage.small_azure import ACCOUNT, SmallAzure
from tests.storage.small_google import PARTS, TOKEN, SmallGoogle
from tests.storage.small_s3 import SmallS3

SECRET = "marked-secret-3f9a0c77"
"""The secret key of every test: it may appear in no output."""
KEY_ID = "AKIAMARKED7B21D4E5F6"

_numbers = itertools.count(1)
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The published key of Azurite's account; it may appear in no output."""


@dataclass(frozen=True)
class Place:
    """An empty bucket or container on a server."""

    server: str
    """The server's address."""
    name: str

    @property
    def url(self) -> str:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        """Return the variables with which clients find the server."""
        raise NotImplementedError

    def client(self) -> Any:
        """Return obstore's client, to look at the place and to fill it."""
        raise NotImplementedError

    def behind(self, proxy: FaultProxy) -> Self:
        """Return this place as clients of the proxy see it."""
        return replace(self, server=proxy.url)

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
        """Return (key, number or name) of the parts that were uploaded and are in no object."""
        raise NotImplementedError

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> Self:
        """Let this process's environment lead to the server, and to nothing else of its kind."""
        variables = self.environment()
        kinds = {name.partition("_")[0] for name in variables} & {"AZURE", "GOOGLE"}
        for name in [name for name in os.environ if name.partition("_")[0] in kinds]:
            monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return self


@dataclass(frozen=True)
class Bucket(Place):
    """An empty bucket of S3."""

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which obstore and botocore find the server."""
        return {
            "AWS_ENDPOINT_URL": self.server,
            "AWS_ALLOW_HTTP": "true",
            "XRANK_ALLOW_HTTP": "1",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:  # botocore has no types
        """Return a plain client of Amazon's, to look at the bucket and to fill it."""
        import botocore.session
        from botocore.config import Config

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.server,
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}),
        )

    def put(self, key: str, data: bytes) -> str:
        """Write an object and return its URL."""
        self.client().put_object(Bucket=self.name, Key=key, Body=data)
        return f"{self.url}/{key}"

    def read_all(self, prefix: str = "") -> dict[str, bytes]:
        """Return the bytes of all objects below a prefix, by key."""
        client = self.client()
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        keys = [row["Key"] for page in pages for row in page.get("Contents", ())]
        return {key: client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys}

    def list_uploads(self) -> list[str]:
        """Return the keys of uploads that are neither completed nor aborted."""
        found = self.client().list_multipart_uploads(Bucket=self.name)
        return sorted(row["Key"] for row in found.get("Uploads", ()))

    def list_parts(self) -> set[tuple[str, str]]:
        """Return (key, number) of what was uploaded and is in no object."""
        client = self.client()
        found = set()
        for row in client.list_multipart_uploads(Bucket=self.name).get("Uploads", ()):
            place = {"Key": row["Key"], "UploadId": row["UploadId"]}
            parts = client.list_parts(Bucket=self.name, **place).get("Parts", ())
            found |= {(row["Key"], str(part["PartNumber"])) for part in parts}
        return found


@dataclass(frozen=True)
class Container(Place):
    """An empty container of Azure's blob storage."""

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


@dataclass(frozen=True)
class GoogleBucket(Place):
    """An empty bucket of Google Cloud Storage."""

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def environment(self) -> dict[str, str]:
        """Return the variables with which obstore and xrank find the server."""
        return {"GOOGLE_BASE_URL": self.server, "GOOGLE_BEARER_TOKEN": TOKEN, "XRANK_ALLOW_HTTP": "1"}

    def client(self) -> Any:
        """Return obstore's client, to look at the bucket and to fill it."""
        from obstore.store import GCSStore

        options: Any = {"client_options": {"allow_http": True}}
        return GCSStore(self.name, base_url=self.server, bearer_token=TOKEN, **options)

    def list_parts(self) -> set[tuple[str, str]]:
        """Return (key, name) of the parts that are in the bucket."""
        keys = [row["path"] for page in self.client().list(PARTS) for row in page]
        pairs = [key.removeprefix(PARTS).rpartition("/") for key in keys]
        return {(key, name) for key, _, name in pairs}


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
    pytest.importorskip("azure.storage.blob", reason="pip install azure-storage-blob")
    server = SmallAzure()
    yield server
    server.close()


@pytest.fixture(scope="session")
def small_google() -> Iterator[SmallGoogle]:
    """The small server."""
    pytest.importorskip("google.auth", reason="pip install google-auth requests")
    server = SmallGoogle()
    yield server
    server.close()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The address of moto's server."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(scope="session")
def small_server() -> Iterator[SmallS3]:
    """The small server."""
    server = SmallS3()
    yield server
    server.close()


def make_bucket(server: str) -> Bucket:
    """Make a bucket with a name of its own."""
    bucket = Bucket(server, f"bucket-{next(_numbers)}")
    bucket.client().create_bucket(Bucket=bucket.name)
    return bucket


@pytest.fixture(params=["moto", "small"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """An empty bucket on each server in turn; this process's environment leads to it."""
    if request.param == "small":
        made: Bucket = request.getfixturevalue("small_bucket")
        return made
    return make_bucket(request.getfixturevalue("moto_server")).enter(monkeypatch)


@pytest.fixture
def small_bucket(small_server: SmallS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket on the small server, forgotten afterwards; this process's environment leads to it."""
    made = make_bucket(small_server.url).enter(monkeypatch)
    yield made
    small_server.forget(made.name)


@contextmanager
def open_proxy(target: str, choose: Chooser = no_fault, *, latency_seconds: float = 0.0) -> Iterator[FaultProxy]:
    """Yield a proxy before a server."""
    proxy = FaultProxy(target, choose, latency_seconds=latency_seconds)
    try:
        yield proxy
    finally:
        proxy.close()
