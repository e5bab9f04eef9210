"""A directory that several hosts mount, or all users may write to: made, listed, and whose files are in it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from xrank.errors import ContradictionError, UsageError, option
from xrank.system import user_id

STALE_SECONDS = 90.0
"""After this time even a client with acdirmax=60 (nfs(5)) has asked the server again."""
OWN_PATH = "choose a workspace_path that no other user may write to"
_PAUSE_SECONDS = (0.01, 1.0)
"""Seconds between two attempts: the first pause and the longest."""

Result = TypeVar("Result")


def make_directory(path: str, *, stale_seconds: float = STALE_SECONDS) -> None:
    """Create a directory and its parents, if they are absent.

    A client that looked up the name before another one created it may go on to report that it is absent, while mkdir
    fails because it exists. Then the attempt is repeated. UsageError: the path or a parent of it is not a directory.
    """
    try:
        _retry(lambda: _make(path), FileExistsError, stale_seconds)
    except FileExistsError as error:
        raise _directory_error(path, error) from None


def list_names(path: str, *, stale_seconds: float = STALE_SECONDS) -> list[str]:
    """Return the names in a directory that `make_directory` created.

    If two clients create it at once, one of them may see it and a moment later get ENOENT (observed on glusterfs). Then
    the attempt is repeated.
    """
    return _retry(lambda: os.listdir(path), FileNotFoundError, stale_seconds)


def check_state_owner(path: str, rank: int, *, may_be_link: bool = False) -> None:
    """Check, before a state is opened, that it is a file, and this user's where all users may put files.

    A link is accepted with `may_be_link`, because it is only removed.
    """
    try:
        status, folder = os.lstat(path), os.stat(os.path.dirname(path))
    except FileNotFoundError:
        return
    is_foreign = _is_shared(folder) and status.st_uid not in (user_id(), folder.st_uid)
    is_right = stat.S_ISREG(status.st_mode) or (may_be_link and stat.S_ISLNK(status.st_mode))
    if is_foreign or not is_right:
        raise UsageError(
            f"{path} is not a state that rank {rank} of this user has written",
            rank=rank,
            file=path,
            got=f"{stat.filemode(status.st_mode)}, owner {status.st_uid}",
            want=f"a file of user {user_id()}, or nothing",
            next_step=OWN_PATH,
        )


def check_one_owner(directory: str, names: Iterable[str]) -> None:
    """Check that one user has written all these files, in a directory where all users may put files."""
    if not _is_shared(os.stat(directory)):
        return
    owners = {name: os.lstat(os.path.join(directory, name)).st_uid for name in names}
    first = next(iter(owners.values()), None)
    foreign = next((name for name, owner in owners.items() if owner != first), None)
    if foreign is not None:
        file, owned = os.path.join(directory, foreign), ", ".join(map(str, sorted(set(owners.values()))))
        raise ContradictionError(
            f"{file}: different users have written the states of this workspace, in a directory that all users may "
            f"write to",
            file=file,
            got=f"owners {owned}",
            next_step="copy your own states to a directory that no other user may write to",
        )


def _is_shared(directory: os.stat_result) -> bool:
    """Return whether all users may put files into a directory, and only their owners may remove them: /tmp."""
    return bool(directory.st_mode & stat.S_ISVTX and directory.st_mode & stat.S_IWOTH)


def _retry(look: Callable[[], Result], stale_error: type[OSError], stale_seconds: float) -> Result:
    """Return the result of `look`, repeated on errors that an outdated view of the directory may cause."""
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
    """Create a directory and its parents; FileExistsError if mkdir finds it, and stat does not."""
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
        got=f"{error.strerror}: {error.filename}",
        want="a directory, or a name that is free",
        next_step=f"choose another {option('workspace_path')}",
    )
