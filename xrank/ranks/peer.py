"""The process of a rank: its identity for the other ranks' messages, and its pidfd on the same host."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from typing import Any

from xrank.errors import CorruptError
from xrank.system import after_fork_in_child


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    space: str
    """Kernel and process namespace in which `pid` is this process."""
    network: str = ""
    """Kernel and network namespace, in which processes reach each other's abstract sockets (unix(7))."""

    @classmethod
    def from_this_process(cls, rank: int) -> Peer:
        """Return the peer of a rank that runs in this process."""
        return cls(rank, socket.gethostname(), os.getpid(), process_space(), _network())

    def to_dict(self) -> dict[str, Any]:
        """Return the peer as a JSON object."""
        return {
            "rank": self.rank,
            "host": self.host,
            "pid": self.pid,
            "space": self.space,
            "network": self.network,
        }

    @classmethod
    def from_dict(cls, description: dict[str, Any]) -> Peer:
        """Return the peer of a `to_dict`; other entries are ignored.

        Raises:
            CorruptError: an entry is missing or has another type.
        """
        rank, host, pid, space = (description.get(name) for name in ("rank", "host", "pid", "space"))
        if type(rank) is type(pid) is int and 0 < pid < 1 << 31 and type(host) is type(space) is str:
            return cls(rank, host, pid, space, str(description.get("network", "")))
        raise CorruptError(
            "a rank's description of its process is damaged",
            got=ascii(description)[:200],
            want="rank, host, pid and space",
            next_step="let all ranks use the same version of xrank",
        )

    def open_life(self) -> int | None:
        """Return a pidfd (pidfd_open(2)), readable once the process has ended; None if it can't be watched.

        Raises:
            ProcessLookupError: the process has ended, and its parent has noticed it.
        """
        if self.space == process_space():
            try:
                return os.pidfd_open(self.pid)
            except ProcessLookupError:
                raise
            except OSError:  # no descriptor left
                pass
        return None


@cache
def process_space() -> str:
    """Return an id of the space in which process numbers are unique: boot and namespace (pid_namespaces(7))."""
    try:
        # No module beyond those imported anyway.
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:
            return f"{boot.read().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"
    except FileNotFoundError:
        return socket.gethostname()  # another system than Linux


def _network() -> str:
    try:
        return f"{process_space().partition('.')[0]}.{os.stat('/proc/self/ns/net').st_ino}"
    except FileNotFoundError:
        return socket.gethostname()  # another system than Linux


# A forked process may be the first of a namespace of its own.
after_fork_in_child(process_space.cache_clear)
