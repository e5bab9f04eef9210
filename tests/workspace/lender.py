"""A process that lends bytes, without torch, and a source over it: for tests that kill or stop it.

python lender.py [option ...]        prints what it told, lends until its standard input ends, says "closed"
"""

import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
from contextlib import closing, contextmanager

import numpy as np

from xrank.ranks import loans
from xrank.ranks.byte_service import host_addresses
from xrank.ranks.loans import MemoryOffer, PeerSource

NBYTES = (6_000_001, 3_000_017, 0, 40)
"""The first in a row, the second not, the third empty; the last cannot be read."""


def content(view: int) -> bytes:
    return np.random.default_rng(view).bytes(NBYTES[view])


CONTENT = [content(view) for view in range(len(NBYTES))]


class Row:
    """Bytes that lie in a row."""

    def __init__(self, data: bytes) -> None:
        self._memory = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self.nbytes, self.address = len(data), ctypes.addressof(self._memory) if data else None

    def find_row(self, start: int, nbytes: int) -> memoryview:
        return memoryview(self._memory).cast("B")[start : start + nbytes]

    def read_into(self, start: int, into: memoryview) -> None:
        into[:] = memoryview(self._memory).cast("B")[start : start + len(into)]


class Scattered:
    """Bytes that do not, as a strided tensor's or a device's."""

    address = None

    def __init__(self, data: bytes) -> None:
        self._data, self.nbytes = data, len(data)

    def find_row(self, start: int, nbytes: int) -> None:
        return None

    def read_into(self, start: int, into: memoryview) -> None:
        into[:] = self._data[start : start + len(into)]


class Failing(Scattered):
    def read_into(self, start: int, into: memoryview) -> None:
        raise ArithmeticError("the device is lost")


def views() -> list:
    kinds = (Row, Scattered, Row, Failing)
    return [kind(content(view)) for view, kind in enumerate(kinds)]


class Lender:
    """A running lender, as a test sees it."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.told = json.loads(process.stdout.readline())

    def stop(self) -> None:
        """Stop it, and wait until it has."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def fork(self) -> None:
        """Let it fork a child that lives until the test ends."""
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == b"forked\n"

    def end(self) -> None:
        """Let it close its offer, and wait until it has, but not for its end."""
        self.process.stdin.close()
        assert self.process.stdout.readline() == b"closed\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def lender(*options: str, within: tuple[str, ...] = ()):
    """Give the body a lender; end it in any case."""
    command = [*within, sys.executable, __file__, *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield Lender(process)
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@contextmanager
def source(told, *, way="memory", own=(), check=lambda: None, timeout_seconds=20.0):
    """Yield a source over rank 0, this process, and rank 1, by its description; record r is view r of rank 1."""
    if way == "tcp":
        told = {**told, "socket": "nobody", "addresses": ["127.0.0.1"]}
    elif way == "network":
        told = {**told, "socket": "nobody"}
    with closing(MemoryOffer(own)) as mine:
        rows = [1] * len(NBYTES) + [0] * len(own)
        records = [*range(len(NBYTES)), *range(len(own))]
        made = PeerSource(
            *(mine, 0, {0: mine.describe(), 1: told}, np.array(rows), np.array(records)),
            check=check,
            timeout_seconds=timeout_seconds,
            grace_seconds=loans._GRACE_SECONDS,
            direct=way == "memory",
        )
        with closing(made):
            yield made


def assert_right(made: PeerSource, seed: int, repeats: int = 60) -> None:
    chance = random.Random(seed)
    staging = memoryview(bytearray(max(NBYTES) + 20))
    for view in range(3):
        whole = made.fetch(view, 0, NBYTES[view], staging)
        assert whole == CONTENT[view]
        for _ in range(repeats):
            start, stop = sorted(chance.randint(0, NBYTES[view]) for _ in range(2))
            stop = min(stop, start + chance.choice([1, 100, 70_000, 5_000_000]))
            staging[:10] = staging[-10:] = b"\xa5" * 10
            into = staging[10 : 10 + stop - start]
            after = bytes(staging[10 + stop - start :][:10])
            made.read_into(view, start, into)
            assert into == CONTENT[view][start:stop]
            assert staging[:10] == b"\xa5" * 10 and staging[10 + stop - start :][:10] == after


def main(options: list[str]) -> None:
    if "undumpable" in options:
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    if "few descriptors" in options:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    offer = MemoryOffer(views(), across_hosts="one host" not in options, addresses=["127.0.0.1", *host_addresses()])
    print(json.dumps(offer.describe()), flush=True)
    if "fork" in options:
        sys.stdin.readline()
        if os.fork() == 0:  # like a data loader's worker: it inherits the parent's connections
            os.read(0, 1)
            os._exit(0)
        print("forked", flush=True)
    os.read(0, 1)
    offer.close()
    print("closed", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1:])
