"""A stage's unfinished files, to which all ranks of a gather write; rank 0 makes, finishes and commits them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from xrank.errors import AGAIN, CorruptError
from xrank.system import UPDATE
from xrank.writers.disk import describe, explain_errors
from xrank.writers.journal import read_journal


@dataclass(frozen=True, slots=True)
class SharedParts:
    """The files of a stage of another process.

    That process may fail, and its successor take over the stage by a rename. Then no file is found here, and writes to
    open files do not change the successor's, which makes new ones.
    """

    path: str
    """Path of the stage."""

    def has_plan(self, plan_digest: str) -> bool:
        """Return whether the stage is visible here and belongs to that plan."""
        journal = read_journal(self.path)
        return journal is not None and journal.plan == plan_digest

    def open(self, name: str, nbytes: int) -> int | None:
        """Return a descriptor of the file that will be finished under that name, for reading and writing.

        None if it is not visible here, not yet or not any more: it is never made here.

        Raises:
            CorruptError: it has another size.
        """
        path = os.path.join(self.path, f"{name}.part")
        with explain_errors(path):
            try:
                fd = os.open(path, UPDATE)
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESTALE):
                    return None
                raise
        status = os.fstat(fd)
        # Rank 0 sizes the files before it sends the stage's name, so a file of another size is not rank 0's.
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            os.close(fd)
            raise CorruptError(
                f"{path}: is not the file that rank 0 made",
                file=path,
                got=f"{status.st_size:,} bytes ({describe(path)})",
                want=f"a file of {nbytes:,} bytes",
                next_step=f"let nothing else write beside the output, then {AGAIN}",
            )
        return fd
