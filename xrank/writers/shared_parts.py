"""A stage's unfinished files, as all ranks of one gather write to them: rank 0 makes, finishes and commits them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from xrank.errors import CorruptError
from xrank.writers.disk import describe, explaining
from xrank.writers.journal import read_journal

__all__ = ["SharedParts"]

_PART = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The files of a stage that another process holds.

    That process may fail and its successor take the stage's name away: then nothing is found here, and what is still
    written to an open file changes none of the successor's, which makes its own.
    """

    path: str
    """The stage."""

    def is_of(self, plan_digest: str) -> bool:
        """Say whether the stage is to be seen here, and is one of that plan."""
        journal = read_journal(self.path)
        return journal is not None and journal.plan == plan_digest

    def open(self, name: str, nbytes: int) -> int | None:
        """Return the file that will be finished under that name, open for both ways; it is never made here.

        None: it is not to be seen here, not yet or not any more.

        Raises:
            CorruptError: it has another size than it was given.
        """
        path = os.path.join(self.path, f"{name}.part")
        with explaining(path):
            try:
                fd = os.open(path, _PART)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):
                    return None
                raise
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            os.close(fd)
            raise CorruptError(
                f"{path}: is not the file that rank 0 made",
                file=path,
                got=f"{status.st_size:,} bytes ({describe(path)})",
                want=f"a file of {nbytes:,} bytes",
                next_step="let nothing else write beside the output, then run the same command",
            )
        return fd
