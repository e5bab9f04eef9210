"""Byte records that contain a model's pieces, collected file by file from torch and safetensors files."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from xrank.errors import UnsafeError, option
from xrank.formats.regular_file import quote
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.words import plural

if TYPE_CHECKING:
    from xrank.formats.regular_file import RegularFile
    from xrank.formats.safetensors_header import HeaderTensor, SafetensorsHeader
    from xrank.formats.torch_archive import TorchArchive

_FOREIGN_NAMES = "foreign-names"
"""Code of the note on classes and functions that frameworks do not write into pickles."""


class Records:
    """Files and records in the order in which they were added, in four arrays even for a million records."""

    def __init__(self) -> None:
        self.files: list[SourceFile] = []
        self.bare: list[str] = []
        """Paths of torch files written without checksums."""
        self._foreign: dict[str, Mapping[tuple[str, str], int]] = {}
        self._file, self._offset, self._nbytes, self._crc32 = (array("q") for _ in range(4))

    def add_archive(self, archive: TorchArchive) -> Callable[[str], int]:
        """Add a file; return a function that gives the index of the record with a key, and adds it at first use."""
        number = len(self.files)
        self.files.append(SourceFile.from_status(archive.path, archive.status))
        if not archive.has_checksums:
            self.bare.append(archive.path)
        self._foreign[archive.path] = archive.foreign
        known: dict[str, int] = {}

        def index(key: str) -> int:
            if key not in known:
                record = archive.records[key]
                crc32 = record.crc32 if archive.has_checksums else NO_CHECKSUM
                known[key] = self._add(number, record.offset, record.nbytes, crc32)
            return known[key]

        return index

    def add_safetensors(self, header: SafetensorsHeader) -> Callable[[HeaderTensor], int]:
        """Add a file; return a function that adds the record of one of its tensors and gives its index."""
        number = len(self.files)
        self.files.append(SourceFile.from_status(header.path, header.status))
        return lambda tensor: self._add(
            number, header.data_start + tensor.start, tensor.end - tensor.start, NO_CHECKSUM
        )

    def _add(self, file: int, offset: int, nbytes: int, crc32: int) -> int:
        self._file.append(file)
        self._offset.append(offset)
        self._nbytes.append(nbytes)
        self._crc32.append(crc32)
        return len(self._file) - 1

    def read_bytes(self, record: int, file: RegularFile, nbytes: int) -> bytes:
        """Return the first bytes of a record, at most so many, from its open file."""
        return bytes(file.read(self._offset[record], min(nbytes, self._nbytes[record])))

    def path(self, record: int) -> str:
        """Return the path of the file that contains a record."""
        return self.files[self._file[record]].path

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return sum(self._nbytes)

    def notes(self) -> list[tuple[str, str]]:
        """Return notes on files without checksums, and on code that their pickles would run elsewhere."""
        return note_foreign_names(self._foreign) + note_bare_files(self.bare)

    def table(self) -> RecordTable:
        """Return all records."""
        return RecordTable(
            *(np.array(column, dtype=np.int64) for column in (self._file, self._offset, self._nbytes, self._crc32))
        )


def note_bare_files(paths: Sequence[str]) -> list[tuple[str, str]]:
    """Return a note on files without checksums, or none."""
    if not paths:
        return []
    text = (
        f"{plural(len(paths), 'file')} without checksums, {paths[0]} first; damage inside a tensor there can't be seen"
    )
    return [("no-checksums", text)]


def note_foreign_names(found: Mapping[str, Mapping[tuple[str, str], int]]) -> list[tuple[str, str]]:
    """Return a note on the classes and functions that frameworks do not write into pickles, or none.

    Args:
        found: path -> (module, name) -> the byte of the pickle that names it first (`Pickled.foreign`).
    """
    places = {name: (path, at) for path, names in reversed([*found.items()]) for name, at in names.items()}
    if not places:
        return []
    name, (path, at) = next(iter(places.items()))
    more = f" ({len(places)} such names in all)" if len(places) > 1 else ""
    text = (
        f"{path} names {quote('.'.join(name))[1:-1]} near byte {at} of its pickle{more}: xrank ran nothing and left "
        "its value out, but torch.load(weights_only=False) would run it"
    )
    return [(_FOREIGN_NAMES, text)]


def refuse_foreign_names(model: StoredModel) -> None:
    """Raise an error if the pickles of a source name classes or functions that frameworks do not write.

    Raises:
        UnsafeError: they do.
    """
    text = dict(model.notes).get(_FOREIGN_NAMES)
    if text is not None:
        raise UnsafeError(
            text,
            file=model.path,
            got="a name of code",
            want="names that frameworks write",
            next_step="have the file written again with tensors and plain values only, or, if you trust its writer, "
            f"leave out {option('strict_pickles')}",
        )
