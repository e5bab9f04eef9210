"""What sources share that make records of others: a layer, claims of threads, a scratch file, a stream."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from xrank.engine.buffers import OpenSource, Source
from xrank.environment import environ, scratch_folder
from xrank.errors import AGAIN, NoSpaceError, XrankError
from xrank.system import read_at, write_at

if TYPE_CHECKING:
    from xrank.engine.object_records import ObjectSource

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}
_Made = TypeVar("_Made")


class SourceLayer:
    """A source that makes some records of those of another source, which it closes."""

    def __init__(self, inner: OpenSource) -> None:
        self._inner = inner

    def read_into(self, record: int, start: int, into: memoryview) -> None:
        """Fill `into` with the record's bytes from `start` on."""
        raise NotImplementedError

    def fetch(self, record: int, start: int, nbytes: int, staging: memoryview) -> memoryview:
        """Read into the staging buffer and return the part that was filled."""
        self.read_into(record, start, staging[:nbytes])
        return staging[:nbytes]

    def check_unchanged(self) -> None:
        """Compare every file with its status at the reading of its metadata."""
        self._inner.check_unchanged()

    @property
    def objects(self) -> ObjectSource | None:
        """The objects in stores that it reads, if there are any."""
        return getattr(self._inner, "objects", None)

    def close(self) -> None:
        """Close all files; no read may be under way."""
        self._inner.close()


class RecordClaims:
    """Lets each record be made by one thread; a thread that waits for another's record makes one that comes next."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while what is made, or claimed, is looked at or changes."""
        self.claimed: set[int] = set()

    def bring(
        self, find: Callable[[], _Made | None], wanted: Callable[[], Iterable[int]], make: Callable[[int], None]
    ) -> _Made:
        """Return what `find` finds, after it was made by this thread or another.

        `wanted` returns records that are not made yet, the one that `find` looks for first; `make` makes one of them.
        Both `find` and `wanted` are called with the lock.
        """
        while True:
            with self.changed:
                found = find()
                if found is not None:
                    return found
                mine = next((record for record in wanted() if record not in self.claimed), None)
                if mine is None:
                    self.changed.wait()
                    continue
                self.claimed.add(mine)
            try:
                make(mine)
            finally:
                with self.changed:
                    self.claimed.discard(mine)  # after a failure, a thread that waits for it meets the error itself
                    self.changed.notify_all()


class ScratchFile:
    """A file without a name, on a disk, that goes away with the process; it is made at the first write.

    `folder` must exist by then; None: that of `scratch_folder`. `nbytes` is the most that may be written, `what` what
    happens in the file, in words.
    """

    def __init__(self, folder: str | None, nbytes: int, what: str) -> None:
        self._folder, self._nbytes, self._what = folder, nbytes, what
        self._descriptor: int | None = None
        self._close: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def write(self, data: memoryview, offset: int) -> None:
        """Put bytes at a place; NoSpaceError, or XrankError, that names the folder."""
        with self._explain_errors():
            descriptor = self._open()
            while data:
                written = write_at(descriptor, data, offset)
                data, offset = data[written:], offset + written

    def read_into(self, into: memoryview, offset: int) -> None:
        """Read bytes that were written."""
        while into:
            assert self._descriptor is not None, "nothing was written"
            count = read_at(self._descriptor, into, offset)
            into, offset = into[count:], offset + count

    def close(self) -> None:
        """Drop what was written; no call may be under way."""
        self._close()
        self._descriptor = None

    def _open(self) -> int:
        import tempfile  # most sources need none

        with self._lock:
            if self._descriptor is None:
                with tempfile.TemporaryFile(dir=self._find_folder()) as file:
                    self._descriptor = os.dup(file.fileno())
                self._close = weakref.finalize(self, os.close, self._descriptor)
            return self._descriptor

    def _find_folder(self) -> str:
        return self._folder or scratch_folder(environ())

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            folder = self._find_folder()
            what = f"{folder}: {os.strerror(error.errno or 0)}, where {self._what}"
            if error.errno in _NO_SPACE:
                want, next_step = f"{self._nbytes:,} bytes next to the output", f"free space there, then {AGAIN}"
                facts = {"needed_nbytes": self._nbytes}
                raise NoSpaceError(what, file=folder, want=want, next_step=next_step, **facts) from error
            next_step = f"set TMPDIR to a folder on a disk with room, then {AGAIN}"
            raise XrankError(what, file=folder, next_step=next_step) from error


class RecordStream:
    """The bytes of a record as a stream."""

    def __init__(self, source: Source, record: int, nbytes: int) -> None:
        self._source, self._record, self._nbytes = source, record, nbytes
        self._position = 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most so many; none at the end."""
        data = bytearray(min(size, self._nbytes - self._position))
        self._source.read_into(self._record, self._position, memoryview(data))
        self._position += len(data)
        return bytes(data)
