"""Places that a gather writes to, for tests of the same promises: a folder, buckets, Azure containers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.storage.fault_proxy import FaultProxy, Request
from tests.storage.servers import Bucket, GoogleBucket, Place, make_bucket, make_container, open_proxy

QUICK = ("folder", "s3", "gs", "az")
"""The places of `make test`; moto and Azurite come in `make soak`."""


class Output(Protocol):
    """A place for a model named ``one``."""

    @property
    def url(self) -> str:
        """What ``--out`` is given."""

    def read(self) -> dict[str, bytes]:
        """Return the files of the model, by name, that a reader can open now."""

    def put(self, name: str, data: bytes) -> None:
        """Write a file of the model as another program does."""

    def list_rest(self) -> list[str]:
        """Return what gathers left beside the model."""

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        """Start a command of xrank."""

    def run_killed(self, point: int, when: str, *arguments: object) -> int:
        """Run a command that is killed at its so manieth call or request that changes something; return its status."""

    def run_on(self, *arguments: object) -> tuple[int, str]:
        """Run a command, and demand that it sends no part that is in the store already; return status and text."""


@dataclass(frozen=True)
class FolderOutput:
    """A folder."""

    room: Path

    @property
    def url(self) -> str:
        return str(self.room / "one")

    def read(self) -> dict[str, bytes]:
        folder = self.room / "one"
        return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}

    def put(self, name: str, data: bytes) -> None:
        (self.room / "one").mkdir(exist_ok=True)
        (self.room / "one" / name).write_bytes(data)

    def list_rest(self) -> list[str]:
        return sorted(path.name for path in self.room.iterdir() if path.name != "one")

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        return _start({}, "-m", "xrank", *arguments)

    def run_killed(self, point: int, when: str, *arguments: object) -> int:
        with _start({}, "-m", "tests.storage.killed_command", point, when, *arguments) as child:
            child.communicate(timeout=120)
        return child.returncode

    def run_on(self, *arguments: object) -> tuple[int, str]:
        return _finish(self.start(*arguments))


@dataclass(frozen=True)
class StoreOutput:
    """A bucket or a container, behind a proxy."""

    place: Place
    proxy: FaultProxy

    @property
    def url(self) -> str:
        return f"{self.place.url}/models/one"

    def read(self) -> dict[str, bytes]:
        return {key.removeprefix("models/one/"): data for key, data in self.place.read_all("models/one/").items()}

    def put(self, name: str, data: bytes) -> None:
        self.place.put(f"models/one/{name}", data)

    def list_rest(self) -> list[str]:
        beside = [key for key in self.place.read_all() if not key.startswith("models/one/")]
        return sorted([*beside, *(f"{key}: {part}" for key, part in self.place.list_parts())])

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        environment = {**self.place.behind(self.proxy).environment(), "XRANK_STORE_TIMEOUT": "20"}
        return _start(environment, "-m", "xrank", *arguments)

    def run_killed(self, point: int, when: str, *arguments: object) -> int:
        child = self.start(*arguments)
        self.proxy.kill(lambda: child.pid, point, "before" if when == "before" else "after")
        with child:
            child.communicate(timeout=120)
        return child.returncode

    def run_on(self, *arguments: object) -> tuple[int, str]:
        self.proxy.restart()
        there = self.place.list_parts()
        done = _finish(self.start(*arguments))
        sent = {part for request in self.proxy.requests if (part := part_of(self.place, request))}
        assert not there & sent
        return done


def part_of(place: Place, request: Request) -> tuple[str, str] | None:
    """Return the key and the number, or name, of the part that a request has sent."""
    if isinstance(place, Bucket):
        found = re.fullmatch(rf"/{place.name}/(.*)\?uploadId=.*&partNumber=(\d+)", request.path)
    elif isinstance(place, GoogleBucket):
        found = re.fullmatch(rf"/{place.name}/\.xrank-parts/(.*)/([^/?]*)", request.path)
    else:
        found = re.fullmatch(rf"/\w+/{place.name}/(.*)\?comp=block&blockid=(.*)", request.path.replace("%3D", "="))
    return (found[1], found[2]) if found and request.method == "PUT" else None


@contextmanager
def open_output(kind: str, request: pytest.FixtureRequest, room: Path) -> Iterator[Output]:
    """Yield an empty place: a folder, or in one of the servers ``s3``, ``moto``, ``gs``, ``az``, ``azurite``."""
    if kind == "folder":
        (room / "models").mkdir()
        yield FolderOutput(room / "models")
        return
    server: Any = request.getfixturevalue(
        {
            "s3": "small_server",
            "moto": "moto_server",
            "gs": "small_google",
            "az": "small_azure",
            "azurite": "azurite_server",
        }[kind]
    )
    address = server if isinstance(server, str) else server.url
    name = f"box{abs(hash(room)):x}"
    place: Place
    if kind == "gs":
        place = GoogleBucket(address, name)
    else:
        place = make_bucket(address) if kind in ("s3", "moto") else make_container(address, name)
    with open_proxy(address) as proxy:
        yield StoreOutput(place, proxy)
    if not isinstance(server, str):
        server.forget(place.name)


def _start(environment: dict[str, str], *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    known = {**os.environ, **environment}
    return subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    with child:
        out, err = child.communicate(timeout=120)
    return child.returncode, out + err
