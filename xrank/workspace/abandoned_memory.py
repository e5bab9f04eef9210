"""Shared memory with a name that dead processes left: xrank's own has none, but what ranks used before it may stay."""

from __future__ import annotations

import contextlib
import os
import re
import stat

__all__ = ["abandoned_segments"]

_NAME = re.compile(r"rank_\d+")
"""The names that ModelOpt gives (modelopt/torch/export/distribute.py: get_tensors_parallel). A killed job leaves
them, and every later one fails with FileExistsError."""


def abandoned_segments(folder: str, *, older_than: float, processes: str = "/proc") -> list[tuple[str, os.stat_result]]:
    """Return the segments of that name in a folder that are this user's, and that no process holds.

    Args:
        folder: where the system keeps shared memory with names.
        older_than: in seconds of the epoch; those changed since are left alone, as processes of another namespace,
            which can't be seen, may hold them.
        processes: where the kernel shows its processes (proc(5)).
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # whoever made it removes it; others are still to come
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_mtime < older_than:
                        found.append((entry.path, status))
    held = _held_files(processes) if found else set()
    return [(path, status) for path, status in found if (status.st_dev, status.st_ino) not in held]


def _held_files(processes: str) -> set[tuple[int, int]]:
    """Return device and inode of every file that a process of this user maps or has open."""
    held = set()
    for pid in filter(str.isdigit, os.listdir(processes)):
        # It may end while it is looked at; those of other users do not hold what only this one may open.
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{processes}/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"{processes}/{pid}/fd/{name}")
                    held.add((status.st_dev, status.st_ino))
        with contextlib.suppress(OSError):
            held |= _mapped_files(f"{processes}/{pid}/maps")
    return held


def _mapped_files(maps: str) -> set[tuple[int, int]]:
    """Return device and inode of every file that is mapped; the links in map_files are for root alone (proc(5))."""
    mapped = set()
    with open(maps, "rb") as lines:
        for line in lines:
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = device.split(b":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return mapped
