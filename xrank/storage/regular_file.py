"""Read the structure of a regular file or of an object in a store, and make the errors that name it.

Structure lies at both ends of an object, so the first read of an end brings 64 KiB. Parts that were read are kept,
because a checkpoint is recognized first and read then. Readers go from file to file: from the third one of a folder on,
the same end of the next ones is read at the same time.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures  # loads threads and queues at first use
from contextlib import contextmanager
from functools import partial, partialmethod
from itertools import islice
from typing import Any, ClassVar, TypeVar

from msgspec import Struct, field

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
    make_sentence,
)
from xrank.storage import places
from xrank.storage.client import ObjectStatus, ObjectStore
from xrank.storage.places import open_store
from xrank.storage.url import can_list, is_url
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
        """Return a message with the rank and the path before the problem, which may begin with its verb."""
        return make_sentence(self.name, problem)

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
        step = next_step
        if step is None and kind is CorruptError:
            file = "it" if self.rank is None else f"rank {self.rank}'s file"
            step = f"copy {file} again from where it was written, or write it again"
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
        next_step = f"{AGAIN}; if it fails again, check the system's log for a failing disk or server"
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

        CorruptError if the file is too short; ContradictionError if an object is another one by now; XrankError if the
        system or the store does not give them.
        """
        end = offset + nbytes
        # Check before allocating, so a false size allocates nothing.
        if end > self.nbytes:
            raise self.origin.corrupt("the file ends early", got=f"{self.nbytes} bytes", want=f"at least {end} bytes")
        return self._read(offset, end)

    def _read(self, offset: int, end: int) -> bytes:
        parts: list[bytes] = []
        while offset < end:
            try:
                part = _retry(system.read_bytes_at, self.descriptor, end - offset, offset)
            except OSError as error:
                raise self.origin.unreadable(f"cannot be read at byte {offset}", error) from error
            if not part:
                what = "the file shrank while it was read"
                raise self.origin.corrupt(what, got=f"{offset} bytes", want=f"{end} bytes")
            parts.append(part)
            offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@contextmanager
def open_regular(path: str, rank: int | None = None, *, follow_links: bool = True) -> Iterator[RegularFile]:
    """Open a regular file or an object for reading; errors name the rank that wrote it.

    IncompleteError if there is no such file; UsageError if it may not be read; CorruptError, without waiting, for a
    FIFO, a device or a folder; XrankError if the system cannot open it now.
    """
    origin = Origin(path, rank)
    if is_url(path):
        yield open_object(origin)
        return
    try:
        flags = system.READ if follow_links else system.READ | system.NO_LINK
        descriptor = _retry(os.open, path, flags)  # of a FIFO, too, it returns at once
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


def _retry(read: Callable[..., _Result], *arguments: object) -> _Result:
    """Return the result of a read, repeated a few times after failures that may pass."""
    for seconds in _RETRY_SECONDS:
        try:
            return read(*arguments)
        except OSError as error:
            if _code(error) not in _PASSING:
                raise
            time.sleep(seconds)
    return read(*arguments)


def _code(error: OSError) -> str | None:
    return errno.errorcode.get(error.errno or 0)


def refuse_pointer(file: RegularFile) -> None:
    """Refuse a pointer of git-lfs in the place of a file."""
    if file.nbytes >= len(LFS_MAGIC) and file.read(0, len(LFS_MAGIC)) == LFS_MAGIC:
        got, step = f"{file.nbytes} bytes that name the file", f"fetch the file (git lfs pull), then {AGAIN}"
        raise file.origin.incomplete("is a pointer of git-lfs, not the file itself", got, "the file", step)


_END_NBYTES = 64 << 10
_WHOLE_NBYTES = 256 << 10
"""Objects up to this size are read at once."""
_LEAST_NBYTES = 4 << 10
_GAP_NBYTES = 16 << 10
"""Announced ranges that are closer than this are read together."""
_KEPT_NBYTES = 16 << 20
_FROM_FILE = 3
_NUM_AHEAD = 16
_MOST_FOLDERS = 64


class _Parts(Struct):
    starts: list[int] = field(default_factory=list)
    """First bytes of the parts, rising."""
    data: dict[int, memoryview] = field(default_factory=dict)
    """First byte -> part."""
    nbytes: int = 0

    def find(self, start: int, end: int) -> memoryview | None:
        # A later part may be inside of an earlier one: look at a few.
        at = bisect_right(self.starts, start)
        for first in reversed(self.starts[max(0, at - 4) : at]):
            part = self.data[first]
            if end <= first + len(part):
                return part[start - first : end - first]
        return None

    def add(self, start: int, part: memoryview) -> int:
        old = self.data.get(start)
        if old is not None and len(old) >= len(part):
            return 0
        if old is None:
            insort(self.starts, start)
        self.data[start] = part
        added = len(part) - (0 if old is None else len(old))
        self.nbytes += added
        return added


class _Kept:
    """Parts of all objects, up to a number of bytes; those of the object used longest ago are dropped first."""

    def __init__(self) -> None:
        self._objects: OrderedDict[tuple[str, ObjectStatus], _Parts] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def find(self, key: tuple[str, ObjectStatus], start: int, end: int) -> memoryview | None:
        with self._lock:
            parts = self._objects.get(key)
            if parts is None:
                return None
            self._objects.move_to_end(key)
            return parts.find(start, end)

    def add(self, key: tuple[str, ObjectStatus], start: int, part: memoryview) -> None:
        with self._lock:
            self._nbytes += self._objects.setdefault(key, _Parts()).add(start, part)
            self._objects.move_to_end(key)
            while self._nbytes > _KEPT_NBYTES:
                self._nbytes -= self._objects.popitem(last=False)[1].nbytes


_kept = _Kept()
_alone: OrderedDict[tuple[str, str, bool], int] = OrderedDict()
"""(Folder, ending of the names, whether it is the files' last bytes) -> number of reads that found nothing kept."""
_counting = threading.Lock()
_AT_ONCE = threading.Event()
"""Ends the repetitions of a request."""
_AT_ONCE.set()


class ObjectFile(RegularFile, frozen=True):
    """An object as `RegularFile`; each read is of the version that was there when it was opened."""

    status: ObjectStatus
    store: ObjectStore
    key: str

    def _read(self, offset: int, end: int) -> bytes:
        part = _kept.find(self._identity, offset, end) if offset < end else memoryview(b"")
        if part is None:
            start, stop = self._widen(offset, end)
            if start == 0 or stop == self.nbytes:
                _read_ahead(self.origin.path, is_last=start > 0)
            part = _kept.find(self._identity, start, stop)
            part = (self._get(start, stop) if part is None else part)[offset - start : end - start]
        return bytes(part)

    def prefetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read small ranges (offset, bytes), many at once, and keep them for `read`."""
        joined: list[list[int]] = []
        for offset, nbytes in sorted(ranges):
            end = min(offset + nbytes, self.nbytes)
            if end <= offset or _kept.find(self._identity, offset, end) is not None:
                continue
            if joined and offset - joined[-1][1] <= _GAP_NBYTES:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([offset, end])
        if len(joined) < 2:
            return
        with futures.ThreadPoolExecutor(self.store.settings.connections) as pool:
            list(pool.map(lambda one: self._get(*one), joined))

    @property
    def _identity(self) -> tuple[str, ObjectStatus]:
        return self.origin.path, self.status

    def bring_end(self, *, is_last: bool) -> Callable[[], object] | None:
        """Return a read of the beginning or end in one request; None if that is kept, or the object is empty."""
        place = self.nbytes - 1 if is_last else 0
        if not self.nbytes or _kept.find(self._identity, place, place + 1) is not None:
            return None
        return partial(self._get, *self._widen(place, place + 1), stop=_AT_ONCE)

    def _widen(self, start: int, end: int) -> tuple[int, int]:
        """Return the range that one request reads for a wanted one."""
        total = self.nbytes
        if total <= _WHOLE_NBYTES:
            return 0, total
        if start < _END_NBYTES:
            return 0, max(end, _END_NBYTES)
        if end > total - _END_NBYTES:
            return min(start, total - _END_NBYTES), total
        return start, min(total, max(end, start + _LEAST_NBYTES))

    def _get(self, start: int, end: int, *, stop: threading.Event | None = None) -> memoryview:
        try:
            part = self.store.read(self.key, start, end - start, self.status, stop=stop)
        except Exception as error:
            _name_rank(error, self.origin)
            raise
        if len(part) <= _KEPT_NBYTES // 4:
            _kept.add(self._identity, start, part)
        return part


def _read_ahead(path: str, *, is_last: bool) -> None:
    """Read the same end of a file and of the next ones in its folder, once some were read one by one.

    Failures are left to the reads of those files.
    """
    if not can_list(path):
        return
    folder, name = os.path.split(path)
    ending = os.path.splitext(name)[1]
    with _counting:
        count = _alone[folder, ending, is_last] = _alone.pop((folder, ending, is_last), 0) + 1
        while len(_alone) > _MOST_FOLDERS:
            _alone.popitem(last=False)
    if count < _FROM_FILE:
        return
    names = sorted(one for one in places.list_names(folder) if one.endswith(ending))
    at = bisect_left(names, name)
    paths = [f"{folder}/{one}" for one in [*names[at:], *names[:at]]]
    files = (open_object(Origin(one)) for one in paths if places.is_file(one))
    ahead = list(islice(filter(None, (file.bring_end(is_last=is_last) for file in files)), _NUM_AHEAD))
    with futures.ThreadPoolExecutor(_NUM_AHEAD) as pool:
        for one in [pool.submit(read) for read in ahead]:
            one.exception()


def open_object(origin: Origin) -> ObjectFile:
    """Return an object of a store, opened; nothing has to be closed. Errors as of `open_regular`."""
    try:
        status = places.object_status(origin.path)
    except Exception as error:
        _name_rank(error, origin)
        raise
    store, key = open_store(origin.path)
    return ObjectFile(-1, status, origin, store, key)


def _name_rank(error: Exception, origin: Origin) -> None:
    if isinstance(error, XrankError) and origin.rank is not None:
        error.about(f"rank {origin.rank}", rank=origin.rank)
