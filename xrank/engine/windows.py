"""Windows, the aligned pieces of output files that the executor fills one at a time, with their checksums and digests.

A window is 1 MiB of the output *file*, whatever tensors it crosses: file systems are fastest with aligned writes (ext4
allocates one folio), and a window stays in cache while it is filled, digested and written. Checksums of records and
digests of tensors are joined from reads and windows in any order.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash
from isal import isal_zlib
from msgspec import Struct

from xrank import dtypes
from xrank.engine.buffers import Source, Stretches
from xrank.engine.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, restrict, size, swap
from xrank.layout.output_files import OutputFile, PlacedBytes
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable

BoolArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class JoinedCrc32:
    """The CRC-32 of a stretch of bytes, joined from the CRCs of its parts as neighbors appear."""

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
        # Both neighbors may touch: the part after is joined already, so this joins all three.
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

    `mismatch` is called with (record, computed CRC) if that is not the recorded one. `left_open` masks the records of
    which other ranks read parts too: their CRCs are kept for `take_parts` and not compared.
    """

    def __init__(
        self, records: RecordTable, mismatch: Callable[[int, int], None], *, left_open: BoolArray | None = None
    ) -> None:
        self._records = records
        self._nbytes = records.nbytes.data  # whose numbers come faster than an array's
        self._expected = records.crc32.data
        self._mismatch = mismatch
        self._left_open = left_open
        self._parts: dict[int, JoinedCrc32] = {}
        self._checked = bytearray(len(records))
        self._is_checked = np.frombuffer(self._checked, np.bool_)  # the same memory
        self._lock = threading.Lock()

    @property
    def num_checked(self) -> int:
        """Number of records whose every byte was compared with a recorded checksum."""
        return int(np.count_nonzero(self._is_checked))

    def wants(self, record: int) -> bool:
        """Return whether a record has a checksum that was not compared yet."""
        return self._expected[record] != NO_CHECKSUM and not self._checked[record]

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
            if self._checked[record]:
                return
            is_open = self._left_open is not None and self._left_open[record]
            if is_open or end - start < self._nbytes[record]:
                part = self._parts.get(record)
                if part is None:
                    part = self._parts[record] = JoinedCrc32(int(self._nbytes[record]))
                part.add(start, end, crc)  # an overlapping part is left out, and `missing` returns its bytes
                if part.value is None or is_open:
                    return
                crc = part.value
            self._parts.pop(record, None)
            self._checked[record] = 1
            # Counted before the comparison: a mismatch raises, and no other thread compares the record again.
            if crc != self._expected[record]:
                self._mismatch(record, crc)

    def add_all(self, stretches: Stretches, window: memoryview) -> None:
        """Add stretches of records that were read to their places in a window; otherwise as `add`."""
        records, record = self._records, stretches.record
        waits = (records.crc32[record] != NO_CHECKSUM) & ~self._is_checked[record]
        if not waits.any():
            return
        record, start, place, nbytes = (column[waits] for column in stretches)
        crcs = [isal_zlib.crc32(window[a:b]) for a, b in zip(place.tolist(), (place + nbytes).tolist(), strict=True)]
        # Whole records are compared at once, without a lock: nothing is joined, and a second comparison finds the same.
        is_whole = nbytes == records.nbytes[record]
        if self._left_open is not None:
            is_whole &= ~self._left_open[record]
        is_right = is_whole & (records.crc32[record] == np.array(crcs))
        self._is_checked[record[is_right]] = True
        for row in np.flatnonzero(~is_right).tolist():
            self.join(int(record[row]), int(start[row]), int(start[row] + nbytes[row]), crcs[row])

    def missing(self, records: Sequence[int] | IntArray) -> list[tuple[int, int, int]]:
        """Return (record, start, end) of all bytes of these records that were not added yet; open records excluded."""
        with self._lock:
            asked = np.asarray(records, np.int64)
            waits = (self._records.crc32[asked] != NO_CHECKSUM) & ~self._is_checked[asked]
            if self._left_open is not None:
                waits &= ~self._left_open[asked]
            found = []
            for record in asked[waits].tolist():
                part = self._parts.get(record) or JoinedCrc32(int(self._nbytes[record]))
                found += [(record, *gap) for gap in part.gaps()]
            return found

    def take_parts(self, records: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """Remove and return (record, start, end, CRC) of all parts of these records that were not compared."""
        with self._lock:
            known = [(record, self._parts.pop(record)) for record in records if record in self._parts]
        return [(record, *part) for record, parts in known for part in parts.parts]


def read_rest(
    checksums: RecordChecksums, source: Source, records: Sequence[int] | IntArray, staging: memoryview
) -> None:
    """Read the bytes of these records that no window needed (padding, left-out parts), for their checksums."""
    for record, start, stop in checksums.missing(records):
        for position in range(start, stop, len(staging)):
            nbytes = min(len(staging), stop - position)
            checksums.add(record, position, source.fetch(record, position, nbytes, staging))


BLOCK_NBYTES = 1 << 16


class DigestPart(NamedTuple):
    """A part of a tensor's digest, from some stretches of its bytes."""

    blocks: tuple[tuple[int, bytes], ...]
    """(First block, digests of it and of those after it) for runs of whole blocks, by rising number."""
    edges: tuple[tuple[int, bytes], ...]
    """(start, bytes) of the partial blocks at the ends of stretches."""


class TensorDigest:
    """Collects the digest of one tensor from parts that come in any order, each byte once."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._num_blocks = self._missing = -(-nbytes // BLOCK_NBYTES)
        self._known: list[tuple[int, int]] = []  # (first, one past the last), as they came
        self._blocks = bytearray()  # 16 bytes for each; made when the first is known
        self._edges: dict[int, list[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def add(self, start: int, data: memoryview) -> None:
        """Add the tensor's bytes [start, start + len(data))."""
        if len(data) == self._nbytes <= BLOCK_NBYTES:  # no other thread has a part of it
            self._finish(0, xxhash.xxh3_128_digest(data))
            return
        stop = start + len(data)
        first = -(-start // BLOCK_NBYTES)  # first block that begins in data
        last = self._num_blocks if stop == self._nbytes else stop // BLOCK_NBYTES  # one past the last that ends in it
        if first < last:
            ends = [min((block + 1) * BLOCK_NBYTES, self._nbytes) - start for block in range(first, last)]
            digests = b"".join(
                xxhash.xxh3_128_digest(data[block * BLOCK_NBYTES - start : end])
                for block, end in zip(range(first, last), ends, strict=True)
            )
            with self._lock:
                self._finish(first, digests)
            self._add_edge(start, data[: first * BLOCK_NBYTES - start])
            self._add_edge(start + ends[-1], data[ends[-1] :])
        else:
            # No whole block is in data, but data may cross one border between two blocks.
            border = min(first * BLOCK_NBYTES, stop)
            self._add_edge(start, data[: border - start])
            self._add_edge(border, data[border - start :])

    def _add_edge(self, start: int, part: memoryview) -> None:
        """Keep a part of a block until another window or thread has added the rest."""
        if not part:
            return
        # Parts of a block come once each, so the sum of their sizes shows that the block is complete.
        block = start // BLOCK_NBYTES
        block_nbytes = min(BLOCK_NBYTES, self._nbytes - block * BLOCK_NBYTES)
        with self._lock:
            parts = self._edges.setdefault(block, [])
            parts.append((start, bytes(part)))
            if sum(len(data) for _, data in parts) == block_nbytes:
                del self._edges[block]
                whole = b"".join(data for _, data in sorted(parts))
                self._finish(block, xxhash.xxh3_128_digest(whole))

    def _finish(self, block: int, digests: bytes) -> None:
        """Record the digests of one or more blocks; the caller holds the lock."""
        if not self._blocks:
            self._blocks = bytearray(self._num_blocks * 16)
        self._blocks[block * 16 : block * 16 + len(digests)] = digests
        # Each block is finished once, because each byte is added once; so counting suffices.
        num_blocks = len(digests) // 16
        self._missing -= num_blocks
        if self._known and self._known[-1][1] == block:  # the usual case: windows come nearly in order
            self._known[-1] = self._known[-1][0], block + num_blocks
        else:
            self._known.append((block, block + num_blocks))

    def part(self) -> DigestPart:
        """Return the part that has been added so far."""
        stretches: list[tuple[int, int]] = []
        for first, last in sorted(self._known):
            before = stretches.pop() if stretches and stretches[-1][1] == first else (first, last)
            stretches.append((before[0], last))
        blocks = tuple((first, bytes(self._blocks[first * 16 : last * 16])) for first, last in stretches)
        return DigestPart(blocks, tuple(edge for _, parts in sorted(self._edges.items()) for edge in parts))

    def join(self, part: DigestPart) -> None:
        """Add a part of another digest of the same tensor, of bytes that are new here."""
        with self._lock:
            for first, digests in part.blocks:
                self._finish(first, digests)
        for start, data in part.edges:
            self._add_edge(start, memoryview(data))

    def digest(self) -> bytes:
        """Return the digest; every byte must have been added."""
        assert self._missing == 0, f"{self._missing} blocks of a tensor were never digested"
        return xxhash.xxh3_128_digest(bytes(self._blocks))


def digest_of_file(header: bytes, tensors: Iterable[bytes]) -> bytes:
    """Return the digest of a file with that header and tensors of these digests."""
    state = xxhash.xxh3_128(header)
    for digest in tensors:
        state.update(digest)
    return state.digest()


def digest_text(digest: bytes) -> str:
    """Return a digest as manifests and reports record it."""
    return f"xxh3:{digest.hex()}"


class FinishedFile(Struct, frozen=True):
    """An output file whose every byte is written and whose sources are checked."""

    index: int
    digest: bytes
    tensor_digests: tuple[bytes, ...]
    """In the file's order."""


class FilePart(Struct, frozen=True):
    """The digests and CRCs of an output file's windows that one execution has written."""

    index: int
    digests: tuple[tuple[int, DigestPart], ...]
    """(Tensor of the file, part of its digest); tensors of which nothing was written are left out."""
    crcs: tuple[tuple[int, int, int, int], ...]
    """(Tensor of the file, start, end, CRC-32 of these bytes), if the file's ending needs them."""


def make_finished_file(
    output: OutputFile, index: int, digests: Sequence[bytes], ending: Sequence[PlacedBytes]
) -> FinishedFile:
    """Return the result for a file with these digests of its tensors and this ending."""
    around = b"".join((output.header, *(data for _, data in (*output.fragments, *ending))))
    return FinishedFile(index, digest_of_file(around, digests), tuple(digests))


class JoinedFile:
    """Collects the parts of one file, each byte of which is in one of them."""

    def __init__(self, output: OutputFile, index: int) -> None:
        self.output, self.index = output, index
        self.digests = [TensorDigest(tensor.nbytes) for tensor in output.tensors]
        self._crcs = [JoinedCrc32(tensor.nbytes) for tensor in output.tensors] if output.ending else []

    def join(self, part: FilePart) -> None:
        """Add a part."""
        for tensor, digest in part.digests:
            self.digests[tensor].join(digest)
        for tensor, start, end, crc in part.crcs:
            self._crcs[tensor].add(start, end, crc)

    def finish(self) -> tuple[FinishedFile, Sequence[PlacedBytes]]:
        """Return the file's result and the ending that is still to be written; all parts must have been added."""
        ending: Sequence[PlacedBytes] = ()
        if self.output.ending is not None:
            values = [crc.value for crc in self._crcs]
            assert None not in values, "bytes of a tensor were never read for its CRC"
            ending = self.output.ending([value for value in values if value is not None])
        digests = [digest.digest() for digest in self.digests]
        return make_finished_file(self.output, self.index, digests, ending), ending


WINDOW_NBYTES = 1 << 20

_PREPARED_TENSORS = 32
_MANY_COPIES = 16
"""Copies of a run of windows that take longer one by one than a table of them takes to make."""
_MOST_STRETCHES = 8192
"""Stretches that are read at once, and those of one tensor more."""
_STRAIGHT_NBYTES = 64 << 10
"""Fewest bytes of a copy that is worth a request of its own."""


class Portion(NamedTuple):
    """The part of one tensor that lies in a run of windows."""

    tensor: int
    """Index in the file's tensors."""
    low: int
    high: int
    """Elements [low, high) of the tensor."""
    start: int
    stop: int
    """Bytes [start, stop) of the run."""


class Read(NamedTuple):
    """Bytes of a record that a run of windows needs."""

    record: int
    start: int
    """First byte of the record."""
    nbytes: int
    place: int | None
    """Byte of the run that they begin at; None where the copy that they belong to is not one stretch of bytes."""


class PreparedCopies:
    """Copies of one tensor, ready to be cut to windows; nests are swapped to target addresses on first use."""

    def __init__(self, copies: Copies, num_elements: int) -> None:
        self.copies, self._num_elements = copies, num_elements
        self._nests: list[Nest | None] = [None] * len(copies)
        self._records: list[int] = copies.record.tolist()
        self._ends: IntArray | None = None

    def nest(self, row: int) -> Nest:
        """Return a copy's nest; x = target, y = source."""
        nest = self._nests[row]
        # Two threads may both make it; the results are equal, so no lock is needed.
        if nest is None:
            nest = self._nests[row] = swap(self.copies.nests[row])
        return nest

    def cut(self, low: int, high: int) -> Iterator[tuple[int, int, Nest]]:
        """Yield (row, record, nest) of all copies of elements [low, high); x = source, y = target - low."""
        if low == 0 and high == self._num_elements and self.copies.nests.loops.shape[1] < 2:
            # Small tensors are in one window: whole runs, which need no cut.
            yield from zip(range(len(self.copies)), self._records, self.copies.nests.to_nests(), strict=True)
            return
        if self._ends is None:
            self._ends = self.copies.nests.y_ends
        for row in np.flatnonzero((self.copies.nests.y < high) & (self._ends > low)).tolist():
            for part in restrict(self.nest(row), low, high):
                loops = tuple((n, ys, xs) for n, xs, ys in part.loops)
                yield row, self._records[row], Nest(part.y, part.x - low, loops)


class PreparedTensor:
    """One tensor's copies and replicas, ready for windows."""

    def __init__(self, plan: TensorPlan) -> None:
        self.plan = plan
        self.copies, self.replicas = (PreparedCopies(c, plan.output.num_elements) for c in (plan.copies, plan.replicas))
        self.is_read_early = plan.update is None and not plan.output.is_padded
        """Whether bytes that go to their place unchanged may be read before it is cleared."""

    def find_place(self, row: int, record: int, nest: Nest) -> int | None:
        """Return the first byte of a copy's elements in the tensor; None unless all of the copy is one stretch."""
        # Elements of other copies share blocks with their neighbors, also where these lie side by side.
        whole = self.copies.nest(row)
        width = dtypes.dtype(self.plan.source_dtype).nbytes
        is_one = self.is_read_early and self.goes_straight(record, whole)
        return nest.y * width if is_one and size(whole) * width >= _STRAIGHT_NBYTES else None

    def goes_straight(self, record: int, nest: Nest) -> bool:
        """Return whether a copy's elements go to their places unchanged and side by side."""
        if self.plan.source_dtype != self.plan.output.dtype or record in self.plan.changed:
            return False
        return not nest.loops or (len(nest.loops) == 1 and nest.loops[0][1:] == (1, 1))


def share_all(plan: Plan) -> dict[int, tuple[range]]:
    """Return shares of all windows of all files: no rank then reads all of a record to check a shared checksum."""
    return {i: (range(-(-file.output.nbytes // WINDOW_NBYTES)),) for i, file in enumerate(plan.files)}


class FileWindows(JoinedFile):
    """The windows of one output file that are made here, and how many of them are still to be written.

    `share` has ranges of these windows, rising; all if None.
    """

    def __init__(self, plan: FilePlan, index: int, share: Sequence[range] | None = None) -> None:
        super().__init__(plan.output, index)
        self.plan = plan
        self.is_whole = share is None
        self.window_nbytes = plan.output.window_nbytes or WINDOW_NBYTES
        self.count = -(-plan.output.nbytes // self.window_nbytes)
        self.share = (range(self.count),) if share is None else tuple(share)
        self.remaining = sum(map(len, self.share))
        self._lock = threading.Lock()
        self._offsets = [tensor.output.offset for tensor in plan.tensors]
        self._sizes = [tensor.output.nbytes for tensor in plan.tensors]
        self._dense: dict[int, IntArray | None] = {}
        self._fragment_offsets = [offset for offset, _ in plan.output.fragments]
        self._prepared: dict[int, PreparedTensor] = {}

    def runs(self, stretch: int, unit: int) -> Iterator[range]:
        """Yield the windows in order, in runs of at most `stretch`, none of which goes beyond a multiple of `unit`."""
        for share in self.share:
            low = share.start
            while low < share.stop:
                high = min(low + stretch, share.stop, (low // unit + 1) * unit)
                yield range(low, high)
                low = high

    def span(self, windows: range) -> tuple[int, int]:
        """Return the first byte of a run of windows, and the one after its last."""
        return windows.start * self.window_nbytes, min(windows.stop * self.window_nbytes, self.plan.output.nbytes)

    def portions(self, windows: range) -> Iterator[Portion]:
        """Yield the parts of tensors in a run of windows, in the file's order."""
        first, last = self.span(windows)
        # The tensor before the first one that begins here may reach into the run.
        for index in range(max(0, bisect_left(self._offsets, first) - 1), len(self._offsets)):
            offset = self._offsets[index]
            if offset >= last:
                break
            start, stop = max(first, offset), min(last, offset + self._sizes[index])
            if start < stop:
                width = dtypes.dtype(self.plan.tensors[index].output.dtype).nbytes
                yield Portion(index, (start - offset) // width, (stop - offset) // width, start - first, stop - first)

    def is_straight(self, tensor: int) -> bool:
        """Return whether each copy's elements go to their places side by side, unchanged or cast at most."""
        plan = self.plan.tensors[tensor]
        is_plain = plan.update is None and not plan.changed and not plan.output.is_padded
        return is_plain and self._find_dense(plan.copies.nests) is not None

    def _find_dense(self, nests: NestTable) -> IntArray | None:
        """Return the (x, y, number of elements) of nests that are all runs; None if some are not."""
        # By its id: the plan keeps the table, which tensors alike share.
        if id(nests) not in self._dense:
            n, steps = nests.sizes, nests.loops[:, :, 1:]
            is_dense = ((steps == 1).all(axis=2) | (nests.loops[:, :, 0] == 1)).all() and nests.loops.shape[1] < 2
            self._dense[id(nests)] = np.stack((nests.x, nests.y, n)) if is_dense else None
        return self._dense[id(nests)]

    def has_many(self, portions: Iterable[Portion]) -> bool:
        """Return whether a run of windows has so many copies, by a guess, that they are better taken as a table."""
        # Half a tensor has about half of its copies.
        plans, sizes = self.plan.tensors, self._sizes
        return sum(len(plans[i].copies.record) * (b - a) // sizes[i] for i, _, _, a, b in portions) >= _MANY_COPIES

    def stretches(self, portions: Iterable[Portion], room: int = 0) -> Iterator[tuple[Sequence[Portion], Stretches]]:
        """Yield portions of straight tensors in groups of a bounded number of copies, each with the table of these.

        With a room, they are placed in so many bytes one after another, as they are stored; longer ones are left out.
        """
        group: list[Portion] = []
        found: list[tuple[IntArray, IntArray]] = []
        places: list[tuple[int, int, int, int, int]] = []
        count = end = 0
        for portion in portions:
            plan = self.plan.tensors[portion.tensor]
            width = dtypes.dtype(plan.source_dtype).nbytes
            nbytes = (portion.high - portion.low) * width
            if group and (count >= _MOST_STRETCHES or 0 < room < end + nbytes):
                yield group, _join_stretches(found, places)
                group, found, places, count, end = [], [], [], 0, 0
            if room:
                if nbytes > room:
                    continue
                portion = portion._replace(start=end, stop=end + nbytes)
                end += nbytes
            dense, record = self._find_dense(plan.copies.nests), plan.copies.record
            assert dense is not None, "a tensor that is copied directly consists of runs"
            if nbytes < width * plan.output.num_elements:
                # Sorted by y, which the copies cover.
                first, last = np.searchsorted(dense[1], (portion.low + 1, portion.high))
                dense, record = dense[:, first - 1 : last], record[first - 1 : last]
            group.append(portion)
            found.append((record, dense))
            places.append((len(record), width, portion.start - portion.low * width, portion.start, portion.stop))
            count += len(record)
        if group:
            yield group, _join_stretches(found, places)

    def fragments(self, windows: range) -> Iterator[tuple[int, bytes]]:
        """Yield (first byte in the run, bytes) of the fragments between tensors."""
        first, last = self.span(windows)
        for index in range(max(0, bisect_left(self._fragment_offsets, first) - 1), len(self._fragment_offsets)):
            offset, data = self.plan.output.fragments[index]
            if offset >= last:
                break
            start, stop = max(first, offset), min(last, offset + len(data))
            if start < stop:
                yield start - first, data[start - offset : stop - offset]

    def add(self, tensor: int, start: int, data: memoryview) -> PlacedBytes | None:
        """Add a tensor's finished bytes; return the bytes that depend on its CRC alone, once that is complete."""
        self.digests[tensor].add(start, data)
        if self._crcs:
            # Outside the lock: the bytes take the time, joining does not.
            crc = isal_zlib.crc32(data)
            with self._lock:
                self._crcs[tensor].add(start, start + len(data), crc)
                whole = self._crcs[tensor].value
            # Each byte is added once, so only the call that adds the last ones sees a value.
            if whole is not None and self.plan.output.trailer is not None:
                return self.plan.output.trailer(tensor, whole)
        return None

    def part(self) -> FilePart:
        """Return the digests and CRCs of the share's windows, which must all be done."""
        digests = ((tensor, digest.part()) for tensor, digest in enumerate(self.digests))
        known = tuple((tensor, part) for tensor, part in digests if part.blocks or part.edges)
        crcs = ((tensor, part) for tensor, crc in enumerate(self._crcs) for part in crc.parts)
        return FilePart(self.index, known, tuple((tensor, *part) for tensor, part in crcs if part[0] < part[1]))

    def prepare(self, tensor: int) -> PreparedTensor:
        """Return a tensor's copies, ready for cutting; the last few are cached, as windows come in order."""
        ready = self._prepared.get(tensor)
        if ready is None:
            ready = PreparedTensor(self.plan.tensors[tensor])
            if len(self._prepared) >= _PREPARED_TENSORS:
                # The first tensor is the least likely to be in another window; another thread may have removed it.
                self._prepared.pop(min(self._prepared), None)
            self._prepared[tensor] = ready
        return ready

    def reads(self, windows: range) -> Iterator[Read]:
        """Yield everything that a run of windows reads."""
        for portion in self.portions(windows):
            tensor = self.prepare(portion.tensor)
            width = dtypes.dtype(tensor.plan.source_dtype).nbytes
            for copies in (tensor.copies, tensor.replicas):
                for row, record, nest in copies.cut(portion.low, portion.high):
                    elements = 1 + sum((count - 1) * step for count, step, _ in nest.loops)
                    place = tensor.find_place(row, record, nest) if copies is tensor.copies else None
                    place = None if place is None else portion.start + place
                    yield Read(record, nest.x * width, elements * width, place)

    @property
    def records(self) -> IntArray:
        """Source records that are read for the file's tensors, rising."""
        read = [copies.record for tensor in self.plan.tensors for copies in tensor.read if len(copies)]
        return np.flatnonzero(np.bincount(np.concatenate([int_array(()), *read])))


def _join_stretches(
    found: Sequence[tuple[IntArray, IntArray]], places: Sequence[tuple[int, int, int, int, int]]
) -> Stretches:
    """Return the stretches of portions: their records, and (x, y, elements) of their copies.

    `places` have the number of copies, the width of an element, the byte of the run where the tensor begins or would,
    and the first and last byte of the run that are the portion's.
    """
    counts, *each = np.array(places, dtype=np.int64).T
    width, base, first, last = (np.repeat(column, counts) for column in each)
    x, y, n = np.concatenate([dense for _, dense in found], axis=1) * width
    begin, end = np.maximum(base + y, first), np.minimum(base + y + n, last)
    return Stretches(np.concatenate([record for record, _ in found]), x + begin - base - y, begin, end - begin)


class Job(NamedTuple):
    """A run of windows to make."""

    file: FileWindows
    windows: range
    is_placed: bool = False
    """Whether they are made in memory of the target."""
    early: Sequence[Read] = ()
    """Reads that go straight to their places, before the windows are made there."""
    others: Sequence[Read] = ()
    """All other reads, where the source fetches ahead."""


class FileHashes:
    """Hashes the files that one execution makes whole; any thread may add a window.

    SHA-256 takes bytes in their order alone. A thread with a later window waits for its turn: windows are given out in
    order, so some other thread has the one before.
    """

    def __init__(self) -> None:
        self._states = {}  # type: ignore[var-annotated]  # hashlib's type has no public name
        self._next: dict[int, int] = {}
        self._turn = threading.Condition()
        self._is_aborted = False

    def add(self, file: int, windows: range, data: memoryview) -> None:
        """Add windows of a file, as they are written; wait until all before are added, or another thread failed."""
        import hashlib  # files that are not signed do not need it

        with self._turn:
            self._turn.wait_for(lambda: self._is_aborted or self._next.get(file, 0) == windows.start)
            if self._is_aborted:
                return
            state = self._states.setdefault(file, hashlib.sha256())
        state.update(data)  # outside of both locks: the next window's thread still waits, others work
        with self._turn:
            self._next[file] = windows.stop
            self._turn.notify_all()

    def abort(self) -> None:
        """Let all waiting threads go on: one has failed."""
        with self._turn:
            self._is_aborted = True
            self._turn.notify_all()

    def of_file(self, file: int, nbytes: int) -> bytes | None:
        """Return the hash of a file of that size; None if another rank or run made some of its windows."""
        is_whole = self._next.get(file, 0) == -(-nbytes // WINDOW_NBYTES)
        return self._states[file].digest() if is_whole and file in self._states else None
