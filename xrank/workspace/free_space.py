"""Errors about full disks and full memory, with the free and the needed bytes."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from xrank.errors import NoSpaceError, UsageError
from xrank.system import free_nbytes

NO_MEMORY = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
"""Error numbers of a write to a file in memory when the system lacks memory."""


@contextlib.contextmanager
def explain_no_space(
    directory: str, what: str, nbytes: int, *, file: str | None = None, rank: int | None = None, besides: str = ""
) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT into a NoSpaceError with the needed and the free bytes.

    Args:
        directory: the directory that is written to.
        what: noun for the written data, for the message.
        nbytes: size of the data.
        file: the path that the message names; by default the directory.
        rank: the rank that owns the data, if any.
        besides: text that follows the wanted number of bytes.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            if error.filename is None:  # calls with a descriptor do not name its file
                error.filename = file or directory
            raise
        # Asked after the failure, so the numbers in the error belong to it.
        free = free_nbytes(directory) or 0
        raise NoSpaceError(
            f"{file or directory}: no space for {what}",
            rank=rank,
            file=file or directory,
            got=f"{free} bytes free" + (", and a quota" if error.errno == errno.EDQUOT else ""),
            want=f"{nbytes} bytes{besides}",
            next_step="free space, or use another workspace",
            needed_nbytes=nbytes,
            free_nbytes=free,
        ) from error


@contextlib.contextmanager
def explain_size_limit(what: str, nbytes: int) -> Iterator[None]:
    """Turn EFBIG into a UsageError: the process's limit of file sizes, which also counts for files in memory.

    Args:
        what: noun for the written data, for the message.
        nbytes: size of the data.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        import resource  # a POSIX library; only POSIX limits the size of files

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        raise UsageError(
            f"{what} is larger than a file of this process may be (ulimit -f, RLIMIT_FSIZE)",
            got=f"{nbytes:,} bytes",
            want="no limit" if limit < 0 else f"at most {limit:,} bytes",
            next_step="raise the limit: ulimit -f unlimited",
        ) from error


def make_no_memory_error(
    what: str, nbytes: int, next_step: str, *, rank: int | None = None, besides: str = ""
) -> NoSpaceError:
    """Return the error that the system lacks memory for `nbytes` bytes of `what`."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return NoSpaceError(
        f"not enough memory for {what}",
        rank=rank,
        got=f"{free:,} bytes free",
        want=f"{nbytes:,} bytes{besides}",
        next_step=next_step,
        needed_nbytes=nbytes,
        free_nbytes=free,
    )
