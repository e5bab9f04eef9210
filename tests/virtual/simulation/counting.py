"""Counts what a conversion really reads and writes: around its sources and targets, by no rule of the simulation's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

from xrank.engine.buffers import FileSource, FileTarget
from xrank.ranks.loans import PeerSource


@dataclass
class Counted:
    """Counts of one process; names as in `xrank.virtual.simulation.traffic.RoundTraffic`."""

    read_nbytes: int = 0
    reads: int = 0
    own_nbytes: int = 0
    taken_nbytes: int = 0
    messages: int = 0
    written_nbytes: int = 0

    def told(self) -> dict[str, int]:
        return asdict(self)


@contextmanager
def counting() -> Iterator[Counted]:
    """Count what this process reads and writes in the body."""
    found, lock, inside = Counted(), threading.Lock(), threading.local()
    file_read, peer_read, peer_fetch, write = (
        FileSource.read_into,
        PeerSource.read_into,
        PeerSource.fetch,
        FileTarget.write,
    )

    def add(**amounts: int) -> None:
        with lock:
            for name, amount in amounts.items():
                setattr(found, name, getattr(found, name) + amount)

    def add_peer(self: Any, record: int, nbytes: int) -> None:
        if int(self._record_rank[record]) == self._rank:
            add(own_nbytes=nbytes)
        else:
            add(taken_nbytes=nbytes, messages=1)

    def read_file(self: Any, record: int, start: int, into: memoryview) -> None:
        add(read_nbytes=len(into), reads=1)
        file_read(self, record, start, into)

    def read_peer(self: Any, record: int, start: int, into: memoryview) -> None:
        if not getattr(inside, "fetch", False):
            add_peer(self, record, len(into))
        peer_read(self, record, start, into)

    def fetch_peer(self: Any, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        add_peer(self, record, nbytes)
        inside.fetch = True
        try:
            return peer_fetch(self, record, start, nbytes, staging)
        finally:
            inside.fetch = False

    def write_file(self: Any, file: int, offset: int, data: memoryview) -> None:
        add(written_nbytes=len(data))
        write(self, file, offset, data)

    with (
        mock.patch.object(FileSource, "read_into", read_file),
        mock.patch.object(PeerSource, "read_into", read_peer),
        mock.patch.object(PeerSource, "fetch", fetch_peer),
        mock.patch.object(FileTarget, "write", write_file),
    ):
        yield found
