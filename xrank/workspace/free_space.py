"""The space that a directory has, told where it was not enough."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from xrank.errors import NoSpaceError

__all__ = ["no_space_named"]


@contextlib.contextmanager
def no_space_named(
    directory: str, what: str, nbytes: int, *, file: str | None = None, rank: int | None = None, besides: str = ""
) -> Iterator[None]:
    """Turn "no space" into the error that says how much is needed and how much there is.

    Args:
        directory: where it is written.
        what: is written.
        nbytes: of it.
        file: that is to be named; the directory if None.
        rank: whose it is, if it is one's.
        besides: what is to be said besides of the bytes that are wanted.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
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
