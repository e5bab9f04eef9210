"""Checksums of source records and digests of tensors, from the reads and windows of a gather, in any order."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash
from isal import isal_zlib

from xrank.engine.buffers import Source
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable

BoolArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


class JoinedCrc32:
    """The CRC-32 of a stretch of bytes, joined from the CRCs of its parts as neighbours appear."""

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
        # Both neighbours may touch: the part after is joined already, so this joins all three.
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

    Args:
        records: the source's records.
        mismatch: called with (record, computed CRC) if that is not the recorded one.
        left_open: mask of records of which other ranks read parts too. Their CRCs are kept for `take_parts` and not
            compared. None: there are none.
    """

    def __init__(
        self, records: RecordTable, mismatch: Callable[[int, int], None], *, left_open: BoolArray | None = None
    ) -> None:
        self._nbytes = records.nbytes
        self._expected = records.crc32
        self._mismatch = mismatch
        self._left_open = left_open
        self._parts: dict[int, JoinedCrc32] = {}
        self._checked: set[int] = set()
        self._lock = threading.Lock()

    @property
    def num_checked(self) -> int:
        """Number of records whose every byte was compared with a recorded checksum."""
        return len(self._checked)

    def wants(self, record: int) -> bool:
        """Return whether a record has a checksum that was not compared yet."""
        return self._expected[record] != NO_CHECKSUM and record not in self._checked

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
            if record in self._checked:
                return
            part = self._part(record)
            part.add(start, end, crc)  # an overlapping part is left out, and `missing` returns its bytes
            value = None if self._is_open(record) else part.value
            if value is None:
                return
            del self._parts[record]
            self._checked.add(record)
            # Counted before the comparison: a mismatch raises, and no other thread compares the record again.
            if value != self._expected[record]:
                self._mismatch(record, value)

    def _is_open(self, record: int) -> bool:
        return self._left_open is not None and bool(self._left_open[record])

    def _part(self, record: int) -> JoinedCrc32:
        part = self._parts.get(record)
        if part is None:
            part = self._parts[record] = JoinedCrc32(int(self._nbytes[record]))
        return part

    def missing(self, records: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return (record, start, end) of all bytes of these records that were not added yet; open records excluded."""
        with self._lock:
            wanted = [record for record in records if self.wants(record) and not self._is_open(record)]
            return [(record, *gap) for record in wanted for gap in self._part(record).gaps()]

    def take_parts(self, records: Iterable[int]) -> list[tuple[int, int, int, int]]:
        """Remove and return (record, start, end, CRC) of all parts of these records that were not compared."""
        with self._lock:
            known = [(record, self._parts.pop(record)) for record in records if record in self._parts]
        return [(record, *part) for record, parts in known for part in parts.parts]


def read_rest(checksums: RecordChecksums, source: Source, records: Iterable[int], staging: memoryview) -> None:
    """Read the bytes of these records that no window needed (padding, left-out parts), for their checksums.

    Raises:
        CorruptError: raised by the source, or by the checksums' `mismatch`.
    """
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
            if stretches and stretches[-1][1] == first:
                stretches[-1] = stretches[-1][0], last
            else:
                stretches.append((first, last))
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
