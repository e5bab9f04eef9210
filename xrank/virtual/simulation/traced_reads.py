"""Every read of a conversion, traced through the executor's own steps without reading.

The result is exact, but tracing is slow for many windows; `counted_reads` handles those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from xrank import dtypes
from xrank.layout.nest_table import IntArray
from xrank.layout.nests import Nest
from xrank.plan.casts import cut_tiles
from xrank.plan.checksums import BoolArray, RecordChecksums
from xrank.plan.division import Division
from xrank.plan.planner import Plan
from xrank.plan.replicas import DIGEST_STAGING_NBYTES, cut_digest_tiles, list_digested, prefer_own_copies
from xrank.plan.windows import FileWindows, PreparedCopies
from xrank.virtual.simulation.traffic import FROM_FILES, Flow, RoundTraffic, build_round, count_written_nbytes


class _Read(NamedTuple):
    record: int
    start: int
    """Offset of the first byte in the record."""
    nbytes: int
    is_checked: bool
    """Whether the read contributes to the record's checksum."""


def trace_rounds(
    plan: Plan, division: Division, holder: IntArray | None, staging_nbytes: int
) -> tuple[RoundTraffic, ...]:
    """Trace the traffic of a division's ranks per round.

    Args:
        plan: the plan of all files.
        division: the division of the plan over ranks.
        holder: the rank whose memory contains each record; None if the records are in files.
        staging_nbytes: size of each worker's buffer.
    """
    num_ranks = len(division.rounds[0].shares) if division.rounds else 1
    is_alone = num_ranks == 1
    left_open = None if is_alone else division.left_open
    plans = [plan if holder is None else prefer_own_copies(plan, holder, rank) for rank in range(num_ranks)]
    checksums = [_ChecksumCoverage(plan, staging_nbytes, left_open) for _ in range(num_ranks)]
    joined = _ChecksumCoverage(plan, staging_nbytes)
    rounds = []
    for number, one in enumerate(division.rounds):
        reads: list[list[_Read]] = [[] for _ in range(num_ranks)]
        for rank, share in enumerate(one.shares):
            for index, ranges in share.items():
                file = FileWindows(plans[rank].files[index], index, ranges)
                reads[rank] += checksums[rank].record(_reads(file, ranges, staging_nbytes))
                if is_alone:  # it finishes each file alone
                    reads[rank] += checksums[rank].take_rest(file.records)
            if not is_alone:
                reads[rank] += checksums[rank].take_rest(division.find_own_records(rank, number))
                joined.join(checksums[rank], division.find_open_records(number))
        if not is_alone:
            # Rank 0 completes the records that several ranks read, as in the executor.
            reads[0] += joined.take_rest(division.find_open_records(number))
        flows = [_flow(rank, each, holder) for rank, each in enumerate(reads)]
        rounds.append(build_round(count_written_nbytes(plan, one), flows))
    return tuple(rounds)


def trace_compared_nbytes(plan: Plan, holder: IntArray, num_ranks: int) -> IntArray:
    """Trace the bytes that each rank digests of its own memory to compare replicas."""
    found = np.zeros(num_ranks, np.int64)
    for tensor, copies, row in list_digested(plan):
        width = dtypes.dtype(tensor.source_dtype).nbytes
        for _, chunk in cut_digest_tiles(copies.nests[row], width, DIGEST_STAGING_NBYTES):
            found[holder[copies.record[row]]] += sum(tile.length for tile in chunk) * width
    return found


class _ChecksumCoverage:
    """The bytes of records that one rank has read for their checksums."""

    def __init__(self, plan: Plan, staging_nbytes: int, left_open: BoolArray | None = None) -> None:
        self._checksums = RecordChecksums(plan.source.records, lambda record, crc: None, left_open=left_open)
        self._step = staging_nbytes

    def record(self, reads: Iterable[_Read]) -> Iterator[_Read]:
        """Record reads and pass them on."""
        for read in reads:
            if read.is_checked:
                self._checksums.join(read.record, read.start, read.start + read.nbytes, 0)
            yield read

    def join(self, other: _ChecksumCoverage, records: Sequence[int]) -> None:
        """Add the coverage of another rank for these records."""
        for record, start, end, crc in other._checksums.take_parts(records):
            self._checksums.join(record, start, end, crc)

    def take_rest(self, records: Sequence[int]) -> list[_Read]:
        """Return reads of all bytes of these records that were not read before."""
        found = [
            _Read(record, position, min(self._step, stop - position), True)
            for record, start, stop in self._checksums.missing(records)
            for position in range(start, stop, self._step)
        ]
        return list(self.record(found))


def _reads(file: FileWindows, ranges: Sequence[range], staging_nbytes: int) -> Iterator[_Read]:
    """Yield the reads of a worker for windows of a file."""
    for window in chain(*ranges):
        for portion in file.portions(range(window, window + 1)):
            tensor = file.prepare(portion.tensor)
            width = dtypes.dtype(tensor.plan.source_dtype).nbytes
            is_cast = tensor.plan.source_dtype != tensor.plan.output.dtype
            for copies, may_be_straight in ((tensor.copies, not is_cast), (tensor.replicas, False)):
                yield from _cut(copies, portion.low, portion.high, width, staging_nbytes, may_be_straight)


def _cut(
    copies: PreparedCopies, low: int, high: int, width: int, staging_nbytes: int, may_be_straight: bool
) -> Iterator[_Read]:
    for _, record, nest in copies.cut(low, high):
        length = _run_length(nest)
        if may_be_straight and length:  # the worker reads directly into the output
            yield _Read(record, nest.x * width, length * width, True)
            continue
        for tile in cut_tiles(nest, staging_nbytes // width):
            yield _Read(record, tile.start * width, tile.length * width, tile.is_dense)


def _run_length(nest: Nest) -> int:
    """Return the number of elements if both sides of a nest are one contiguous run, otherwise 0."""
    if not nest.loops:
        return 1
    return nest.loops[0][0] if len(nest.loops) == 1 and nest.loops[0][1:] == (1, 1) else 0


def _flow(rank: int, reads: Sequence[_Read], holder: IntArray | None) -> Flow:
    record = np.array([read.record for read in reads], np.int64)
    giver = np.full(len(reads), FROM_FILES, np.int64) if holder is None else holder[record]
    nbytes = np.array([read.nbytes for read in reads], np.int64)
    return Flow(np.full(len(reads), rank, np.int64), giver, nbytes, np.ones(len(reads), np.int64))
