"""A directory that other ranks, on other clients of a network file system, may be making at the same time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from xrank.errors import UsageError

__all__ = ["STALE_SECONDS", "make_directory", "names_in"]

STALE_SECONDS = 90.0
"""After that even a client with acdirmax=60 (nfs(5)) has asked the server again."""
_PAUSE_SECONDS = (0.01, 1.0)
"""Between two looks, at first and at last."""

Seen = TypeVar("Seen")


def make_directory(path: str, *, stale_seconds: float = STALE_SECONDS) -> None:
    """Make a directory and those above it; one that is there is good.

    A client that asked for the name before another one made it may go on to say that it is absent, though making it is
    refused because it exists: then it is asked again.

    Raises:
        UsageError: something that is no directory has the name, or a name above it.
        OSError: it may not be made.
    """
    try:
        _looked_again(lambda: _make(path), FileExistsError, stale_seconds)
    except FileExistsError as error:
        raise _no_directory(path, error) from None


def names_in(path: str, *, stale_seconds: float = STALE_SECONDS) -> list[str]:
    """Return the names in a directory that `make_directory` made.

    Where two clients make it at once, one of them may be shown it and, a moment later, told that it is absent (seen on
    glusterfs): then it is asked again.

    Raises:
        FileNotFoundError: it is gone.
        OSError: it may not be read.
    """
    return _looked_again(lambda: os.listdir(path), FileNotFoundError, stale_seconds)


def _looked_again(look: Callable[[], Seen], old_view: type[OSError], stale_seconds: float) -> Seen:
    """Return what a look returns; one that fails as an old view of the directory may is repeated until none is as old.

    Raises:
        OSError: of the last look.
    """
    deadline, pause = time.monotonic() + stale_seconds, _PAUSE_SECONDS[0]
    while True:
        try:
            return look()
        except old_view:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _make(path: str) -> None:
    """Make a directory and those above it.

    Raises:
        UsageError: something that is no directory has the name, or a name above it.
        FileExistsError: something has the name, of which this client says that it is absent.
    """
    try:
        os.makedirs(path)
    except NotADirectoryError as error:
        raise _no_directory(path, error) from None
    except FileExistsError as error:
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            is_directory = False
            if not os.path.islink(path):
                raise error from None
        if not is_directory:
            raise _no_directory(path, error) from None


def _no_directory(path: str, error: OSError) -> UsageError:
    return UsageError(f"{path} is no directory", file=path, got=str(error), want="a directory")
