"""Read the pickle of a torch DCP ``.metadata`` at a few microseconds and some bytes per entry.

A checkpoint of 1,000 tensors by 1,024 ranks has a million ``ChunkStorageMetadata`` and as many pairs of
``MetadataIndex`` and ``_StorageInfo``. Each is the same thirty opcodes around a few numbers. The plain machine reads
the first of a kind opcode by opcode, and a regular expression made from it matches each of the others at once. Only
their numbers are kept, in arrays. The plain machine also reads everything that does not match.

A pickle may refer back to any value that it memoized. For a matched stretch, the memo keeps its range of bytes and its
memo numbers; if a reference needs one of them, the stretch is read again, opcode by opcode.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Any

from xrank.formats.dcp_metadata_templates import (
    NUM_FIXED_MEMOS,
    Matcher,
    chunk_matcher,
    entry_matcher,
    pack_tuple,
    parse_count,
)
from xrank.formats.inert_record import InertRecord
from xrank.formats.pickle_machine import STEPS, STOP, PickleMachine
from xrank.formats.pickle_memory import COSTS, STEPS_A_CHECK
from xrank.formats.pickled_names import is_known
from xrank.formats.plain_values import PLAIN_BUILDERS
from xrank.formats.regular_file import Origin, quote

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
    """The machine of `xrank.formats.pickle_machine` that reads chunks and entries of storage in one step each."""

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
