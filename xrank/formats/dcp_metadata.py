"""Regular expressions over opcodes for the chunks and entries of storage in the pickle of a ``.metadata``.

The pickler writes all of a kind alike, except for numbers and for texts from another rank. It writes classes and names
of fields once, and later refers to them by their numbers in the memo.
"""

from __future__ import annotations

import gc
import os
import re
import struct
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from xrank.errors import XrankError
from xrank.formats.pickles import (
    COSTS,
    PLAIN_BUILDERS,
    PROTOCOL,
    STEPS,
    STEPS_A_CHECK,
    STOP,
    InertRecord,
    PickleMachine,
    is_known,
    run_machine,
)
from xrank.formats.regular_file import Origin, open_regular, quote, refuse_pointer
from xrank.layout.nest_table import IntArray
from xrank.stores.client import ObjectStatus

Matcher: TypeAlias = Callable[[bytes, int], "re.Match[bytes] | None"]
"""Matches at a byte of a pickle; the functions that make matchers define its groups."""

NUM_FIXED_MEMOS = 6
"""Number of memo values in every object of either kind: one instance, its state, and two Sizes with their argument
tuples; or two instances, their states, and one Size with its tuple. A tuple with numbers and a full text add one."""

_METADATA, _FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

# BININT1, BININT2, BININT, LONG1
_COUNT = rb"(?:K.|M..|J....|\x8a(?:\x05.....|\x06......|\x07.......|\x08........))"
_PLACE = rb"(" + _COUNT + rb")"
# EMPTY_TUPLE; TUPLE1 to 3, or TUPLE down to its MARK, and MEMOIZE; then the call of torch.Size on it
_SIZE = rb"(\)|\(?" + _COUNT + rb"+[\x85\x86\x87t]\x94)\x85\x94R\x94"
# BINGET, LONG_BINGET, SHORT_BINUNICODE and MEMOIZE
_TEXT = rb"(h.|j....|\x8c.[^\x94]*\x94)"
_INDEX = rb"(?:N|K.|M..|J....)"
_MADE = rb"\)\x81\x94\}\x94\("  # an empty instance, and the start of its state
_SET = rb"ub"

_NBYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5}  # of BININT1, BININT2 and BININT, with their opcodes
_ARITIES = {0x85: 1, 0x86: 2, 0x87: 3}  # of TUPLE1 to 3

_Part: TypeAlias = bytes | str | tuple[str, str]


def chunk_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return the matcher of a ``ChunkStorageMetadata``; its groups are the tuples of offsets and sizes.

    Args:
        memo: the memo of a machine that has just read one; None is returned if the object had another form.
    """
    size = ("torch", "Size")
    return _matcher(
        memo, (_METADATA, "ChunkStorageMetadata"), _MADE, "offsets", size, _SIZE, "sizes", size, _SIZE, _SET
    )


def entry_matcher(memo: Mapping[int, object]) -> Matcher | None:
    """Return the matcher of a ``MetadataIndex`` and its ``_StorageInfo``: name, offsets, path, first byte, length.

    Args:
        memo: the memo of a machine that has just read one; None is returned if the object had another form.
    """
    index = (
        (_METADATA, "MetadataIndex"),
        _MADE,
        "fqn",
        _TEXT,
        "index",
        _INDEX,
        "offset",
        ("torch", "Size"),
        _SIZE,
        _SET,
    )
    info = ((_FILESYSTEM, "_StorageInfo"), _MADE, "relative_path", _TEXT, "offset", _PLACE, "length", _PLACE, _SET)
    return _matcher(memo, *index, *info)


def _matcher(memo: Mapping[int, object], *parts: _Part) -> Matcher | None:
    """Return the matcher of these parts; a text or a class stands for the reference to its memo number."""
    numbers: dict[object, int] = {}
    for number, value in memo.items():
        if isinstance(value, str):
            numbers.setdefault(value, number)
        elif type(value) is InertRecord and value.args is None:
            numbers.setdefault((value.module, value.name), number)
    pattern = b""
    for part in parts:
        if isinstance(part, bytes):
            pattern += part
        elif part not in numbers:
            return None
        else:
            number = numbers[part]
            get = b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
            pattern += re.escape(get)
    return re.compile(pattern, re.DOTALL).match


def pack_tuple(raw: bytes) -> bytes:
    """Return the integers of a matched tuple as consecutive int64.

    Raises:
        ValueError: an integer is negative, or the opcodes do not form a tuple.
    """
    if raw == b")":
        return b""
    values: list[int] = []
    marked = raw[0] == 0x28
    at, end = int(marked), len(raw) - 2  # the opcode of the tuple and that of its memo
    while at < end:
        nbytes = 2 + raw[at + 1] if raw[at] == 0x8A else _NBYTES[raw[at]]
        values.append(parse_count(raw[at : at + nbytes]))
        at += nbytes
    if _ARITIES.get(raw[end]) != (None if marked else len(values)):
        raise ValueError("a tuple takes more or fewer values than there are")
    return struct.pack(f"<{len(values)}q", *values)


def parse_count(raw: bytes) -> int:
    """Return the value of a matched integer.

    Raises:
        ValueError: it is negative.
    """
    opcode = raw[0]
    # LONG1 has its length before it.
    value = int.from_bytes(raw[2 if opcode == 0x8A else 1 :], "little", signed=opcode in (0x8A, 0x4A))
    if value < 0:
        raise ValueError("a count below 0")
    return value


_MAX_PACKED = 1 << 16
_MAX_LEARNED = 16
# A tensor takes about 400 bytes, and objects of 2,000; its pieces become rows of arrays.
_MIN_MADE_NBYTES, _MADE_NBYTES_A_BYTE, _MAX_MADE_NBYTES = 1 << 26, 8, 1 << 30

_GETS = (0x68, 0x6A)  # BINGET, LONG_BINGET: the first opcode of every entry except the first of its kind


class ChunkRun:
    """Consecutive chunks of one tensor; stands for them in a list."""

    __slots__ = ("count", "offsets", "sizes", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        """Bytes of one chunk's offsets: 8 per dimension."""
        self.offsets = bytearray()
        self.sizes = bytearray()
        self.count = 0


class EntryRun:
    """Consecutive pairs of an index and a place, kept in the machine's tables; stands for them in a dict."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class EntryTable:
    """The places of the stored pieces of one tensor."""

    __slots__ = ("offsets", "places", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        """Bytes of one piece's offsets: 8 per dimension."""
        self.offsets = bytearray()
        self.places = array("q")
        """For each piece the number of its file, its first byte and its length in bytes."""


class MetadataMachine(PickleMachine):
    """The machine of `xrank.formats.pickles` that reads chunks and entries of storage in one step each."""

    def __init__(self, data: bytes, origin: Origin) -> None:
        builders = {**PLAIN_BUILDERS, ("torch", "Size"): _size}
        super().__init__(data, origin, builders, InertRecord, None)
        self.max_made_nbytes = min(_MIN_MADE_NBYTES + _MADE_NBYTES_A_BYTE * len(data), _MAX_MADE_NBYTES)
        self.calls = deque(maxlen=0)  # `reduce` has looked at them; a list would keep all records alive
        self._memo = _Memo(self)
        self.memo = self._memo
        self.files: dict[str, int] = {}
        """Relative path -> number, in the order of first use."""
        self.tables: dict[str, EntryTable] = {}
        """Flat name of a tensor -> its entries."""
        self.num_matched_entries = 0
        self._match_chunk: Matcher | None = None
        self._match_entry: Matcher | None = None
        self._num_learned = 0
        self._packed: dict[bytes, bytes] = {}
        self._names: dict[bytes, EntryTable] = {}
        self._paths: dict[bytes, int] = {}

    def run(self) -> object:
        """Return the value of the pickle."""
        data, steps = self.data, _STEPS
        made_nbytes = num_steps = 0
        # Every step takes at least one byte, so the length bounds their number.
        while True:
            opcode = data[self.at]
            if opcode in _GETS and (self._take_chunks() or self._take_entries()):
                continue
            self.at += 1
            step = steps.get(opcode)
            if step is not None:
                step(self)
                made_nbytes += COSTS[opcode]
                num_steps += 1
                if num_steps % STEPS_A_CHECK == 0:
                    self.check_size(made_nbytes)
                    made_nbytes = 0
            elif opcode == STOP:
                return self.stop()
            else:
                raise self.refusal(opcode)

    def forget(self) -> None:
        """Free all memory except the tables, after `run`."""
        self.data = b""
        self.memo = {}
        self._memo = _Memo(self)
        self._packed.clear()
        self._names.clear()
        self._match_chunk = self._match_entry = None

    def replay(self, start: int, end: int) -> None:
        """Run a stretch again to restore its memo values."""
        kept = self.at, self.stack, self.marks
        self.at, self.stack, self.marks = start, [], []
        while self.at < end:
            opcode = self.data[self.at]
            self.at += 1
            _STEPS[opcode](self)
        self.at, self.stack, self.marks = kept

    # ---- chunks

    def _take_chunks(self) -> bool:
        match = self._match_chunk
        found = None if match is None else match(self.data, self.at)
        if found is None or match is None:
            return False
        data, packed, skip = self.data, self._packed, self._memo.skip
        top = self.stack[-1] if self.stack else None
        run = top if type(top) is ChunkRun else None
        while found is not None:
            offsets, sizes = found.group(1, 2)
            low = packed.get(offsets) or self._pack(offsets)
            extents = packed.get(sizes) or self._pack(sizes)
            if len(low) != len(extents):
                raise ValueError("a chunk's offsets and sizes differ in number")
            if run is None:
                run = ChunkRun(len(low))
                self.stack.append(run)
            elif run.width != len(low):
                raise ValueError("chunks of one tensor differ in their number of dimensions")
            run.offsets += low
            run.sizes += extents
            run.count += 1
            # A non-empty tuple is memoized, too.
            skip(found.span(), NUM_FIXED_MEMOS + (offsets != b")") + (sizes != b")"))
            self.at = found.end()
            found = match(data, self.at)
        return True

    def append_one(self) -> None:
        """Append one item; a run must have exactly one chunk."""
        item = self.stack.pop()
        if isinstance(item, ChunkRun) and item.count != 1:
            raise ValueError("several chunks appended as one")
        self.append([item])

    def reduce(self) -> None:
        """Make the record of a call. Its result may be discarded unseen, since `_Memo` keeps no records alive."""
        target = self.stack[-2]
        if isinstance(target, InertRecord) and not is_known((target.module, target.name)):
            name = f"{target.module}.{target.name}"
            raise self.origin.unsafe(f"the pickle runs {quote(name)}, which no framework writes there", got=quote(name))
        self.call()

    # ---- entries of storage

    def _take_entries(self) -> bool:
        match = self._match_entry
        found = None if match is None else match(self.data, self.at)
        if found is None or match is None:
            return False
        data, packed, names, paths, skip = self.data, self._packed, self._names, self._paths, self._memo.skip
        top = self.stack[-1] if self.stack else None
        run = top if type(top) is EntryRun else None
        if run is None:
            run = EntryRun()
            self.stack.append(run)
        while found is not None:
            name, offsets, path, start, nbytes = found.group(1, 2, 3, 4, 5)
            low = packed.get(offsets) or self._pack(offsets)
            table = names.get(name) or self._table(name, len(low))
            if table.width != len(low):
                raise ValueError("the pieces of one tensor differ in their number of dimensions")
            file = paths.get(path)
            if file is None:
                file = self._file(path)
            table.offsets += low
            table.places.extend((file, parse_count(start), parse_count(nbytes)))
            run.count += 1
            skip(found.span(), NUM_FIXED_MEMOS + (offsets != b")") + (name[0] == 0x8C) + (path[0] == 0x8C))
            self.at = found.end()
            found = match(data, self.at)
        return True

    def set_items(self, items: list[object]) -> None:
        """Set pairs; a run of entries stands for several pairs."""
        if any(type(item) is EntryRun for item in items):
            target = self.stack[-1]
            if type(target) is not dict:
                raise TypeError(f"entries of storage in a {type(target).__name__}")
            plain: list[object] = []
            for item in items:
                if not isinstance(item, EntryRun):
                    plain.append(item)
                elif len(plain) % 2:
                    raise ValueError("entries of storage in the place of a value")
                else:
                    target[item] = None
                    self.num_matched_entries += item.count
            items = plain
        super().set_items(items)

    def set_item(self) -> None:
        """Set one pair, which may be a run of one pair."""
        top = self.stack[-1]
        if isinstance(top, EntryRun):
            if top.count != 1:
                raise ValueError("several entries of storage set as one")
            self.set_items([self.stack.pop()])
        else:
            super().set_item()

    def _table(self, raw: bytes, width: int) -> EntryTable:
        name = self._text(raw)
        table = self.tables.get(name)
        if table is None:
            table = self.tables[name] = EntryTable(width)
        if raw[0] == 0x8C:  # every rank writes the same texts again; a reference rarely repeats
            self._names[raw] = table
        return table

    def _file(self, raw: bytes) -> int:
        number = self._paths[raw] = self.files.setdefault(self._text(raw), len(self.files))
        return number

    def _text(self, raw: bytes) -> str:
        if raw[0] == 0x8C:
            text: object = raw[2:-1].decode("utf-8")
            if raw[1] != len(raw) - 3:
                raise ValueError("a text's length is wrong")
        else:
            text = self.memo[int.from_bytes(raw[1:], "little")]
        if not isinstance(text, str):
            raise TypeError("a name that is not a text")
        return text

    # ---- templates

    def build(self) -> None:
        """Set a state; after the first object of each kind, make the matcher of the others."""
        super().build()
        target = self.stack[-1]
        if type(target) is InertRecord and self._num_learned < _MAX_LEARNED:
            if target.name == "ChunkStorageMetadata" and self._match_chunk is None:
                self._num_learned += 1
                self._match_chunk = chunk_matcher(self.memo)
            elif target.name == "_StorageInfo" and self._match_entry is None:
                self._num_learned += 1
                self._match_entry = entry_matcher(self.memo)

    def _pack(self, raw: bytes) -> bytes:
        """Return the integers of a tuple as consecutive int64."""
        packed = pack_tuple(raw)
        if len(self._packed) >= _MAX_PACKED:
            self._packed.clear()
        self._packed[raw] = packed
        return packed


def _size(args: tuple[object, ...]) -> object:
    return args[0] if len(args) == 1 and isinstance(args[0], tuple) else NotImplemented


class _Memo(dict[int, object]):
    """The memo; values of matched stretches are restored only when a reference needs them."""

    def __init__(self, machine: MetadataMachine) -> None:
        super().__init__()
        self._machine = machine
        self._count = 0
        # For each stretch: its first memo number, its count of numbers, and its first and last byte in the pickle.
        self._firsts, self._counts, self._spans = array("q"), bytearray(), array("q")

    def __len__(self) -> int:
        return self._count

    def __setitem__(self, number: int, value: object) -> None:
        # Pickle numbers in order (Modules/_pickle.c: memo_put); a matcher refers to values by number.
        if number != self._count:
            raise ValueError(f"memo number {number} after {self._count}")
        super().__setitem__(number, value)
        self._count += 1

    def skip(self, span: tuple[int, int], count: int) -> None:
        """Reserve the memo numbers of a matched stretch."""
        self._firsts.append(self._count)
        self._counts.append(count)
        self._spans.extend(span)
        self._count += count

    def __missing__(self, number: int) -> object:
        row = bisect_right(self._firsts, number) - 1
        if row < 0 or number >= self._firsts[row] + self._counts[row]:
            raise KeyError(number)
        kept, self._count = self._count, self._firsts[row]
        self._machine.replay(self._spans[2 * row], self._spans[2 * row + 1])
        self._count = kept
        return dict.__getitem__(self, number)


_STEPS: dict[int, Callable[[Any], object]] = {
    **STEPS,
    ord("s"): MetadataMachine.set_item,
    ord("b"): MetadataMachine.build,
    ord("a"): MetadataMachine.append_one,
    ord("R"): MetadataMachine.reduce,
}


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
    """Classes in the pickle that frameworks do not write (`xrank.formats.pickles`)."""


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
