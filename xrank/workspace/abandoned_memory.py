"""Finds named shared memory that dead processes left. xrank names none, but earlier tools of the ranks may have."""

from __future__ import annotations

import contextlib
import os
import re
import stat

from xrank.system import user_id

__all__ = ["find_abandoned_segments"]

_NAME = re.compile(r"rank_\d+")
"""Names that ModelOpt uses (modelopt/torch/export/distribute.py: get_tensors_parallel). A killed job leaves them, and
every later job then fails with FileExistsError."""


def find_abandoned_segments(
    folder: str, *, older_than: float, processes: str = "/proc"
) -> list[tuple[str, os.stat_result]]:
    """Return the segments with such a name that this user owns and no process has open or mapped.

    Args:
        folder: where the system keeps named shared memory.
        older_than: time in seconds since the epoch. Segments changed later are left out, because processes of another
            namespace, which are invisible here, may hold them.
        processes: where the kernel lists processes (proc(5)).
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if _NAME.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):  # its owner removed it meanwhile
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == user_id() and status.st_mtime < older_than:
                        found.append((entry.path, status))
    held = _list_held_files(processes) if found else set()
    return [(path, status) for path, status in found if (status.st_dev, status.st_ino) not in held]


def _list_held_files(processes: str) -> set[tuple[int, int]]:
    """Return device and inode of every file that a process of this user maps or has open."""
    held = set()
    for pid in filter(str.isdigit, os.listdir(processes)):
        # The process may end meanwhile. Other users' processes cannot hold files that only this user may open.
        with contextlib.suppress(OSError):
            for name in os.listdir(f"{processes}/{pid}/fd"):
                with contextlib.suppress(OSError):
                    status = os.stat(f"{processes}/{pid}/fd/{name}")
                    held.add((status.st_dev, status.st_ino))
        with contextlib.suppress(OSError):
            held |= _read_mapped_files(f"{processes}/{pid}/maps")
    return held


def _read_mapped_files(maps: str) -> set[tuple[int, int]]:
    """Return device and inode of every mapped file. Only root may read the links in map_files (proc(5))."""
    mapped = set()
    with open(maps, "rb") as lines:
        for line in lines:
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = device.split(b":")
            mapped.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return mapped
