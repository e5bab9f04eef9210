"""The lock beside an output: it saves a second gather needless work; correctness does not depend on it."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout

from xrank import system
from xrank.errors import AGAIN, OutputExistsError, UsageError, option
from xrank.writers.disk import describe, explain

_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}


@contextmanager
def hold_lock(path: str, out: str, *, owner: Callable[[], str]) -> Iterator[None]:
    """Hold the lock of an output, or go on without if the file system has no locks.

    This is the native lock, though only StrictSoftFileLock excludes across NFS clients: a strict lock whose owner was
    killed stays held until it is removed by hand, which would stop a run that a scheduler starts again, perhaps on
    another node. The kernel (of the NFS server, after the lease) frees the native lock with its owner. If two gathers
    pass, the later one takes over the stage of the earlier by a rename, and the commit decides: work is lost, but no
    output.

    Args:
        path: the lock file.
        out: the output, for the message.
        owner: returns a description of the lock's owner, for the message.

    Raises:
        OutputExistsError: another gather holds it.
        UsageError: the lock's path is not a file, or the folder cannot be written to.
    """
    lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)
    held = False
    try:
        lock.acquire()
        held = True
    except Timeout:
        if not os.path.lexists(path):
            _check_folder(os.path.dirname(path))
        raise OutputExistsError(
            f"{out}: another gather to it is under way ({owner()})",
            file=out,
            next_step=f"wait for it, or give this one another {option('out')}",
        ) from None
    except OSError as error:
        if error.errno in _NO_FILE:
            raise UsageError(
                f"{path}: is not a file, so it cannot be the lock of {out} ({describe(path)})",
                file=path,
                next_step=f"move it elsewhere, then {AGAIN}",
            ) from error
        another_users = error.errno in {errno.EACCES, errno.EPERM} and os.path.lexists(path)
        if error.errno not in _NO_LOCKS_HERE and not another_users:
            raise explain(error, path) from error
    try:
        yield
    finally:
        if held:
            # Unlinked while held: a process that waits on this file finds it without a name and makes a new one.
            with suppress(OSError):
                os.unlink(path)
            lock.release()


def _check_folder(folder: str) -> None:
    """Refuse a folder where no file can be made, though it is there, as below /proc: filelock reports it as locked."""
    probe = os.path.join(folder, f".xrank-{secrets.token_hex(8)}")
    try:
        os.close(os.open(probe, system.NEW))
        os.unlink(probe)
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder}: no file can be made there: {error.strerror}",
            file=folder,
            got=describe(folder),
            want="a folder of a disk",
            next_step=f"choose another {option('out')}",
        ) from error
    except OSError as error:
        raise explain(error, folder) from error
