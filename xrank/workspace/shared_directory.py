"""Creates and lists a directory that ranks on other network file system clients may be creating at the same time."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import TypeVar

from xrank.errors import UsageError

__all__ = ["STALE_SECONDS", "list_names", "make_directory"]

STALE_SECONDS = 90.0
"""After this time even a client with acdirmax=60 (nfs(5)) has asked the server again."""
_PAUSE_SECONDS = (0.01, 1.0)
"""Seconds between two attempts: the first pause and the longest."""

Result = TypeVar("Result")


def make_directory(path: str, *, stale_seconds: float = STALE_SECONDS) -> None:
    """Create a directory and its parents, if they are absent.

    A client that looked up the name before another one created it may go on to report that it is absent, while mkdir
    fails because it exists. Then the attempt is repeated.

    Raises:
        UsageError: the path or a parent of it is not a directory.
        OSError: it may not be created.
    """
    try:
        _retry(lambda: _make(path), FileExistsError, stale_seconds)
    except FileExistsError as error:
        raise _directory_error(path, error) from None


def list_names(path: str, *, stale_seconds: float = STALE_SECONDS) -> list[str]:
    """Return the names in a directory that `make_directory` created.

    If two clients create it at once, one of them may see it and a moment later get ENOENT (observed on glusterfs).
    Then the attempt is repeated.

    Raises:
        FileNotFoundError: it is gone.
        OSError: it may not be read.
    """
    return _retry(lambda: os.listdir(path), FileNotFoundError, stale_seconds)


def _retry(look: Callable[[], Result], stale_error: type[OSError], stale_seconds: float) -> Result:
    """Return the result of `look`, repeated on errors that an outdated view of the directory may cause.

    Raises:
        OSError: from the last attempt.
    """
    deadline, pause = time.monotonic() + stale_seconds, _PAUSE_SECONDS[0]
    while True:
        try:
            return look()
        except stale_error:
            if time.monotonic() > deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _make(path: str) -> None:
    """Create a directory and its parents.

    Raises:
        UsageError: the path or a parent of it is not a directory.
        FileExistsError: mkdir reports that the name exists, and stat that it does not.
    """
    try:
        os.makedirs(path)
    except NotADirectoryError as error:
        raise _directory_error(path, error) from None
    except FileExistsError as error:
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            is_directory = False
            # A link to nothing exists for mkdir and is absent for stat, however often both are asked.
            if not os.path.islink(path):
                raise error from None
        if not is_directory:
            raise _directory_error(path, error) from None


def _directory_error(path: str, error: OSError) -> UsageError:
    return UsageError(
        f"{path} is not a directory",
        file=path,
        got=str(error),
        want="a directory",
        next_step="choose another workspace_path",
    )
