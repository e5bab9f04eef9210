"""The open files of a process, in which tests look for leaks."""

import contextlib
import os
from collections import Counter


def open_files() -> dict[int, str]:
    """Return what each descriptor of this process leads to, as Linux names it (proc(5): /proc/pid/fd).

    Threads may close theirs between the listing and the look, as the listing itself does with its own.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def opened_since(before: dict[int, str]) -> list[str]:
    """Return what is open now and was not when ``before`` was taken, by what it leads to.

    Files that have closed meanwhile do not count: connections of earlier tests may close at any time.
    """
    return sorted((Counter(open_files().values()) - Counter(before.values())).elements())
