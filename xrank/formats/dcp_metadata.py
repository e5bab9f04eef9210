"""Read the ``.metadata`` of a torch DCP checkpoint: its tensors, and the shapes and places of their pieces.

The classes are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py: _StorageInfo``, of torch 2.1
to 2.13. torch is not imported, and the pickle calls nothing.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from xrank.errors import XrankError
from xrank.formats.dcp_metadata_pickle import ChunkRun, EntryRun, EntryTable, MetadataMachine
from xrank.formats.inert_record import InertRecord
from xrank.formats.pickle_machine import PROTOCOL, STOP
from xrank.formats.pickle_reader import run_machine
from xrank.formats.pickled_names import is_known
from xrank.formats.regular_file import Origin, open_regular, quote, refuse_pointer
from xrank.layout.nest_table import IntArray
from xrank.stores.backend import ObjectStatus

MAX_METADATA_NBYTES = 1 << 32
"""Largest ``.metadata`` that is read, in bytes; a piece of a tensor takes about 200."""

_MAX_EXTENT = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class DcpTensor:
    """One tensor and its n saved pieces, sorted by offsets, without empty pieces."""

    name: str
    """Flat name: torch joins the keys of nested dicts."""
    dtype: str
    """torch's name without the module: ``bfloat16``."""
    shape: tuple[int, ...]
    """Global shape, d dimensions."""
    offsets: IntArray
    """First index of each piece in each dimension, [n, d]."""
    sizes: IntArray
    """Size of each piece in each dimension, [n, d]."""
    file: IntArray
    """Index into `DcpMetadata.files`, [n]."""
    start: IntArray
    """First byte of each item in its file, [n]."""
    nbytes: IntArray
    """Bytes of each item, [n]; more than the piece's, because an item is a whole ``torch.save`` archive."""


@dataclass(frozen=True, slots=True, eq=False)
class DcpMetadata:
    """The content of a ``.metadata``; all numbers in it are counts of at most 63 bits."""

    path: str
    status: os.stat_result | ObjectStatus
    version: str | None
    """Version of the format; None before torch 2.7."""
    files: tuple[str, ...]
    """Relative paths in its entries, unchecked."""
    ends: IntArray
    """The byte after each file's last item, empty pieces included."""
    tensors: Mapping[str, DcpTensor]
    nbytes: int
    """Bytes of all items, empty pieces included."""
    byte_items: Mapping[str, tuple[int, int, int]]
    """Flat name of each value that is not a tensor -> (index into `files`, first byte, bytes) of its item."""
    paths: Mapping[str, tuple[str | int, ...]] | None
    """Flat name -> the keys of the nested dicts that lead to it (``planner_data``); None if they are not recorded."""
    foreign: Mapping[tuple[str, str], int]
    """Classes in the pickle that frameworks do not write (`xrank.formats.pickled_names`)."""


def read_metadata(path: str) -> DcpMetadata:
    """Read a ``.metadata``.

    Raises:
        IncompleteError: there is no such file.
        CorruptError: it is damaged, or its parts contradict each other.
        UnsafeError: it needs code to run.
        UsageError: its pieces are sparse, or a transform (compression) changed them.
    """
    with open_regular(path) as file:
        refuse_pointer(file)
        origin = file.origin
        if file.nbytes > MAX_METADATA_NBYTES:
            raise origin.corrupt("is too long", got=f"{file.nbytes} bytes", want=f"{MAX_METADATA_NBYTES} at most")
        if file.nbytes == 0:
            raise origin.corrupt("is empty", got="0 bytes", want="the pickled metadata of a checkpoint")
        # A false file may be long and empty (sparse): look at its ends before reading it.
        if file.read(0, 1) != PROTOCOL or file.read(file.nbytes - 1, 1) != bytes([STOP]):
            raise origin.corrupt("is not a whole pickle", want="the pickled metadata of a checkpoint")
        status = file.status
        with _pause_collector():
            machine = MetadataMachine(file.read(0, file.nbytes), origin)
            value = run_machine(machine)
            # The memo takes some hundred MB for a million pieces, and the arrays do not need it.
            machine.forget()
            try:
                return _Metadata(machine, origin).read(value, path, status)
            except XrankError:
                raise
            except (ValueError, TypeError, OverflowError) as error:
                raise origin.corrupt("the metadata is damaged", got=f"{type(error).__name__}: {error}") from error


@contextmanager
def _pause_collector() -> Iterator[None]:
    """Stop the search for cycles among millions of objects without any, which doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Metadata:
    """Makes arrays from the tables and values of the machine."""

    def __init__(self, machine: MetadataMachine, origin: Origin) -> None:
        self.machine = machine
        self.origin = origin
        self.byte_items: dict[str, tuple[int, int, int]] = {}

    def read(self, value: object, path: str, status: os.stat_result | ObjectStatus) -> DcpMetadata:
        state = self.state(value, "Metadata")
        stored = state.get("storage_data")
        listed = state.get("state_dict_metadata")
        if not isinstance(stored, dict) or not isinstance(listed, dict) or "planner_data" not in state:
            raise self.origin.corrupt("the metadata lists no tensors, or not where they are stored")
        self.take_entries(stored)
        nbytes = sum(item[2] for item in self.byte_items.values()) + sum(
            sum(t.places[2::3]) for t in self.machine.tables.values()
        )
        ends = self.ends()
        tensors = {}
        for name, item in listed.items():
            if not isinstance(name, str):
                raise self.origin.corrupt("a tensor's name is not a text", got=type(name).__name__)
            if isinstance(item, InertRecord) and item.name == "BytesStorageMetadata":
                if name not in self.byte_items:
                    raise self.corrupt(name, "is listed, but stored nowhere")
                continue
            tensors[name] = self.tensor(name, item)
            self.machine.tables.pop(name, None)
        for name in (*self.machine.tables, *self.byte_items):
            if name not in listed:
                raise self.corrupt(name, "is stored, but not listed")
        version = state.get("version")
        return DcpMetadata(
            path,
            status,
            version if isinstance(version, str) else None,
            tuple(self.machine.files),
            ends,
            MappingProxyType(tensors),
            nbytes,
            MappingProxyType(self.byte_items),
            self.paths(state.get("planner_data"), listed),
            {name: at for name, at in self.machine.named.items() if not is_known(name)},
        )

    def corrupt(self, name: str, problem: str, *, got: str | None = None, want: str | None = None) -> XrankError:
        error = self.origin.corrupt(f"{quote(name)[1:-1]} {problem}", got=got, want=want)
        error.about(tensor=name)
        return error

    def state(self, value: object, kind: str) -> dict[str, object]:
        """Return the fields of an instance of that class."""
        state = value.state if isinstance(value, InertRecord) and value.name == kind and value.args == () else None
        if not isinstance(state, dict):
            raise self.origin.corrupt("the pickle holds an unexpected value", want=f"a {kind}")
        return state

    # ---- where pieces are stored

    def take_entries(self, stored: dict[object, object]) -> None:
        """Add the entries that the plain machine read to the tables of matched entries."""
        num_matched = 0
        for index, info in stored.items():
            if isinstance(index, EntryRun):
                num_matched += index.count
                continue
            key, place = self.state(index, "MetadataIndex"), self.state(info, "_StorageInfo")
            name, offset = key.get("fqn"), key.get("offset")
            path, start, nbytes = (place.get(field) for field in ("relative_path", "offset", "length"))
            if not isinstance(name, str) or not isinstance(path, str):
                raise self.origin.corrupt("an entry of storage lacks its name or its file")
            if place.get("transform_descriptors"):
                raise self.origin.usage(
                    f"{quote(name)[1:-1]} was stored through a transform",
                    got=quote(str(place["transform_descriptors"])),
                    want="plain bytes",
                    next_step="save the checkpoint again without extensions",
                )
            first, size = (self.count(part, name) for part in (start, nbytes))
            file = self.machine.files.setdefault(path, len(self.machine.files))
            if offset is None:
                if name in self.byte_items:
                    raise self.corrupt(name, "is stored twice")
                self.byte_items[name] = (file, first, size)
                continue
            low = self.counts(offset, name)
            table = self.machine.tables.setdefault(name, EntryTable(8 * len(low)))
            if table.width != 8 * len(low):
                raise self.corrupt(name, "has pieces of different numbers of dimensions")
            table.offsets += np.array(low, dtype=np.int64).tobytes()
            table.places.extend((file, first, size))
        if num_matched != self.machine.num_matched_entries:
            raise self.origin.corrupt("entries of storage are in a wrong place")

    def ends(self) -> IntArray:
        """Return the length that each file must have to hold its items."""
        ends = np.zeros(len(self.machine.files), dtype=np.int64)
        for table in self.machine.tables.values():
            file, start, nbytes = np.frombuffer(table.places, dtype=np.int64).reshape(-1, 3).T
            np.maximum.at(ends, file, np.minimum(start, _MAX_EXTENT - nbytes) + nbytes)
        for number, first, size in self.byte_items.values():
            ends[number] = max(ends[number], min(first + size, _MAX_EXTENT))
        return ends

    def count(self, value: object, name: str) -> int:
        if type(value) is not int or not 0 <= value <= _MAX_EXTENT:
            raise self.corrupt(name, "has an offset or a length that is not a count")
        return value

    def counts(self, value: object, name: str) -> tuple[int, ...]:
        if not isinstance(value, tuple):
            raise self.corrupt(name, "has offsets or sizes that are not a tuple", got=type(value).__name__)
        return tuple(self.count(part, name) for part in value)

    # ---- tensors

    def tensor(self, name: str, item: object) -> DcpTensor:
        state = self.state(item, "TensorStorageMetadata")
        shape = self.counts(state.get("size"), name)
        offsets, sizes = self.chunks(name, state.get("chunks"), len(shape))
        table = self.machine.tables.get(name) or EntryTable(8 * len(shape))
        if table.width != 8 * len(shape):
            raise self.corrupt(name, "is stored in pieces of another number of dimensions than it has")
        places = np.frombuffer(table.places, dtype=np.int64).reshape(-1, 3)
        stored = np.frombuffer(table.offsets, dtype=np.int64).reshape(len(places), len(shape))
        order = _sort_by_offset(stored)
        stored, places = stored[order], places[order]
        if len(stored) != len(offsets) or not np.array_equal(stored, offsets):
            raise self.mismatch(name, offsets, stored)
        if len(stored) > 1 and not (stored[1:] != stored[:-1]).any(axis=1).all():
            raise self.corrupt(name, "has two pieces at one place")
        keep = (sizes > 0).all(axis=1)
        return DcpTensor(
            name,
            self.dtype(name, state.get("properties")),
            shape,
            *(column[keep] for column in (offsets, sizes)),
            *(np.ascontiguousarray(places[keep, column]) for column in range(3)),
        )

    def chunks(self, name: str, listed: object, num_dims: int) -> tuple[IntArray, IntArray]:
        """Return offsets and sizes [n, d], sorted by offsets, without repeats."""
        if not isinstance(listed, list):
            raise self.corrupt(name, "has no list of pieces")
        lows, extents = bytearray(), bytearray()
        for item in listed:
            if isinstance(item, ChunkRun):
                if item.width != 8 * num_dims:
                    raise self.corrupt(name, "has pieces of another number of dimensions than it has")
                lows += item.offsets
                extents += item.sizes
                continue
            state = self.state(item, "ChunkStorageMetadata")
            for into, field in ((lows, "offsets"), (extents, "sizes")):
                values = self.counts(state.get(field), name)
                if len(values) != num_dims:
                    raise self.corrupt(name, "has pieces of another number of dimensions than it has")
                into += np.array(values, dtype=np.int64).tobytes()
        num_chunks = sum(item.count if isinstance(item, ChunkRun) else 1 for item in listed)
        offsets, sizes = (np.frombuffer(raw, dtype=np.int64).reshape(num_chunks, num_dims) for raw in (lows, extents))
        order = _sort_by_offset(offsets)
        offsets, sizes = offsets[order], sizes[order]
        # Replicas that were not deduplicated at saving are listed several times, and stored once.
        is_again = np.zeros(num_chunks, dtype=bool)
        is_again[1:] = (offsets[1:] == offsets[:-1]).all(axis=1) & (sizes[1:] == sizes[:-1]).all(axis=1)
        return offsets[~is_again], sizes[~is_again]

    def mismatch(self, name: str, offsets: IntArray, stored: IntArray) -> XrankError:
        listed = {tuple(row) for row in offsets.tolist()}
        there = {tuple(row) for row in stored.tolist()}
        lost, odd = sorted(listed - there), sorted(there - listed)
        return self.corrupt(
            name,
            f"has a piece at {list(lost[0])} that is stored nowhere"
            if lost
            else "is stored in other pieces than listed",
            got=f"{len(stored)} pieces stored" + (f", one at {list(odd[0])}" if odd else ""),
            want=f"the {len(offsets)} that are listed",
        )

    def dtype(self, name: str, properties: object) -> str:
        # torch/distributed/checkpoint/metadata.py: TensorProperties.__getstate__
        state = properties.state if isinstance(properties, InertRecord) else None
        match state:
            case (InertRecord(module="torch", name=str(dtype), args=None), layout, *_):
                pass
            case _:
                raise self.corrupt(name, "has no element type")
        strided = isinstance(layout, InertRecord) and layout.args == ("torch.strided",)
        if not strided:
            raise self.origin.usage(
                f"{quote(name)[1:-1]} is not a dense tensor",
                want="torch.strided",
                next_step="save it as a dense tensor",
            )
        return dtype

    # ---- nesting

    def paths(self, recorded: object, listed: Mapping[object, object]) -> Mapping[str, tuple[str | int, ...]] | None:
        # default_planner.py records the result of _flatten_state_dict.py: flatten_state_dict; other planners their own.
        if not isinstance(recorded, dict) or 2 * sum(type(path) is tuple for path in recorded.values()) <= len(
            recorded
        ):
            return None
        found: dict[str, tuple[str | int, ...]] = {}
        for name, path in recorded.items():
            if not isinstance(name, str) or not isinstance(path, tuple) or not path:
                raise self.origin.corrupt("the nested state has a key that is not a text, or an empty path")
            if not all(type(key) in (str, int) for key in path):
                raise self.corrupt(name, "has a key that is neither a text nor a number")
            if ".".join(map(str, path)) != name:
                raise self.corrupt(name, "has a name that differs from its keys", got=quote(".".join(map(str, path))))
            found[name] = path
        for name in listed:
            if name not in found:
                raise self.corrupt(str(name), "has no place in the nested state")
        return MappingProxyType(found)


def _sort_by_offset(offsets: IntArray) -> IntArray:
    """Return the order that sorts rows [n, d] by their columns, the first column first."""
    if offsets.shape[1] == 0:
        return np.arange(len(offsets))
    return np.lexsort(offsets.T[::-1])
