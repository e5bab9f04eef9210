"""Read the structure of an object in a store like that of a file, by few requests.

Structure lies at both ends of a file, so the first read of an end brings 64 KiB. Parts that were read are kept, because
a checkpoint is recognised first and read then. Readers go from file to file: from the third one of a folder on, the
same end of the next ones is read at the same time.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from msgspec import Struct, field

from xrank.storage import places
from xrank.storage.client import ObjectStatus, ObjectStore
from xrank.storage.regular_file import Origin, RegularFile
from xrank.storage.stores import open_store
from xrank.storage.url import can_list

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
    """Parts of one object that were read."""

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

    def read(self, offset: int, nbytes: int) -> bytes:
        """Read exactly that many bytes from an offset.

        Raises:
            CorruptError: the object is too short.
            ContradictionError: it is another one by now.
            XrankError: the store does not give them.
        """
        end = offset + nbytes
        if end > self.nbytes:
            raise self.origin.corrupt("the file ends early", got=f"{self.nbytes} bytes", want=f"at least {end} bytes")
        if not nbytes:
            return b""
        part = _kept.find(self._identity, offset, end)
        return bytes(part if part is not None else self._fetch(offset, end)[:nbytes])

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
        with ThreadPoolExecutor(self.store.settings.connections) as pool:
            list(pool.map(lambda one: self._get(*one), joined))

    @property
    def _identity(self) -> tuple[str, ObjectStatus]:
        return self.origin.path, self.status

    def has_end(self, *, is_last: bool) -> bool:
        """Return whether the object's first byte, or its last one, is kept."""
        place = max(0, self.nbytes - 1) if is_last else 0
        return not self.nbytes or _kept.find(self._identity, place, place + 1) is not None

    def bring_end(self, *, is_last: bool) -> None:
        """Read the object's beginning, or its end, by one request, and keep it."""
        place = self.nbytes - 1 if is_last else 0
        self._get(*self._widen(place, place + 1), stop=_AT_ONCE)

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

    def _fetch(self, offset: int, end: int) -> memoryview:
        """Return the bytes from an offset on, at least up to `end`."""
        start, end = self._widen(offset, end)
        if start == 0 or end == self.nbytes:
            _read_ahead(self.origin.path, is_last=start > 0)
        part = _kept.find(self._identity, start, end)
        return (self._get(start, end) if part is None else part)[offset - start :]

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
    ahead = list(islice((file for file in files if not file.has_end(is_last=is_last)), _NUM_AHEAD))
    with ThreadPoolExecutor(_NUM_AHEAD) as pool:
        for one in [pool.submit(file.bring_end, is_last=is_last) for file in ahead]:
            one.exception()


def open_object(origin: Origin) -> ObjectFile:
    """Return an object of a store, opened; nothing has to be closed.

    Raises:
        IncompleteError: there is no such object.
        UsageError: it may not be read.
        XrankError: the store does not answer.
    """
    try:
        status = places.object_status(origin.path)
    except Exception as error:
        _name_rank(error, origin)
        raise
    store, key = open_store(origin.path)
    return ObjectFile(-1, status, origin, store, key)


def _name_rank(error: Exception, origin: Origin) -> None:
    from xrank.errors import XrankError

    if isinstance(error, XrankError) and origin.rank is not None:
        error.about(f"rank {origin.rank}", rank=origin.rank)
