"""The stores in which Orbax keeps arrays: one OCDBT store for all of them, or a folder of zarr for each."""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Protocol

from xrank import dtypes
from xrank.errors import AGAIN, IncompleteError
from xrank.formats.regular_file import Origin, open_regular, quote
from xrank.formats.zarr_array import ARRAY_FILES, MANIFEST, StoredValue, ZarrArray, parse_array, read_ocdbt
from xrank.stores import places

_RANK = re.compile(r"ocdbt\.process_(\d{1,9})/")
_MAX_METADATA_NBYTES = 1 << 20
_MAX_ARRAY_NBYTES = 1 << 62
_MAX_DIMS = 64
"""numpy's limit."""


class ArrayStore(Protocol):
    """Where the values of arrays lie, by the array's name and the key below it."""

    folder: str

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""

    def rank_of(self, value: StoredValue) -> int:
        """Return the process that wrote a value; 0 if it is not recorded."""


class OcdbtStore:
    """All arrays in one OCDBT store; the processes' own stores were merged into it."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._values = read_ocdbt(folder)

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""
        return self._values.get(f"{name}/{key}")

    @cached_property
    def _keys(self) -> Sequence[str]:
        return sorted(self._values)

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""
        return _below(self._keys, name)

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        return _arrays(self._keys)

    def rank_of(self, value: StoredValue) -> int:
        """Return the process that wrote a value; 0 if it is not recorded."""
        found = _RANK.match(value.file)
        return 0 if found is None else int(found[1])


class FolderStore:
    """A folder for each array, and in it a file for each chunk."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @cached_property
    def _sizes(self) -> Mapping[str, int]:
        """Path in the folder -> bytes, of all files; links to nothing and pipes have none."""
        found = {}
        for place, _, names in places.walk(self.folder, followlinks=True):
            for name in names:
                path = os.path.join(place, name)
                if places.exists(path):
                    found[os.path.relpath(path, self.folder)] = places.nbytes_of(path)
        return found

    def find(self, name: str, key: str) -> StoredValue | None:
        """Return the place of a value; None if there is none."""
        file = f"{name}/{key}"
        nbytes = self._sizes.get(file)
        return None if nbytes is None else StoredValue(file, 0, nbytes)

    @cached_property
    def _keys(self) -> Sequence[str]:
        return sorted(self._sizes)

    def keys(self, name: str) -> Iterator[str]:
        """Yield the keys below an array's name."""
        return _below(self._keys, name)

    def arrays(self) -> Iterator[str]:
        """Yield the names of all arrays."""
        return _arrays(self._keys)

    def rank_of(self, value: StoredValue) -> int:
        """Return 0: files of chunks do not record their process."""
        return 0


def _below(keys: Sequence[str], name: str) -> Iterator[str]:
    """Yield the rest of each key that begins with a name; keys are sorted."""
    start = f"{name}/"
    for at in range(bisect_left(keys, start), len(keys)):
        if not keys[at].startswith(start):
            return
        yield keys[at][len(start) :]


def _arrays(keys: Sequence[str]) -> Iterator[str]:
    """Yield the names of the arrays whose metadata lies among the keys."""
    for key in keys:
        name, _, last = key.rpartition("/")
        if name and last in ARRAY_FILES.values():
            yield name


def open_store(folder: str) -> ArrayStore:
    """Return the store in a tree's folder.

    Raises:
        IncompleteError: processes left stores that were never merged, or a file is missing.
        CorruptError, UnsafeError, UsageError: as `read_ocdbt`.
    """
    names = places.list_names(folder)
    if MANIFEST in names:
        return OcdbtStore(folder)
    parts = sorted(name for name in names if name.startswith("ocdbt.process_"))
    if parts:
        raise IncompleteError(
            f"{os.path.join(folder, MANIFEST)} is missing: the processes' parts were not merged, or not all was copied",
            file=os.path.join(folder, MANIFEST),
            got=", ".join(parts[:5]),
            want=f"{MANIFEST}, which Orbax writes last",
            next_step=f"copy the checkpoint whole from where it was written, then {AGAIN}; or take another step",
        )
    return FolderStore(folder)


def read_array(store: ArrayStore, name: str) -> ZarrArray | None:
    """Return an array as its metadata describes it; None if the store does not contain it.

    Raises:
        CorruptError, UsageError: as `parse_array`; errors of reading the file.
    """
    for is_zarr3, key in ARRAY_FILES.items():
        value = store.find(name, key)
        if value is None:
            continue
        path = os.path.join(store.folder, value.file)
        origin = Origin(path)
        text = value.data
        if text is None:
            if value.nbytes > _MAX_METADATA_NBYTES:
                raise origin.corrupt("is too large", got=f"{value.nbytes:,} bytes")
            with open_regular(path) as file:
                text = file.read(value.offset, value.nbytes)
        array = parse_array(name, text, origin, is_zarr3=is_zarr3)
        _check_extent(name, array, origin)
        return array
    return None


def _check_extent(name: str, array: ZarrArray, origin: Origin) -> None:
    """Check that the numbers of an array's elements and of a chunk's are possible, also where a dim is 0."""
    most = max(prod(max(n, 1) for n in shape) for shape in (array.shape, array.grid_shape, array.chunk_shape))
    if len(array.shape) > _MAX_DIMS or most > _MAX_ARRAY_NBYTES // dtypes.dtype(array.dtype).nbytes:
        raise origin.corrupt(
            f"the metadata of {quote(name)} claims an array that cannot be",
            got=f"shape {quote(str(list(array.shape)))[1:-1]} in chunks of {quote(str(list(array.grid_shape)))[1:-1]}",
            want=f"at most {_MAX_DIMS} dims and {_MAX_ARRAY_NBYTES:,} bytes",
        )
