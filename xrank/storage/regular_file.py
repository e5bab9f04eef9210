"""Open a regular file to read its structure, and make the errors that name it."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any, ClassVar, TypeVar

from msgspec import Struct

from xrank import system
from xrank.errors import (
    AGAIN,
    ContradictionError,
    CorruptError,
    IncompleteError,
    LayoutError,
    UnsafeError,
    UsageError,
    XrankError,
)
from xrank.storage.client import ObjectStatus
from xrank.storage.url import is_url
from xrank.words import repr_text

_PASSING = {"EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO"}
"""Failures of network file systems that may pass: a server starts again, or renews its handles."""
_OF_THE_FILE = {"EBADMSG", "EUCLEAN", "ELOOP", "ENOTDIR", "EISDIR", "ENXIO", "ENAMETOOLONG"}
"""Failures that the file or its path causes, whenever it is read."""
_RETRY_SECONDS = (0.05, 0.2, 1.0)
_Result = TypeVar("_Result")
_Error = TypeVar("_Error", bound=XrankError)

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"
"""First bytes of a pointer of git-lfs (github.com/git-lfs/git-lfs: docs/spec.md), which a clone leaves for a file."""


def quote(value: str | bytes | int | tuple[int, ...]) -> str:
    """Return a value from a file as a text that is safe in messages: short, ASCII, without control characters."""
    # Cut first, so printing costs less than reading.
    text = ascii(value[:200]) if isinstance(value, (str, bytes, tuple)) else repr_text(value)
    return text if len(text) <= 200 else text[:200] + "..."


class Origin(Struct, frozen=True):
    """The file and rank that bytes are from; makes the errors that name them."""

    path: str
    rank: int | None = None

    @property
    def name(self) -> str:
        """The rank and the path, for the start of messages."""
        return self.path if self.rank is None else f"rank {self.rank}: {self.path}"

    def locate(self, problem: str) -> str:
        """Return a message with the rank and the path before the problem."""
        return f"{self.name}: {problem}"

    def _make(
        self,
        kind: type[_Error],
        problem: str,
        got: str | None = None,
        want: str | None = None,
        next_step: str | None = None,
        *,
        tensor: str | None = None,
    ) -> _Error:
        """Return an error of a kind that names the file, the rank and the tensor."""
        step = next_step
        if step is None and kind is CorruptError:
            file = "it" if self.rank is None else f"rank {self.rank}'s file"
            step = f"copy {file} again from where it was written, or have it written again"
        elif step is None and kind is ContradictionError:
            step = "all files must come from one save of one run; copy them again"
        where: Any = {"file": self.path, "rank": self.rank, "tensor": tensor}
        return kind(self.locate(problem), got=got, want=want, next_step=step, **where)

    corrupt: ClassVar[partialmethod[CorruptError]] = partialmethod(_make, CorruptError)
    """Bytes were damaged since they were written."""
    contradiction: ClassVar[partialmethod[ContradictionError]] = partialmethod(_make, ContradictionError)
    """The file disagrees with another one, or with its own name."""
    incomplete: ClassVar[partialmethod[IncompleteError]] = partialmethod(_make, IncompleteError)
    """The file is missing, or the file or folder lacks something."""
    layout: ClassVar[partialmethod[LayoutError]] = partialmethod(_make, LayoutError)
    """The layout of a tensor in the file is unknown or cannot be expressed."""
    usage: ClassVar[partialmethod[UsageError]] = partialmethod(_make, UsageError)
    """The file is undamaged, and xrank does not accept it."""

    def unsafe(self, problem: str, got: str | None = None) -> UnsafeError:
        """Return the error for a pickle that needs more than data."""
        step = "save tensors and plain Python values only (a state_dict), not objects"
        return self._make(UnsafeError, problem, got, "plain values and tensors", step)

    def unreadable(self, problem: str, error: OSError) -> XrankError:
        """Return the error for a failure to read: of the file, or of the system, after which its bytes may be right."""
        code, text = _code(error), f"{problem}: {error.strerror or error}"
        if code in _OF_THE_FILE:
            return self.corrupt(text, got=code)
        next_step = f"{AGAIN}; if it fails again, look for a failing disk or server in the system's log"
        if code in ("EMFILE", "ENFILE"):
            next_step = f"raise the limit of open files (ulimit -n), then {AGAIN}"
        return self._make(XrankError, text, code, next_step=next_step)


class RegularFile(Struct, frozen=True):
    """An open regular file: valid only inside `open_regular`."""

    descriptor: int
    status: os.stat_result | ObjectStatus
    origin: Origin

    @property
    def nbytes(self) -> int:
        """Size of the file when it was opened, in bytes."""
        return self.status.st_size

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce small ranges (offset, bytes) that will be read, for files where each read takes long."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly that many bytes from an offset.

        Raises:
            CorruptError: the file is too short.
            XrankError: the system cannot read it now.
        """
        end = offset + nbytes
        # Check before allocating, so a false size allocates nothing.
        if end > self.nbytes:
            raise self.origin.corrupt("the file ends early", got=f"{self.nbytes} bytes", want=f"at least {end} bytes")
        parts: list[bytes] = []
        while offset < end:
            try:
                part = _retry(partial(system.read_bytes_at, self.descriptor, end - offset, offset))
            except OSError as error:
                raise self.origin.unreadable(f"cannot be read at byte {offset}", error) from error
            if not part:
                raise self.origin.corrupt(
                    "the file shrank while it was read", got=f"{offset} bytes", want=f"{end} bytes"
                )
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_regular(path: str, rank: int | None = None, *, follow_links: bool = True) -> Iterator[RegularFile]:
    """Open a regular file or an object for reading; refuse a FIFO, a device or a directory without waiting.

    Args:
        path: the file.
        rank: the rank that wrote it, for errors.
        follow_links: whether a link may stand for it.

    Raises:
        IncompleteError: there is no such file.
        UsageError: the file may not be read.
        CorruptError: it is not a regular file.
        XrankError: the system cannot open it now.
    """
    origin = Origin(path, rank)
    if is_url(path):
        from xrank.storage.object_file import open_object

        yield open_object(origin)
        return
    try:
        flags = system.READ if follow_links else system.READ | system.NO_LINK
        descriptor = _retry(partial(os.open, path, flags))  # of a FIFO, too, it returns at once
    except FileNotFoundError as error:
        step = "check the path, or wait until it is written"
        raise origin.incomplete("there is no such file", next_step=step) from error
    except PermissionError as error:
        step = "run as its owner, or let this user read it"
        raise origin.usage(f"cannot be opened: {error.strerror}", next_step=step) from error
    except ValueError as error:  # a NUL in the path
        raise origin.corrupt(f"cannot be opened: {error}") from error
    except OSError as error:
        raise origin.unreadable("cannot be opened", error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise origin.corrupt("is not a regular file", got=stat.filemode(status.st_mode), want="a regular file")
        yield RegularFile(descriptor, status, origin)
    finally:
        system.close_read(descriptor)


def _retry(read: Callable[[], _Result]) -> _Result:
    """Return the result of a read, repeated a few times after failures that may pass."""
    for seconds in _RETRY_SECONDS:
        try:
            return read()
        except OSError as error:
            if _code(error) not in _PASSING:
                raise
            time.sleep(seconds)
    return read()


def _code(error: OSError) -> str | None:
    return errno.errorcode.get(error.errno or 0)


def refuse_pointer(file: RegularFile) -> None:
    """Refuse a pointer of git-lfs in the place of a file.

    Raises:
        IncompleteError: it is one.
    """
    if file.nbytes >= len(LFS_MAGIC) and file.read(0, len(LFS_MAGIC)) == LFS_MAGIC:
        got, step = f"{file.nbytes} bytes that name the file", f"fetch the file (git lfs pull), then {AGAIN}"
        raise file.origin.incomplete("is a pointer of git-lfs, not the file itself", got, "the file", step)
