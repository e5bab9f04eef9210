"""The byte records that a model's pieces lie in, collected file by file, for every reader of torch archives."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from xrank.formats.torch_archive import TorchArchive
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile

__all__ = ["Records"]


class Records:
    """Files and records in the order in which they are taken; a million of them are four arrays."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self.bare: list[str] = []
        """Paths of files written without checksums."""
        self._columns = tuple(array("q") for _ in range(4))

    def file(self, archive: TorchArchive) -> Callable[[str], int]:
        """Take in a file; return what gives the index of the record with a key, taking it in at first use."""
        number = len(self.files)
        self.files.append(SourceFile.of(archive.path, archive.status))
        if not archive.has_checksums:
            self.bare.append(archive.path)
        known: dict[str, int] = {}

        def index(key: str) -> int:
            if key not in known:
                known[key] = len(self._columns[0])
                record = archive.records[key]
                crc32 = record.crc32 if archive.has_checksums else NO_CHECKSUM
                for column, value in zip(self._columns, (number, record.offset, record.nbytes, crc32), strict=True):
                    column.append(value)
            return known[key]

        return index

    @property
    def nbytes(self) -> int:
        """Bytes of all records taken in."""
        return sum(self._columns[2])

    def table(self) -> RecordTable:
        """Return all records."""
        return RecordTable(*(np.array(column, dtype=np.int64) for column in self._columns))
