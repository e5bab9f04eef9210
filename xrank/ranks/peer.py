"""Whose process a rank is, told to the others so that they can name it, and watch it where they share a host."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from xrank.errors import CorruptError

__all__ = ["Peer", "process_space"]


@dataclass(frozen=True, slots=True)
class Peer:
    """A rank's process."""

    rank: int
    host: str
    pid: int
    space: str
    """Within which `pid` means this process."""

    @classmethod
    def of_this_process(cls, rank: int) -> Peer:
        """Return what to tell of this rank."""
        return cls(rank, socket.gethostname(), os.getpid(), process_space())

    def to_dict(self) -> dict[str, Any]:
        """Return the peer as JSON holds it."""
        return {"rank": self.rank, "host": self.host, "pid": self.pid, "space": self.space}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Peer:
        """Return what `to_dict` gave; other entries are left out.

        Raises:
            CorruptError: it did not give that.
        """
        rank, host, pid, space = (told.get(name) for name in ("rank", "host", "pid", "space"))
        if type(rank) is int and type(host) is str and type(pid) is int and type(space) is str:
            return cls(rank, host, pid, space)
        raise CorruptError("a rank does not say who it is", got=ascii(told)[:200], want="rank, host, pid and space")

    def open_life(self) -> int | None:
        """Return a pidfd (pidfd_open(2)), readable once the process has ended; None where it can't be watched."""
        if self.space == process_space():
            with suppress(OSError):
                return os.pidfd_open(self.pid)
        return None


@cache
def process_space() -> str:
    """Return what process numbers mean the same in: the running kernel and its namespace (pid_namespaces(7))."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as boot:  # what is imported anyway
        return f"{boot.read().strip()}.{os.stat('/proc/self/ns/pid').st_ino}"


# A forked process may be the first of a namespace of its own.
os.register_at_fork(after_in_child=process_space.cache_clear)
