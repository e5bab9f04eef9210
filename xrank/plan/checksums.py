"""Checksums of source records, gathered from the reads that a gather makes anyway.

Windows read a record in pieces, in any order and by several threads. CRC-32 combines: the pieces' values are joined as
neighbours appear, and a record whose pieces have become one is compared with what its format recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from isal import isal_zlib

from xrank.plan.source import NO_CHECKSUM, RecordTable

__all__ = ["JoinedCrc32", "RecordChecksums"]


class JoinedCrc32:
    """The CRC-32 of a stretch of bytes, joined of the CRCs of its parts as neighbours appear."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._starts: dict[int, tuple[int, int]] = {} if nbytes else {0: (0, 0)}  # start -> (end, crc)
        self._ends: dict[int, int] = {}  # end -> start

    def add(self, start: int, end: int, crc: int) -> None:
        """Take in the CRC of bytes [start, end); bytes that overlap what is known are left out."""
        starts, ends = self._starts, self._ends
        if any(a < end and start < b for a, (b, _) in starts.items()):
            return
        if start in ends:
            before = ends.pop(start)
            _, before_crc = starts.pop(before)
            crc = isal_zlib.crc32_combine(before_crc, crc, end - start)
            start = before
        if end in starts:
            after_end, after_crc = starts.pop(end)
            ends.pop(after_end)
            crc = isal_zlib.crc32_combine(crc, after_crc, after_end - end)
            end = after_end
        starts[start] = (end, crc)
        ends[end] = start

    @property
    def value(self) -> int | None:
        """The CRC of all bytes; None while some are missing."""
        end, crc = self._starts.get(0, (-1, 0))
        return crc if end == self._nbytes else None

    def gaps(self) -> list[tuple[int, int]]:
        """Return (start, end) of what is missing."""
        found, position = [], 0
        for start, (end, _) in sorted(self._starts.items()):
            if start > position:
                found.append((position, start))
            position = end
        return [*found, (position, self._nbytes)] if position < self._nbytes else found


class RecordChecksums:
    """Knows for each record which bytes have been checked; `mismatch` is called with (record, computed CRC)."""

    def __init__(self, records: RecordTable, mismatch: Callable[[int, int], None]) -> None:
        self._nbytes = records.nbytes
        self._expected = records.crc32
        self._mismatch = mismatch
        self._parts: dict[int, JoinedCrc32] = {}
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_checked(self) -> int:
        """Number of records whose every byte was compared with a recorded checksum."""
        return len(self._checked)

    def wants(self, record: int) -> bool:
        """Say whether a record has a checksum that is not yet compared."""
        return self._expected[record] != NO_CHECKSUM and record not in self._checked

    def add(self, record: int, start: int, data: memoryview) -> None:
        """Take in bytes of a record that were read at `start`; bytes seen before count once."""
        if not self.wants(record):
            return
        crc = isal_zlib.crc32(data)
        with self._lock:
            if record in self._checked:
                return
            part = self._part(record)
            part.add(start, start + len(data), crc)  # what it leaves out is left to `missing`
            value = part.value
            if value is None:
                return
            del self._parts[record]
            self._checked.add(record)
            if value != self._expected[record]:
                self._mismatch(record, value)

    def _part(self, record: int) -> JoinedCrc32:
        part = self._parts.get(record)
        if part is None:
            part = self._parts[record] = JoinedCrc32(int(self._nbytes[record]))
        return part

    def missing(self, records: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (record, start, end) of all bytes of these records that have not been added yet."""
        with self._lock:
            return [(record, *gap) for record in records if self.wants(record) for gap in self._part(record).gaps()]
