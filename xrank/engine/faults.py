"""The errors of an execution, each with tensor, rank, file and range."""

from __future__ import annotations

import mmap
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from xrank import dtypes
from xrank.engine.buffers import Source
from xrank.engine.casts import copy_same, cut_tiles
from xrank.engine.planner import Copies, Plan, TensorPlan
from xrank.engine.windows import BoolArray, RecordChecksums, read_rest
from xrank.errors import AGAIN, ContradictionError, CorruptError, UsageError, XrankError, either, needs, option
from xrank.layout.coverage import range_text
from xrank.layout.nests import restrict, span, swap
from xrank.layout.stored_model import StoredModel


class Differences:
    """Counts elements of that type whose bytes differ; stretches are added in the order of their addresses."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype
        self.count = 0
        self.first = -1
        """Address of the first element that differs; -1 while none does."""
        self._largest = 0.0
        self._incomparable = 0

    def add(
        self,
        start: int,
        ours: bytearray | memoryview,
        theirs: bytearray | memoryview,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Compare the elements from address `start` on, or those of them that `mask` selects."""
        kind = np.dtype(f"u{dtypes.dtype(self._dtype).nbytes}")
        is_different: npt.NDArray[Any] = np.frombuffer(ours, kind) != np.frombuffer(theirs, kind)
        different = np.flatnonzero(is_different if mask is None else is_different & mask)
        if not len(different):
            return
        if self.first < 0:
            self.first = start + int(different[0])
        self.count += len(different)
        dtype = dtypes.numpy_dtype(self._dtype)
        # The one type into which all others, C64 too, are converted.
        a, b = (np.frombuffer(data, dtype)[different].astype(np.complex128) for data in (ours, theirs))
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b)
        self._incomparable += int(np.count_nonzero(np.isnan(apart)))
        self._largest = max(self._largest, float(np.nanmax(apart, initial=0.0)))

    def describe(self, total: int, where: str) -> str:
        """Describe the differences among `total` elements, the first of which is at `where`."""
        by_nan = f", {self._incomparable:,} of them by NaN" if self._incomparable else ""
        found = f"{self.count:,} of {total:,} elements differ, the first at {where}, by at most {self._largest:g}"
        return found + by_nan


COPY = "copy the file again from where it was written, or use a different checkpoint"
"""The next step for a file with damaged bytes."""
_CHUNK_NBYTES = 1 << 20


def _file_of(plan: Plan, record: int) -> str:
    return plan.source.files[int(plan.source.records.file[record])].path


def make_checksums(plan: Plan, *, left_open: BoolArray | None = None) -> RecordChecksums:
    """Return the state of a plan's records, none of which is read; see `RecordChecksums`."""

    def refuse(record: int, crc: int) -> NoReturn:
        raise checksum_error(plan, record, crc)

    return RecordChecksums(plan.source.records, refuse, left_open=left_open)


def checksum_error(plan: Plan, record: int, crc: int) -> CorruptError:
    """Return the error for a record whose bytes do not have the CRC-32 that its format recorded."""
    path, offset = _file_of(plan, record), int(plan.source.records.offset[record])
    got = f"crc32 {crc:08x} of {int(plan.source.records.nbytes[record]):,} bytes"
    want = f"crc32 {int(plan.source.records.crc32[record]):08x}, as recorded by their writer"
    used = any((c.record == record).any() for tensor in plan.tensors for c in tensor.read)
    owner = find_owner(plan.source, record) if used else {}
    what, next_step = f"checksum of {path} at byte {offset:,} is wrong", COPY
    if owner:
        name, rank, where = owner["tensor"], owner["rank"], owner["index_range"]
        what = f"{name}, {where}: checksum of rank {rank}'s {path} at byte {offset:,} is wrong"
        next_step = f"let rank {rank} write again, or copy the file again, then {AGAIN}"
    return CorruptError(what, file=path, got=got, want=want, next_step=next_step, **owner)


def find_owner(model: StoredModel, record: int) -> dict[str, Any]:
    """Return the parts of an error about the first tensor with a piece in a record: its name, range and rank.

    Empty if no tensor has one.
    """
    for shard in model.shards:
        rows = np.flatnonzero(shard.record == record)
        if len(rows):
            nest = swap(shard.nests[int(rows[0])])
            where = range_text(shard.shape, nest.x, nest.x + span(nest.loops) - 1)
            return {"tensor": shard.name, "rank": int(shard.rank[rows[0]]), "index_range": where}
    return {}


def overflow_error(plan: TensorPlan, rank: int, value: float) -> UsageError:
    """Return the error for a finite value that the requested cast would make infinite."""
    name, dtype = plan.output.name, plan.output.dtype
    keep = f"give {option('keep_fp32')} this tensor's name"
    return UsageError(
        f"{name}: {value:g} does not fit {dtype}",
        tensor=name,
        rank=rank,
        got=f"{value:g} in {plan.source_dtype} on rank {rank}",
        want=f"a value that is finite in {dtype}",
        next_step=either(f"use {option('dtype', 'bf16')}", f"use {option('dtype', 'keep')}", keep),
    )


def difference_error(plan: Plan, tensor: TensorPlan, row: int, source: Source) -> XrankError:
    """Return the error for a replica that differs, with number and place; for corrupt bytes, the checksum error.

    Reads both pieces once more, in chunks.
    """
    nest, name = swap(tensor.replicas.nests[row]), tensor.output.name
    low, high = nest.x, nest.x + span(nest.loops)
    rank = int(tensor.replicas.rank[row])
    # Corrupt bytes first: they explain the difference, and "make the ranks equal" would be the wrong advice.
    staging = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    for copies, rows in ((tensor.replicas, [row]), (tensor.copies, range(len(tensor.copies)))):
        read = [int(copies.record[i]) for i in rows if restrict(swap(copies.nests[i]), low, high)]
        try:
            read_rest(make_checksums(plan), source, read, staging)
        except CorruptError as corrupt:
            return corrupt
    width = dtypes.dtype(tensor.source_dtype).nbytes
    step = _CHUNK_NBYTES // width
    found = Differences(tensor.source_dtype)
    for start in range(low, high, step):
        stop = min(start + step, high)
        ours, theirs = bytearray((stop - start) * width), bytearray((stop - start) * width)
        mask = _gather(tensor.replicas, row, start, stop, width, source, theirs)
        # The replica may span several copies, as a tied tensor may be cut differently.
        for other in range(len(tensor.copies)):
            _gather(tensor.copies, other, start, stop, width, source, ours)
        found.add(start, ours, theirs, mask)
    if not found.count:
        return ContradictionError(
            f"{name}: changed while it was being read",
            tensor=name,
            rank=rank,
            got="copies that differed, and are equal now",
            want="the same values until all of it is read",
            next_step=f"do not write to the source meanwhile, then {AGAIN}",
        )
    first = found.first
    copies = tensor.copies
    holding = (i for i in range(len(copies)) if restrict(swap(copies.nests[i]), first, first + 1))
    other_rank = next((int(copies.rank[i]) for i in holding), -1)
    address = tensor.output.global_address(first)
    where = range_text(tensor.output.global_shape, address, address)
    record, total = int(tensor.replicas.record[row]), int(tensor.replicas.nests.sizes[row])
    path, tied = _file_of(plan, record), tensor.tied.get(record)
    message = f"{name}: rank {rank} holds different values than rank {other_rank}"
    want = "equal replicas"
    next_step = either(
        "find out why the ranks diverged, and make them equal",
        f"give {option('replicas', 'pick')}, which takes the lowest rank's and lists the differences",
        needs("model_or_state_dict", f"if they are parts of one tensor, describe its layout with {option('layouts')}"),
    )
    if tied is not None:
        message = f"{tied} is tied to {name}, but rank {rank}'s differs from rank {other_rank}'s {name}"
        want = "equal tensors"
        alias = f"the [alias] of {option('layouts')}"
        next_step = f"if they are two tensors, correct tie_word_embeddings in config.json, or {alias}"
    facts: dict[str, Any] = {"tensor": name, "rank": rank, "file": path, "index_range": where}
    return ContradictionError(message, got=found.describe(total, where), want=want, next_step=next_step, **facts)


def _gather(
    copies: Copies, row: int, low: int, high: int, width: int, source: Source, into: bytearray
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Copy one piece's elements of [low, high) to `into`; return a mask of the copied elements."""
    staging = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    have = np.zeros(high - low, dtype=np.uint8)
    target, marks = memoryview(into), have.data
    record = int(copies.record[row])
    for part in restrict(swap(copies.nests[row]), low, high):
        nest = part._replace(x=part.y, y=part.x - low, loops=tuple((n, ys, xs) for n, xs, ys in part.loops))
        for tile in cut_tiles(nest, _CHUNK_NBYTES // width):
            data = source.fetch(record, tile.start * width, tile.length * width, staging)
            copy_same(data, target, tile.target, tile.loops, width)
            copy_same(memoryview(b"\1" * tile.length), marks, tile.target, tile.loops, 1)
    return have.astype(np.bool_)
