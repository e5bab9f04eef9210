"""The other ranks that this rank's launcher started on its host: the launcher's children, as the kernel lists them.

A rank that ended before it used xrank left no trace in the store. Its launcher's variables are in the environment of
its process (proc(5): environ), from which it is known while it runs. torch.multiprocessing gives its ranks no variables
but starts them in their order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from xrank import environment
from xrank.errors import UsageError
from xrank.ranks.link import is_readable


class LaunchedSiblings:
    """The ranks that have the same parent as this one; the first look finds them.

    Args:
        rank: this rank.
        world_size: number of all ranks.
        environ: the environment of this process.
    """

    def __init__(self, rank: int, world_size: int, environ: Mapping[str, str]) -> None:
        self._rank, self._world_size, self._environ = rank, world_size, environ
        self._lives: dict[int, int] | None = None
        self._missing: set[int] = set()

    def find_end(self, rank: int) -> str | None:
        """Return why a rank is known to have ended; None if it runs, or is not known."""
        if self._lives is None:
            self._lives = {}
            for sibling, pid in self._find_pids().items():
                with suppress(OSError):
                    self._lives[sibling] = os.pidfd_open(pid)
            launch = launch_of(self._environ)
            if self._lives and launch is not None and launch.launcher == "torchrun":
                start = launch.rank - launch.local_rank  # torchrun numbers the ranks of a host in a row
                self._missing = {*range(start, start + launch.local_world_size)} - {self._rank, *self._lives}
        life = self._lives.get(rank)
        if rank in self._missing or (life is not None and is_readable(life)):
            return "its process, which the same launcher started, ended before it came to a gather"
        return None

    def _find_pids(self) -> dict[int, int]:
        """Return the processes of other ranks."""
        pids = _children(os.getppid())
        launch = launch_of(self._environ)
        if launch is not None:
            found = {}
            for pid in pids:
                other = launch_of(_environ_of(pid))
                if other is not None and (other.run_id, other.world_size) == (launch.run_id, launch.world_size):
                    found[other.rank] = pid
            # A process that a rank forks has the rank's variables, but not the rank's parent.
            return {rank: pid for rank, pid in found.items() if rank != self._rank}
        spawned = [pid for pid in pids if _is_spawned(pid)]
        # Only if every rank is there, and this one in its place: else the children are not, or not all, the ranks.
        if len(spawned) == self._world_size and spawned[self._rank] == os.getpid():
            return {rank: pid for rank, pid in enumerate(spawned) if rank != self._rank}
        return {}

    def __del__(self) -> None:
        for life in (self._lives or {}).values():
            os.close(life)


def launch_of(environ: Mapping[str, str]) -> environment.Launch | None:
    """Return a launcher's description of a process; None without a launcher, or if its variables contradict."""
    try:
        launch = environment.read_launch(environ)
    except UsageError:
        return None
    return None if launch is None or launch.launcher == "bare" else launch


def _children(pid: int) -> list[int]:
    """Return the children of a process, the eldest first (proc(5): children; no such file in some kernels)."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return sorted(found, key=_start_of)


def _start_of(pid: int) -> int:
    """Return when a process started, in clock ticks (proc(5): stat, field 22); 0 if it is gone."""
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        # The name of the program may have spaces and brackets in it.
        return int(file.read().rpartition(")")[2].split()[19])
    return 0


def _environ_of(pid: int) -> dict[str, str]:
    with suppress(OSError), open(f"/proc/{pid}/environ", encoding="utf-8", errors="replace") as file:
        return dict(entry.split("=", 1) for entry in file.read().split("\0") if "=" in entry)
    return {}


def _is_spawned(pid: int) -> bool:
    """Return whether multiprocessing started a process: by its arguments, or as a copy of its parent."""
    return (words := _words(pid)) == _words(os.getppid()) or b"--multiprocessing-fork" in words


def _words(pid: int) -> list[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read().split(b"\0")
    return []
