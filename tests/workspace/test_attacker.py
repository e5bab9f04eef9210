"""A stranger who reaches the store's port and all others: he reads no weights, and delays nothing."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.free_port import free_port
from tests.sampled import sampled
from tests.workspace.attacked_rank import SECRET
from xrank.ranks.byte_service import PeerGoneError, connect

NUM_SILENT = 40
"""Connections of the stranger to each place, which say nothing."""


def await_files(ranks: list[subprocess.Popen[str]], *files: Path) -> None:
    end = time.monotonic() + 100
    while not all(file.exists() for file in files):
        for rank in ranks:
            assert rank.poll() in (None, 0), rank.communicate()[1][-3000:]
        assert time.monotonic() < end, files
        time.sleep(0.01)


def read_store(port: int) -> str:
    """Return all names and values of a job's store, as any process may that reaches its port."""
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    names = store.list_keys()
    assert any("xrank" in name for name in names)
    return "\n".join(f"{name} {store.get(name)!r}" for name in names if store.check([name]))


def listening_at(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which processes listen (proc_pid_net(5))."""
    inodes = set()
    for pid in pids:
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                inodes.add(os.readlink(f"/proc/{pid}/fd/{name}"))
            except FileNotFoundError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            place, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and f"socket:[{inode}]" in inodes:
                address, port = place.split(":")
                words = [struct.pack("=I", int(address[i : i + 8], 16)) for i in range(0, len(address), 8)]
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def abstract_names() -> list[str]:
    """Return the names of xrank's sockets outside the file system, which every user of the host sees."""
    return sorted(set(re.findall(r"@(xrank-[0-9a-f]+)", Path("/proc/net/unix").read_text())))


@contextmanager
def job(work: str, folder: Path, port: int) -> Iterator[list[subprocess.Popen[str]]]:
    environ = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.workspace.attacked_rank", work, str(folder)]
    ranks = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def try_token(token: bytes, name: str, address: str | None, port: int | None) -> str:
    """Return what a service says to a process that takes these bytes for its token."""
    since = time.monotonic()

    def tick(seconds: float) -> None:
        if time.monotonic() > since + 10:
            raise TimeoutError("silent")

    try:
        connection = connect(name, port, [] if address is None else [address], token, tick)
    except (PeerGoneError, TimeoutError) as error:
        return str(error)
    into = bytearray(8)
    connection.read_into(0, 0, memoryview(into), tick)
    connection.close()
    return f"bytes: {into.hex()}"


@pytest.mark.parametrize("work", sampled(["far-export", "gather", "export", "far-gather"], 2))
def test_a_stranger_reads_nothing_and_delays_nothing(tmp_path: Path, work: str) -> None:
    port, earlier = free_port(), set(abstract_names())
    with job(work, tmp_path, port) as ranks, ExitStack() as strangers:
        pids = [rank.pid for rank in ranks]
        await_files(ranks, tmp_path / "ready-0", tmp_path / "ready-1")
        before = listening_at(pids)  # the store's, and gloo's
        (tmp_path / "go").touch()
        await_files(ranks, tmp_path / "open")
        ports, names = listening_at(pids) - before, [one for one in abstract_names() if one not in earlier]
        if work.startswith("far-"):
            assert ports and names
        else:
            assert not ports, "ranks of one host need no port"
        for address, _ in ports:
            assert address not in ("0.0.0.0", "::"), ports
        told = read_store(port)
        assert struct.pack("<f", SECRET).hex() * 2 not in told and repr(struct.pack("<f", SECRET))[2:-1] * 2 not in told
        # Whatever in the store could be a token, and whatever could be the secret behind all tokens.
        tokens = {bytes.fromhex(one) for one in re.findall(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])", told)}
        tokens |= {bytes(32), port.to_bytes(32, "big")}
        for place in [("", *one) for one in ports] + [(name, None, None) for name in names]:
            for token in sorted(tokens)[:20]:
                said = try_token(token, *place)
                assert "closed the connection" in said or "nothing listens" in said or "silent" in said, (place, said)
            for _ in range(NUM_SILENT):
                family = socket.AF_UNIX if place[1] is None else socket.AF_INET6 if ":" in place[1] else socket.AF_INET
                one = strangers.enter_context(socket.socket(family, socket.SOCK_STREAM))
                one.settimeout(1)
                try:
                    one.connect(f"\0{place[0]}" if place[1] is None else place[1:])
                except OSError:
                    break  # such as a rendezvous's, which takes no streams
        began = time.monotonic()
        (tmp_path / "attacked").touch()
        await_files(ranks, tmp_path / "done-0", tmp_path / "done-1")
        assert time.monotonic() - began < 30
        assert [rank.wait(60) for rank in ranks] == [0, 0], [rank.communicate()[1][-2000:] for rank in ranks]
