"""Checksums of source records, gathered from the reads that a gather makes anyway.

Windows read a record in pieces, in any order and by several threads. CRC-32 combines: the pieces' values are joined as
neighbours appear, and a record whose pieces have become one is compared with what its format recorded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from isal import isal_zlib

from xrank.plan.source import NO_CHECKSUM, RecordTable

__all__ = ["RecordChecksums"]


class RecordChecksums:
    """Knows for each record which bytes have been checked; `mismatch` is called with (record, computed CRC)."""

    def __init__(self, records: RecordTable, mismatch: Callable[[int, int], None]) -> None:
        self._nbytes = records.nbytes
        self._expected = records.crc32
        self._mismatch = mismatch
        self._starts: dict[int, dict[int, tuple[int, int]]] = {}  # record -> start -> (end, crc)
        self._ends: dict[int, dict[int, int]] = {}  # record -> end -> start
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
            if record not in self._checked:
                self._insert(record, start, start + len(data), crc)

    def _insert(self, record: int, start: int, end: int, crc: int) -> None:
        starts, ends = self._starts.setdefault(record, {}), self._ends.setdefault(record, {})
        if any(a < end and start < b for a, (b, _) in starts.items()):
            return  # overlaps what is known: leave the rest to `missing`
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
        if start == 0 and end == self._nbytes[record]:
            del self._starts[record], self._ends[record]
            self._checked.add(record)
            if crc != self._expected[record]:
                self._mismatch(record, crc)

    def missing(self, records: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (record, start, end) of all bytes of these records that have not been added yet."""
        gaps = []
        with self._lock:
            for record in records:
                if not self.wants(record):
                    continue
                position, total = 0, int(self._nbytes[record])
                for start, (end, _) in sorted(self._starts.get(record, {}).items()):
                    if start > position:
                        gaps.append((record, position, start))
                    position = end
                if position < total:
                    gaps.append((record, position, total))
        return gaps
