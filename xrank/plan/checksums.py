"""Checksums of source records, computed from the reads that a gather makes anyway.

Windows read a record in pieces, in any order and by several threads. CRC-32 values of neighbours can be combined: they
are joined as neighbours appear, and the value of a whole record is compared with the recorded one.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TypeAlias

import numpy as np
from isal import isal_zlib

from xrank.plan.buffers import Source
from xrank.plan.source import NO_CHECKSUM, RecordTable

BoolArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class JoinedCrc32:
    """The CRC-32 of a stretch of bytes, joined from the CRCs of its parts as neighbours appear."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._starts: list[int] = [] if nbytes else [0]  # rising; no two parts touch
        self._parts: dict[int, tuple[int, int]] = {} if nbytes else {0: (0, 0)}  # start -> (end, crc)

    def add(self, start: int, end: int, crc: int) -> None:
        """Add the CRC of bytes [start, end); a part that overlaps known bytes is left out."""
        starts, parts = self._starts, self._parts
        after = bisect_right(starts, start)
        # A part that overlaps a known one cannot be combined: CRC-32 has no subtraction. `missing` gets its new bytes.
        before_end = parts[starts[after - 1]][0] if after else -1
        if start == end or before_end > start or (after < len(starts) and starts[after] < end):
            return
        if after < len(starts) and starts[after] == end:
            after_end, after_crc = parts.pop(starts.pop(after))
            crc = isal_zlib.crc32_combine(crc, after_crc, after_end - end)
            end = after_end
        # Both neighbours may touch: the part after is joined already, so this joins all three.
        if before_end == start:
            start = starts[after - 1]
            crc = isal_zlib.crc32_combine(parts[start][1], crc, end - before_end)
        else:
            starts.insert(after, start)
        parts[start] = (end, crc)

    @property
    def value(self) -> int | None:
        """The CRC of all bytes; None while some are missing."""
        end, crc = self._parts.get(0, (-1, 0))
        return crc if end == self._nbytes else None

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """(start, end, CRC) of the known stretches, by rising start; no two touch."""
        return [(start, *self._parts[start]) for start in self._starts]

    def gaps(self) -> list[tuple[int, int]]:
        """Return (start, end) of the missing stretches."""
        found, position = [], 0
        for start in self._starts:
            if start > position:
                found.append((position, start))
            position = self._parts[start][0]
        return [*found, (position, self._nbytes)] if position < self._nbytes else found


class RecordChecksums:
    """The bytes of each record that have been read and checked.

    Args:
        records: the source's records.
        mismatch: called with (record, computed CRC) if that is not the recorded one.
        left_open: mask of records of which other ranks read parts too. Their CRCs are kept for `take_parts` and not
            compared. None: there are none.
    """

    def __init__(
        self, records: RecordTable, mismatch: Callable[[int, int], None], *, left_open: BoolArray | None = None
    ) -> None:
        self._nbytes = records.nbytes
        self._expected = records.crc32
        self._mismatch = mismatch
        self._left_open = left_open
        self._parts: dict[int, JoinedCrc32] = {}
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_checked(self) -> int:
        """Number of records whose every byte was compared with a recorded checksum."""
        return len(self._checked)

    def wants(self, record: int) -> bool:
        """Return whether a record has a checksum that was not compared yet."""
        return self._expected[record] != NO_CHECKSUM and record not in self._checked

    def add(self, record: int, start: int, data: memoryview) -> None:
        """Add bytes of a record that were read at `start`; bytes added twice count once."""
        # Spares the CRC of bytes that no checksum waits for.
        if not self.wants(record):
            return
        self.join(record, start, start + len(data), isal_zlib.crc32(data))

    def join(self, record: int, start: int, end: int, crc: int) -> None:
        """Add the CRC of a record's bytes [start, end); otherwise as `add`."""
        if not self.wants(record):
            return
        with self._lock:
            # Another thread may have finished the record since.
            if record in self._checked:
                return
            part = self._part(record)
            part.add(start, end, crc)  # an overlapping part is left out, and `missing` returns its bytes
            value = None if self._is_open(record) else part.value
            if value is None:
                return
            del self._parts[record]
            self._checked.add(record)
            # Counted before the comparison: a mismatch raises, and no other thread compares the record again.
            if value != self._expected[record]:
                self._mismatch(record, value)

    def _is_open(self, record: int) -> bool:
        return self._left_open is not None and bool(self._left_open[record])

    def _part(self, record: int) -> JoinedCrc32:
        part = self._parts.get(record)
        if part is None:
            part = self._parts[record] = JoinedCrc32(int(self._nbytes[record]))
        return part

    def missing(self, records: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (record, start, end) of all bytes of these records that were not added yet; open records excluded."""
        with self._lock:
            wanted = [record for record in records if self.wants(record) and not self._is_open(record)]
            return [(record, *gap) for record in wanted for gap in self._part(record).gaps()]

    def take_parts(self, records: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """Remove and return (record, start, end, CRC) of all parts of these records that were not compared."""
        with self._lock:
            known = [(record, self._parts.pop(record)) for record in records if record in self._parts]
        return [(record, *part) for record, parts in known for part in parts.parts]


def read_rest(checksums: RecordChecksums, source: Source, records: Iterable[int], staging: memoryview) -> None:
    """Read the bytes of these records that no window needed (padding, left-out parts), for their checksums.

    Raises:
        CorruptError: raised by the source, or by the checksums' `mismatch`.
    """
    for record, start, stop in checksums.missing(records):
        for position in range(start, stop, len(staging)):
            nbytes = min(len(staging), stop - position)
            checksums.add(record, position, source.fetch(record, position, nbytes, staging))
