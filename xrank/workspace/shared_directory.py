"""Makes a directory that other ranks, on other clients of a network file system, may be making at the same time."""

from __future__ import annotations

import os
import stat
import time

from xrank.errors import UsageError

__all__ = ["STALE_SECONDS", "make_directory"]

STALE_SECONDS = 90.0
"""After that even a client with acdirmax=60 (nfs(5)) has asked the server again."""
_PAUSE_SECONDS = (0.01, 1.0)
"""Between two looks, at first and at last."""


def make_directory(path: str, *, stale_seconds: float = STALE_SECONDS) -> None:
    """Make a directory and those above it; one that is there is good.

    A client that asked for the name before another one made it may go on to say that it is absent, though making it is
    refused because it exists: then it is asked again.

    Raises:
        UsageError: something that is no directory has the name, or a name above it.
        OSError: it may not be made.
    """
    deadline, pause = time.monotonic() + stale_seconds, _PAUSE_SECONDS[0]
    while True:
        try:
            os.makedirs(path)
            return
        except NotADirectoryError as error:
            raise _no_directory(path, error) from None
        except FileExistsError as error:
            try:
                if stat.S_ISDIR(os.stat(path).st_mode):
                    return
                raise _no_directory(path, error) from None
            except FileNotFoundError:
                if os.path.islink(path) or time.monotonic() > deadline:
                    raise _no_directory(path, error) from None
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _no_directory(path: str, error: OSError) -> UsageError:
    return UsageError(f"{path} is no directory", file=path, got=str(error), want="a directory")
