"""A regular file held open while its structure is read, and the errors that name it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from xrank.errors import CorruptError, IncompleteError, UnsafeError, UsageError

__all__ = ["Origin", "RegularFile", "open_regular", "shown"]


def shown(value: str | bytes | int | tuple[int, ...]) -> str:
    """Return a value taken from a file so that a message may hold it: short, ASCII, nothing a terminal obeys."""
    # Cut first: printing must not cost more than reading did.
    text = ascii(value[:200] if isinstance(value, (str, bytes, tuple)) else value)
    return text if len(text) <= 200 else text[:200] + "..."


@dataclass(frozen=True, slots=True)
class Origin:
    """Where bytes came from: makes the errors that name it."""

    path: str
    rank: int | None = None

    @property
    def name(self) -> str:
        """The file and its rank, as messages begin."""
        return self.path if self.rank is None else f"rank {self.rank}: {self.path}"

    def named(self, what: str) -> str:
        """Return a message that names the file."""
        return f"{self.name}: {what}"

    def _again(self) -> str:
        who = "it" if self.rank is None else f"rank {self.rank}'s file"
        return f"copy {who} again from where it was written, or have it written again"

    def corrupt(self, what: str, *, got: str | None = None, want: str | None = None) -> CorruptError:
        """Return the error for bytes that are not what they were written as."""
        return CorruptError(
            self.named(what), file=self.path, rank=self.rank, got=got, want=want, next_step=self._again()
        )

    def unsafe(self, what: str, *, got: str | None = None) -> UnsafeError:
        """Return the error for a pickle that asks for more than data."""
        return UnsafeError(
            self.named(what),
            file=self.path,
            rank=self.rank,
            got=got,
            want="plain values and tensors",
            next_step="save tensors and plain Python values only (a state_dict), not objects",
        )

    def usage(self, what: str, *, got: str | None = None, want: str | None = None, next_step: str) -> UsageError:
        """Return the error for a sound file that xrank does not take."""
        return UsageError(self.named(what), file=self.path, rank=self.rank, got=got, want=want, next_step=next_step)


@dataclass(frozen=True, slots=True)
class RegularFile:
    """An open regular file: valid only inside `open_regular`."""

    descriptor: int
    status: os.stat_result
    origin: Origin

    @property
    def nbytes(self) -> int:
        """Return the file's size when it was opened."""
        return self.status.st_size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Return exactly that many bytes from that offset on.

        Raises:
            CorruptError: the file ends before them, or the disk fails to give them.
        """
        end = offset + nbytes
        # Asked before anything is allocated: a claimed size costs nothing until the file can hold it.
        if end > self.nbytes:
            raise self.origin.corrupt("the file ends early", got=f"{self.nbytes} bytes", want=f"at least {end} bytes")
        parts: list[bytes] = []
        while offset < end:
            try:
                part = os.pread(self.descriptor, end - offset, offset)
            except OSError as error:
                raise self.origin.corrupt(f"cannot be read at byte {offset}: {error.strerror}") from error
            if not part:
                raise self.origin.corrupt(
                    "the file shrank while it was read", got=f"{offset} bytes", want=f"{end} bytes"
                )
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_regular(path: str, rank: int | None = None) -> Iterator[RegularFile]:
    """Open a regular file for reading; refuse a FIFO, a device or a directory without waiting for it.

    Raises:
        IncompleteError: there is no such file.
        UsageError: the file may not be read.
        CorruptError: what lies there is no regular file.
    """
    origin = Origin(path, rank)
    try:
        # O_NONBLOCK: opening a FIFO that nobody writes would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise IncompleteError(
            origin.named("there is no such file"),
            file=path,
            rank=rank,
            next_step="check the path, or wait until it is written",
        ) from error
    except PermissionError as error:
        raise origin.usage(
            f"cannot be opened: {error.strerror}", next_step="run as its owner, or let this user read it"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise origin.corrupt(f"cannot be opened: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise origin.corrupt("is no regular file", got=stat.filemode(status.st_mode), want="a regular file")
        yield RegularFile(descriptor, status, origin)
    finally:
        os.close(descriptor)
