"""Read the ``.metadata`` of a torch DCP checkpoint: its tensors, and the shapes and places of their pieces.

The classes are those of ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py: _StorageInfo``, of torch 2.1
to 2.13. torch is not imported, and the pickle calls nothing. A checkpoint of 1,000 tensors by 1,024 ranks has a million
pieces: their objects become rows of arrays as soon as the tensor, or the batch of places, is complete.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType

import numpy as np
from msgspec import Struct

from xrank.errors import XrankError
from xrank.formats.pickles import (
    OPCODE_LENGTHS,
    PLAIN_BUILDERS,
    PROTOCOL,
    RUN,
    STOP,
    InertRecord,
    PickleReader,
    PickleRun,
    PickleScan,
    WrongRunError,
    is_known,
    measure_opcode,
)
from xrank.formats.torch_archive import IntArray, build_size
from xrank.storage.client import ObjectStatus
from xrank.storage.regular_file import Origin, open_regular, quote, refuse_pointer
from xrank.system import pause_collection

MAX_METADATA_NBYTES = 1 << 32
"""Largest ``.metadata`` that is read, in bytes; a piece of a tensor takes about 200."""

_MAX_EXTENT = (1 << 63) - 1
_MIN_MADE_NBYTES, _MADE_NBYTES_A_BYTE = 1 << 26, 20


class DcpTensor(Struct, frozen=True, eq=False):
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


class DcpMetadata(Struct, frozen=True, eq=False):
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
    """Read a ``.metadata``; errors as in `Reader.read`, and a UsageError for sparse or compressed pieces."""
    with open_regular(path) as file:
        refuse_pointer(file)
        origin = file.origin
        if file.nbytes > MAX_METADATA_NBYTES:
            raise origin.corrupt("is too long", got=f"{file.nbytes} bytes", want=f"{MAX_METADATA_NBYTES} at most")
        if file.nbytes == 0:
            raise origin.corrupt("is empty", got="0 bytes", want="the pickled metadata of a checkpoint")
        # A false file may be long and empty (sparse): look at its ends before reading it.
        if file.read(0, 1) != PROTOCOL or file.read(file.nbytes - 1, 1) != bytes([STOP]):
            raise origin.corrupt("is not a complete pickle", want="the pickled metadata of a checkpoint")
        status = file.status
        # The search for cycles among millions of objects without any would double the time.
        with pause_collection():
            try:
                try:
                    reader = _MetadataReader(file.read(0, file.nbytes), origin)
                    value = reader.read()
                except WrongRunError:
                    reader = _MetadataReader(file.read(0, file.nbytes), origin, takes_runs=False)
                    value = reader.read()
                return reader.make_metadata(value, path, status)
            except XrankError:
                raise
            except (ValueError, TypeError, OverflowError) as error:
                raise origin.corrupt("the metadata is damaged", got=f"{type(error).__name__}: {error}") from error


# ---- runs of pieces and of their places

_GET = rb"(h.|j....)"  # BINGET, LONG_BINGET
_COUNT = rb"(?:K.|M..|J....|\x8a(?:\x05.....|\x06......|\x07.......|\x08........))"  # BININT1, BININT2, BININT, LONG1
# EMPTY_TUPLE; TUPLE1 to 3, or TUPLE down to its MARK, and MEMOIZE; then the call of torch.Size on it
_SIZE = _GET + rb"(\)|\(?" + _COUNT + rb"+[\x85\x86\x87t]\x94)\x85\x94R\x94"
_NAME = rb"(h.|j....|\x8c.[^\x94]*\x94)"  # or SHORT_BINUNICODE and MEMOIZE
_MADE, _SET = _GET + rb"\)\x81\x94\}\x94\(", rb"ub"  # an empty instance, and the start and end of its state
_PLACE = _GET + rb"(" + _COUNT + rb")"
_INDEX = _MADE + _GET + _NAME + _GET + rb"(?:N|K.|M..|J....)" + _GET + _SIZE + _SET
# As picklers write all objects but the first: with classes and names of fields from the memo.
_CHUNK = re.compile(_MADE + _GET + _SIZE + _GET + _SIZE + _SET, re.DOTALL)
_ENTRY = re.compile(_INDEX + _MADE + _GET + _NAME + _PLACE + _PLACE + _SET, re.DOTALL)
_METADATA, _SIZE_CLASS = "torch.distributed.checkpoint.metadata", ("torch", "Size")
_CHUNK_FORM = ((_METADATA, "ChunkStorageMetadata"), "offsets", _SIZE_CLASS, "sizes", _SIZE_CLASS)
_ENTRY_FORM = (
    *((_METADATA, "MetadataIndex"), "fqn", "index", "offset", _SIZE_CLASS),
    *(("torch.distributed.checkpoint.filesystem", "_StorageInfo"), "relative_path", "offset", "length"),
)
"""The memo values of a run, but for the texts of names and paths."""
_INT_NBYTES = {0x4B: 2, 0x4D: 3, 0x4A: 5}  # of BININT1, BININT2 and BININT, with their opcodes
_ARITIES = {0x85: 1, 0x86: 2, 0x87: 3}  # of TUPLE1 to 3


class _Run(PickleRun):
    """Consecutive chunks of a tensor, or entries of storage; stands for them in a list or a dict."""

    def __init__(self, gets: tuple[bytes, ...], start: int, width: int, *, is_entries: bool) -> None:
        super().__init__(gets)
        self.is_entries = is_entries
        self.start = self.stop = start
        """First byte in the pickle, and the byte after the last one."""
        self.width = width
        """Bytes of one piece's offsets: 8 per dimension."""
        self.starts, self.memos = array("I"), array("I")
        """First byte of each object, and number of memo values up to its end."""
        self.offsets = bytearray()
        self.values = array("q")
        """Sizes of chunks; or first byte and length of each entry."""
        self.texts = array("I")
        """Numbers of the opcodes of the name and of the path of each entry."""
        self.count = 0
        self.own: dict[bytes, str] = {}
        """Text of each opcode of `gets` that gets a name or a path."""


class _RunFinder:
    """Cuts runs out of a pickle: each chunk or entry, thirty to forty opcodes, by one regular expression.

    Objects at the bytes `excluded` are read opcode by opcode.
    """

    def __init__(self, data: bytes, origin: Origin, excluded: set[int]) -> None:
        self._data, self._origin, self._excluded = data, origin, excluded
        self._pack = lru_cache(maxsize=1 << 16)(_pack_tuple)
        self._parse = lru_cache(maxsize=1 << 16)(_parse_count)
        self.texts: dict[bytes, int] = {}
        """Opcodes of names and paths -> number."""
        self._has_own_path = False

    def cut(self) -> tuple[bytes, list[_Run]]:
        """Return the pickle with `RUN` in the place of each run, and the runs."""
        data, lengths = self._data, [0 if opcode in b"hj" else n for opcode, n in enumerate(OPCODE_LENGTHS)]
        parts: list[bytes] = []
        runs: list[_Run] = []
        at = last = 0
        while at < len(data):
            length = lengths[data[at]]
            if length:
                at += length
                continue
            run = None
            if data[at] in b"hj":
                chunk = _CHUNK.match(data, at)
                run = self._take_entries(_ENTRY.match(data, at)) if chunk is None else self._take_chunks(chunk)
            if run is None:
                at += OPCODE_LENGTHS[data[at]] or measure_opcode(data, at, self._origin)
                continue
            run.num_memos, run.count = run.memos[-1], len(run.starts)
            runs.append(run)
            parts += [data[last:at], bytes([RUN])]
            at = last = run.stop
        return b"".join([*parts, data[last:]]), runs

    def _take_chunks(self, found: re.Match[bytes] | None) -> _Run | None:
        run, num_memos = None, 0
        while found is not None and found.start() not in self._excluded:
            gets, offsets, sizes = found.group(1, 2, 3, 5, 6), found[4], found[7]
            low, extents = self._pack(offsets), self._pack(sizes)
            if low is None or extents is None or len(low) != len(extents):
                break
            if run is None:
                run = _Run(gets, found.start(), len(low), is_entries=False)
            elif (run.gets, run.width) != (gets, len(low)):
                break
            # An instance, its state, and two Sizes with their arguments.
            num_memos += 6 + (offsets != b")") + (sizes != b")")
            run.starts.append(found.start())
            run.memos.append(num_memos)
            run.stop = found.end()
            run.offsets += low
            run.values.frombytes(extents)
            found = _CHUNK.match(self._data, run.stop)
        return run

    def _take_entries(self, found: re.Match[bytes] | None) -> _Run | None:
        run, num_memos = None, 0
        while found is not None and found.start() not in self._excluded:
            *gets, name, path, offsets, first, size = found.group(1, 2, 4, 5, 6, 8, 9, 11, 13, 3, 10, 7, 12, 14)
            low, start, nbytes = self._pack(offsets), self._parse(first), self._parse(size)
            # Mostly, a rank's entries share the text of their path, whose first mention must stay in the memo; and an
            # entry before SETITEM is two values, where a run is one.
            is_first, self._has_own_path = not self._has_own_path, path[0] == 0x8C
            is_odd = start < 0 or nbytes < 0 or low is None or self._data[found.end()] == ord("s")
            for text in (name, path):
                if text[0] != 0x8C:
                    gets.append(text)
                elif text[1] != len(text) - 3:
                    is_odd = True
            if is_odd or low is None or (is_first and self._has_own_path):
                # After a run, `cut` tries this entry again: it is still the first.
                self._has_own_path &= run is None
                break
            if run is None:
                run = _Run(tuple(gets), found.start(), len(low), is_entries=True)
            elif run.gets != tuple(gets) or run.width != len(low):
                break
            # Two instances, two states, and one Size with its argument.
            num_memos += 6 + (offsets != b")") + (name[0] == 0x8C) + (path[0] == 0x8C)
            run.starts.append(found.start())
            run.memos.append(num_memos)
            run.stop = found.end()
            run.offsets += low
            run.values.extend((start, nbytes))
            texts = self.texts
            run.texts.extend((texts.setdefault(name, len(texts)), texts.setdefault(path, len(texts))))
            found = _ENTRY.match(self._data, run.stop)
        return run


def _find_referenced(scan: PickleScan, runs: Sequence[_Run]) -> set[int]:
    """Return the first bytes of the objects in runs with memo values that the pickle refers to."""
    if not scan.is_in_order:
        return {start for run in runs for start in run.starts}
    gets = np.unique(np.concatenate(scan.gets))
    found: set[int] = set()
    for run in runs:
        low, high = np.searchsorted(gets, (run.first_memo, run.first_memo + run.num_memos))
        places = np.searchsorted(run.memos, gets[low:high] - run.first_memo, side="right")
        found.update(run.starts[k] for k in places.tolist())
    return found


def _pack_tuple(raw: bytes) -> bytes | None:
    """Return the integers of a tuple in a run as consecutive int64; None if it is not a tuple of counts."""
    if raw == b")":
        return b""
    values: list[int] = []
    is_marked = raw[0] == 0x28
    at, end = int(is_marked), len(raw) - 2  # the opcode of the tuple and that of its memo
    while at < end:
        nbytes = 2 + raw[at + 1] if raw[at] == 0x8A else _INT_NBYTES[raw[at]]
        values.append(_parse_count(raw[at : at + nbytes]))
        at += nbytes
    if _ARITIES.get(raw[end]) != (None if is_marked else len(values)) or min(values) < 0:
        return None
    return struct.pack(f"<{len(values)}q", *values)


def _parse_count(raw: bytes) -> int:
    opcode = raw[0]
    # LONG1 has its length before it.
    return int.from_bytes(raw[2 if opcode == 0x8A else 1 :], "little", signed=opcode in (0x8A, 0x4A))


def _original_places(places: array[int], runs: Sequence[_Run]) -> array[int]:
    """Return places in a pickle without its runs as places in the whole pickle."""
    cut = np.cumsum([0, *(run.stop - run.start - 1 for run in runs)])
    starts = np.array([run.start for run in runs]) - cut[:-1]
    return array("q", (np.array(places, dtype=np.int64) + cut[np.searchsorted(starts, places)]).tobytes())


class _Places:
    """The stored pieces of all tensors of one number of dimensions, in the order of the pickle."""

    def __init__(self) -> None:
        self.tensors, self.files = array("i"), array("i")
        """Number of each piece's tensor, and of its file."""
        self.offsets = bytearray()
        self.values = array("q")
        """First byte and length of each piece."""
        self.known: dict[int, int] = {}
        """Number of the opcode of a name -> number of the tensor."""

    def by_tensor(self) -> Iterator[tuple[int, IntArray, IntArray]]:
        """Yield each tensor's number, its pieces' offsets [n, d], and their files, first bytes and lengths [n, 3]."""
        tensors = np.frombuffer(self.tensors, np.int32)
        order = np.argsort(tensors, kind="stable")
        offsets = np.frombuffer(self.offsets, np.int64).reshape(len(order), -1)
        files, values = np.frombuffer(self.files, np.int32), np.frombuffer(self.values, np.int64).reshape(-1, 2)
        firsts = np.flatnonzero(np.diff(tensors[order], prepend=-1))
        for mine in np.split(order, firsts[1:]):
            yield int(tensors[mine[0]]), offsets[mine], np.column_stack((files[mine], values[mine]))


class _MetadataReader(PickleReader):
    """Reads the pickle, then makes arrays of its values."""

    def __init__(self, data: bytes, origin: Origin, *, takes_runs: bool = True) -> None:
        self._takes_runs = takes_runs
        self._runs: list[_Run] = []
        self._texts: list[bytes] = []
        self._places: dict[int, _Places] = {}
        """Number of dimensions -> pieces."""
        self._files: dict[int, int] = {}
        """Number of the opcode of a path -> number of the file."""
        builders = {**PLAIN_BUILDERS, ("torch", "Size"): build_size}
        # A piece takes about 170 bytes, and objects of 2,700, most of them only for a moment.
        super().__init__(data, origin, builders, max_made_nbytes=_MIN_MADE_NBYTES + _MADE_NBYTES_A_BYTE * len(data))
        self._steps[ord("R")] = self.reduce
        self.calls = deque(maxlen=0)  # `reduce` has looked at them; a list would keep all records alive
        self.files: dict[str, int] = {}
        """Relative path -> number, in the order of first use."""
        self.pieces: dict[str, tuple[int, int]] = {}
        """Flat name of a tensor with stored pieces -> its number, and its number of dimensions."""
        self.byte_items: dict[str, tuple[int, int, int]] = {}
        self._stored: object = None
        """The dict that the entries of storage were set in."""
        self._has_first = False
        """Whether the first entry of storage was seen."""
        self.num_open_runs = 0
        """Number of runs of entries that were set in no dict yet."""

    def scan(self, data: bytes, origin: Origin, max_made_nbytes: int) -> PickleScan:
        """Return the scanned pickle."""
        excluded: set[int] = set()
        # Usually once, as picklers let few runs' values be referred to.
        while self._takes_runs:
            try:
                finder = _RunFinder(data, origin, excluded)
                rest, runs = finder.cut()
                scan = PickleScan(rest, origin, max_made_nbytes, runs)
            except XrankError:
                break  # let the scan of the whole pickle name the byte
            referenced = _find_referenced(scan, runs)
            if not referenced:
                self._runs, self._texts = runs[::-1], list(finder.texts)
                for run in runs:
                    del run.starts, run.memos
                scan.named_at = _original_places(scan.named_at, runs)
                return scan
            excluded |= referenced
        return PickleScan(data, origin, max_made_nbytes)

    def take_run(self, operands: tuple[object, ...]) -> object:
        """Return a run, after the check that its classes and fields are what they should be."""
        run = self._runs.pop()
        form, texts = list(operands[:9]), operands[9:]
        form = [(one.module, one.name) if isinstance(one, InertRecord) and one.args is None else one for one in form]
        if tuple(form) != (_ENTRY_FORM if run.is_entries else _CHUNK_FORM) or any(
            type(one) is not str for one in texts
        ):
            raise WrongRunError
        if run.is_entries:
            run.own = {raw: str(text) for raw, text in zip(run.gets[9:], texts, strict=True)}
        self.num_open_runs += run.is_entries
        return run

    def _add_entries(self, run: _Run) -> None:
        num_dims = run.width // 8
        places = self._places.setdefault(num_dims, _Places())
        known, files = places.known, self._files
        # No memo value is set twice, so that an opcode has one text in all runs.
        for name, path in zip(run.texts[::2], run.texts[1::2], strict=True):
            tensor = known.get(name)
            if tensor is None:
                tensor = known[name] = self._find_tensor(self._text_of(run, name), num_dims)
            file = files.get(path)
            if file is None:
                file = files[path] = self.files.setdefault(self._text_of(run, path), len(self.files))
            places.tensors.append(tensor)
            places.files.append(file)
        places.offsets += run.offsets
        places.values += run.values

    def _text_of(self, run: _Run, number: int) -> str:
        raw = self._texts[number]
        return run.own[raw] if raw in run.own else raw[2:-1].decode()

    def _find_tensor(self, name: str, num_dims: int) -> int:
        number, known_dims = self.pieces.setdefault(name, (len(self.pieces), num_dims))
        if known_dims != num_dims:
            raise self.corrupt(name, "has pieces of different numbers of dimensions")
        return number

    def reduce(self, operands: tuple[object, object]) -> object:
        """Make the record of a call, of a class that is written there: the result may be discarded unseen."""
        made = self.call(operands)
        if isinstance(made, InertRecord) and not is_known((made.module, made.name)):
            name = quote(f"{made.module}.{made.name}")
            raise self.origin.unsafe(f"the pickle runs {name}, which no framework writes there", got=name)
        return made

    def build(self, operands: tuple[object, object]) -> object:
        """Set a state; of a tensor, turn the pieces into arrays."""
        target = super().build(operands)
        if isinstance(target, InertRecord) and target.name == "TensorStorageMetadata" and type(target.state) is dict:
            target.state["chunks"] = _read_chunks(target.state.get("chunks"))
        return target

    def set_items(self, operands: tuple[object, tuple[object, ...]]) -> object:
        """Set items of a dict; entries of storage become rows."""
        target, items = operands
        if any(type(item) is _Run for item in items):
            items = self._take_runs(target, items)
        others = list(items)
        if len(items) % 2 == 0 and any(_is_index(key) for key in items[::2]):
            self._set_stored(target)
            self._take_pairs(others)
        return super().set_items((target, tuple(others)))

    def _take_pairs(self, items: list[object]) -> None:
        """Take the entries of tensors' pieces out of keys and values; `make_metadata` takes the first of all.

        Plans depend on the numbers of files, and an interrupted gather goes on only with the same plan: files of the
        first entry, and of values that are not tensors, have always been numbered after the others.
        """
        left: list[object] = []
        for index, info in zip(items[::2], items[1::2], strict=True):
            if self._has_first and _is_index(index, of_piece=True):
                self._take_entry(index, info)
            else:
                left += (index, info)
            self._has_first |= _is_index(index)
        items[:] = left

    def _take_runs(self, target: object, items: tuple[object, ...]) -> tuple[object, ...]:
        """Return the items without the runs of entries, each of which stands for whole pairs."""
        others: list[object] = []
        for item in items:
            if type(item) is _Run and item.is_entries and len(others) % 2 == 0:
                self._set_stored(target)
                self._take_pairs(others)
                self._add_entries(item)
                self.num_open_runs -= 1
            elif type(item) is _Run and (item.is_entries or item.count > 1):
                raise self.origin.corrupt("the pickle's storage entries are in an unexpected order")
            else:
                others.append(item)
        return tuple(others)

    def _set_stored(self, target: object) -> None:
        if type(target) is not dict or (self._stored is not None and target is not self._stored):
            raise self.origin.corrupt("the pickle's storage entries are in an unexpected order")
        self._stored = target

    def append(self, operands: tuple[object, object]) -> object:
        """Append one item."""
        if type(operands[1]) is _Run and operands[1].count > 1:
            raise ValueError("several chunks appended as one")
        return super().append(operands)

    def _take_entry(self, index: object, info: object) -> None:
        key, place = self.state(index, "MetadataIndex"), self.state(info, "_StorageInfo")
        name, offset, path = key.get("fqn"), key.get("offset"), place.get("relative_path")
        if not isinstance(name, str) or not isinstance(path, str):
            raise self.origin.corrupt("an entry of storage lacks its name or its file")
        if place.get("transform_descriptors"):
            problem = f"{quote(name)[1:-1]} was stored through a transform"
            got = quote(str(place["transform_descriptors"]))
            raise self.origin.usage(problem, got, "plain bytes", "save the checkpoint again without extensions")
        first, size = self.counts((place.get("offset"), place.get("length")), name)
        file = self.files.setdefault(path, len(self.files))
        if offset is None:
            if name in self.byte_items:
                raise self.corrupt(name, "is stored twice")
            self.byte_items[name] = (file, first, size)
            return
        low = self.counts(offset, name)
        tensor, places = self._find_tensor(name, len(low)), self._places.setdefault(len(low), _Places())
        places.tensors.append(tensor)
        places.files.append(file)
        places.offsets += struct.pack(f"<{len(low)}q", *low)
        places.values.extend((first, size))

    def make_metadata(self, value: object, path: str, status: os.stat_result | ObjectStatus) -> DcpMetadata:
        """Return the metadata, after `read` has returned their value."""
        state = self.state(value, "Metadata")
        stored, listed = state.get("storage_data"), state.get("state_dict_metadata")
        if not isinstance(stored, dict) or not isinstance(listed, dict) or "planner_data" not in state:
            raise self.origin.corrupt("the metadata lists no tensors, or not where they are stored")
        for index, info in stored.items():
            self._take_entry(index, info)
        if self.num_open_runs or (self._stored is not None and stored is not self._stored):
            raise self.origin.corrupt("the pickle's storage entries are in an unexpected order")
        nbytes = sum(sum(places.values[1::2]) for places in self._places.values())
        nbytes += sum(item[2] for item in self.byte_items.values())
        ends = self.ends()
        stored_at = {number: found for places in self._places.values() for number, *found in places.by_tensor()}
        tensors = {}
        for name, item in listed.items():
            if not isinstance(name, str):
                raise self.origin.corrupt("a tensor's name is not a text", got=type(name).__name__)
            if isinstance(item, InertRecord) and item.name == "BytesStorageMetadata":
                if name not in self.byte_items:
                    raise self.corrupt(name, "is listed, but stored nowhere")
                continue
            number, num_dims = self.pieces.pop(name, (-1, None))
            tensors[name] = self.tensor(name, item, num_dims, stored_at.pop(number, None))
        for name in (*self.pieces, *self.byte_items):
            if name not in listed:
                raise self.corrupt(name, "is stored, but not listed")
        version = state.get("version")
        return DcpMetadata(
            path,
            status,
            version if isinstance(version, str) else None,
            tuple(self.files),
            ends,
            MappingProxyType(tensors),
            nbytes,
            MappingProxyType(self.byte_items),
            self.paths(state.get("planner_data"), listed),
            {name: at for name, at in self.named.items() if not is_known(name)},
        )

    def corrupt(self, name: str, problem: str, *, got: str | None = None, want: str | None = None) -> XrankError:
        return self.origin.corrupt(f"{quote(name)[1:-1]} {problem}", got, want, tensor=name)

    def state(self, value: object, kind: str) -> dict[str, object]:
        """Return the fields of an instance of that class."""
        state = value.state if isinstance(value, InertRecord) and value.name == kind and value.args == () else None
        if not isinstance(state, dict):
            raise self.origin.corrupt("the pickle contains an unexpected value", want=f"a {kind}")
        return state

    def ends(self) -> IntArray:
        """Return the length that each file must have to hold its items."""
        ends = np.zeros(len(self.files), dtype=np.int64)
        for places in self._places.values():
            start, nbytes = np.frombuffer(places.values, np.int64).reshape(-1, 2).T
            file = np.frombuffer(places.files, np.int32)
            np.maximum.at(ends, file, np.minimum(start, _MAX_EXTENT - nbytes) + nbytes)
        for number, first, size in self.byte_items.values():
            ends[number] = max(ends[number], min(first + size, _MAX_EXTENT))
        return ends

    def counts(self, values: object, name: str) -> tuple[int, ...]:
        if not isinstance(values, tuple):
            raise self.corrupt(name, "has offsets or sizes that are not a tuple", got=type(values).__name__)
        for value in values:
            if type(value) is not int or not 0 <= value <= _MAX_EXTENT:
                raise self.corrupt(name, "has an offset or a length that is not a count")
        return values

    def tensor(self, name: str, item: object, num_dims: int | None, found: Sequence[IntArray] | None) -> DcpTensor:
        state = self.state(item, "TensorStorageMetadata")
        shape = self.counts(state.get("size"), name)
        chunks = state.get("chunks")
        if not isinstance(chunks, np.ndarray):
            raise self.corrupt(name, str(chunks))
        if chunks.shape[2] != len(shape) and len(chunks):
            raise self.corrupt(name, "has pieces with a different number of dimensions")
        chunks = chunks.reshape(len(chunks), 2, len(shape))
        chunks = chunks[_sort_by_offset(chunks[:, 0])]
        # Replicas that were not deduplicated at saving are listed several times, and stored once.
        is_new = np.ones(len(chunks), dtype=bool)
        is_new[1:] = (chunks[1:] != chunks[:-1]).any(axis=(1, 2))
        offsets, sizes = chunks[is_new, 0], chunks[is_new, 1]
        if num_dims not in (None, len(shape)):
            raise self.corrupt(name, "is stored in pieces with a different number of dimensions")
        stored, places = found or (np.zeros((0, len(shape)), np.int64), np.zeros((0, 3), np.int64))
        order = _sort_by_offset(stored)
        stored, places = stored[order], places[order]
        if len(stored) != len(offsets) or not np.array_equal(stored, offsets):
            listed, there = ({tuple(row) for row in rows.tolist()} for rows in (offsets, stored))
            lost, odd = sorted(listed - there), sorted(there - listed)
            problem = "is stored in other pieces than listed"
            if lost:
                problem = f"has a piece at {list(lost[0])} that is stored nowhere"
            got = f"{len(stored)} pieces stored" + (f", one at {list(odd[0])}" if odd else "")
            raise self.corrupt(name, problem, got=got, want=f"the {len(offsets)} that are listed")
        if len(stored) > 1 and not (stored[1:] != stored[:-1]).any(axis=1).all():
            raise self.corrupt(name, "has two pieces at the same offsets")
        keep = (sizes > 0).all(axis=1)
        return DcpTensor(
            name,
            self.dtype(name, state.get("properties")),
            shape,
            *(column[keep] for column in (offsets, sizes)),
            *(np.ascontiguousarray(places[keep, column]) for column in range(3)),
        )

    def dtype(self, name: str, properties: object) -> str:
        # torch/distributed/checkpoint/metadata.py: TensorProperties.__getstate__
        state = properties.state if isinstance(properties, InertRecord) else None
        match state:
            case (InertRecord(module="torch", name=str(dtype), args=None), layout, *_):
                pass
            case _:
                raise self.corrupt(name, "has no element type")
        if not isinstance(layout, InertRecord) or layout.args != ("torch.strided",):
            problem = f"{quote(name)[1:-1]} is not a dense tensor"
            raise self.origin.usage(problem, None, "torch.strided", "save it as a dense tensor")
        return dtype

    def paths(self, recorded: object, listed: Mapping[object, object]) -> Mapping[str, tuple[str | int, ...]] | None:
        # default_planner.py records the result of _flatten_state_dict.py: flatten_state_dict; other planners their own.
        if not isinstance(recorded, dict):
            return None
        if 2 * sum(type(path) is tuple for path in recorded.values()) <= len(recorded):
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
                raise self.corrupt(str(name), "is missing in the nested state")
        return MappingProxyType(found)


def _sort_by_offset(offsets: IntArray) -> IntArray:
    """Return the order that sorts rows [n, d] by their columns, the first column first."""
    if offsets.shape[1] == 0:
        return np.arange(len(offsets))
    return np.lexsort(offsets.T[::-1])


def _is_index(value: object, *, of_piece: bool = False) -> bool:
    if not isinstance(value, InertRecord) or value.name != "MetadataIndex":
        return False
    return not of_piece or (isinstance(value.state, dict) and value.state.get("offset") is not None)


def _read_chunks(listed: object) -> IntArray | str:
    """Return offsets and sizes of listed pieces, [n, 2, d]; or the problem that there is."""
    if not isinstance(listed, list):
        return "has no list of pieces"
    parts: list[IntArray] = []
    for item in listed:
        if type(item) is _Run and not item.is_entries:
            sides = [np.frombuffer(side, np.int64).reshape(item.count, -1) for side in (item.offsets, item.values)]
            parts.append(np.stack(sides, axis=1))
            continue
        state = item.state if isinstance(item, InertRecord) and item.name == "ChunkStorageMetadata" else None
        if not isinstance(state, dict):
            return "has a piece of an unexpected class"
        low, extents = state.get("offsets"), state.get("sizes")
        if not isinstance(low, tuple) or not isinstance(extents, tuple):
            return "has offsets or sizes that are not a tuple"
        if len(low) != len(extents):
            return "has pieces with a different number of dimensions"
        if any(type(value) is not int or not 0 <= value <= _MAX_EXTENT for value in (*low, *extents)):
            return "has an offset or a length that is not a count"
        parts.append(np.array([[low, extents]], dtype=np.int64))
    if len({part.shape[2] for part in parts}) > 1:
        return "has pieces with a different number of dimensions"
    return np.concatenate(parts) if parts else np.zeros((0, 2, 0), np.int64)
