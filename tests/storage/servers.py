"""S3 servers for tests: moto's, and a small one of our own; a bucket on either; and a proxy that injects faults.

A test asks for ``bucket`` to run on both servers, for ``small_bucket`` to run on the fast one alone, and makes a
``FaultProxy(bucket.server)`` to stand between. ``bucket.environment()`` is what a client needs, here or in a child.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.storage.fault_proxy import Chooser, FaultProxy, no_fault
from tests.storage.small_s3 import SmallS3

SECRET = "marked-secret-3f9a0c77"
"""The secret key of every test: it may appear in no output."""
KEY_ID = "AKIAMARKED7B21D4E5F6"

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Bucket:
    """An empty bucket on a server."""

    server: str
    """The server's address."""
    name: str

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

    def behind(self, proxy: FaultProxy) -> Bucket:
        """Return this bucket as clients of the proxy see it."""
        return replace(self, server=proxy.url)

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

    def put_folder(self, folder: Path, key: str) -> str:
        """Write all files of a folder and return its URL."""
        client = self.client()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = f"{key}/{path.relative_to(folder).as_posix()}"
                client.put_object(Bucket=self.name, Key=name, Body=path.read_bytes())
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
    return _enter(make_bucket(request.getfixturevalue("moto_server")), monkeypatch)


@pytest.fixture
def small_bucket(small_server: SmallS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket on the small server, forgotten afterwards; this process's environment leads to it."""
    made = _enter(make_bucket(small_server.url), monkeypatch)
    yield made
    small_server.forget(made.name)


def _enter(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    return bucket


@contextmanager
def open_proxy(target: str, choose: Chooser = no_fault, *, latency_seconds: float = 0.0) -> Iterator[FaultProxy]:
    """Yield a proxy before a server."""
    proxy = FaultProxy(target, choose, latency_seconds=latency_seconds)
    try:
        yield proxy
    finally:
        proxy.close()
