"""What a process has open, as tests look for what is left."""

import contextlib
import os


def open_files() -> dict[int, str]:
    """Return what each descriptor of this process leads to, as Linux names it (proc(5): /proc/pid/fd).

    Threads may close theirs between the listing and the look, as the listing itself does with its own.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[int(fd)] = os.readlink(f"/proc/self/fd/{fd}")
    return found
