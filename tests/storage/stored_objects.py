"""Objects and unfinished uploads that the small S3 server keeps."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate


class Joined:
    """The bytes of an object's parts, one after the other, without a copy of them."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, wanted: slice) -> memoryview:
        start, stop, _ = wanted.indices(len(self))
        found = []
        while start < stop:
            index = bisect_right(self._ends, start)
            begin = self._ends[index] - len(self._parts[index])
            found.append(self._parts[index][start - begin : stop - begin])
            start = self._ends[index]
        return found[0] if len(found) == 1 else memoryview(b"".join(found))


@dataclass
class StoredObject:
    """An object, as readers see it."""

    body: memoryview | Joined
    etag: str
    metadata: dict[str, str] = field(default_factory=dict)
    modified: str = field(default_factory=lambda: formatdate(usegmt=True))
    crc32: str = ""
    """A part of an upload."""


@dataclass
class Upload:
    """A multipart upload that is neither completed nor aborted: readers do not see it."""

    bucket: str
    key: str
    metadata: dict[str, str]
    parts: dict[int, StoredObject] = field(default_factory=dict)
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
