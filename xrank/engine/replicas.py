"""Replicas in ranks' memories: each rank digests its own, and then reads its own copies.

Pieces with the same destination are twins. Once their digests have proven them equal, a rank may read its own twin in
place of another rank's. Replicas without a twin, such as those of a tied tensor with other cuts, are compared while
bytes move.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Literal, TypeAlias

import numpy as np
import xxhash
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.buffers import Source
from xrank.engine.casts import Tile, copy_same, cut_tiles
from xrank.engine.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.layout.coverage import destination_keys
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.nests import Nest, canonical, restrict, swap

DIGEST_NBYTES = 16
DIGEST_STAGING_NBYTES = _CHUNK_NBYTES = 1 << 20


def prefer_own_copies(plan: Plan, holder: IntArray, rank: int) -> Plan:
    """Return the plan for one rank of a source with equal twins: it reads its own twin of a piece if it has one.

    `holder` has by record the rank that holds it.
    """

    def choose(number: int, tensor: TensorPlan, twin: IntArray) -> dict[int, int]:
        own = np.flatnonzero((twin >= 0) & (holder[tensor.replicas.record] == rank))
        # A copy in the rank's own memory needs no exchange.
        own = own[holder[tensor.copies.record[twin[own]]] != rank]
        return dict(zip(twin[own].tolist(), own.tolist(), strict=True))

    return _choose_twins(plan, choose, keeps_others=True)


def spread_copies(plan: Plan, number: int) -> Plan:
    """Return the plan for one reader of several: readers of neighboring numbers read different twins of a piece.

    One reader's pieces are spread, too: ranks that hold the same serve equal shares. The result has no replicas.
    """

    def choose(tensor_number: int, tensor: TensorPlan, twin: IntArray) -> dict[int, int]:
        rows_of: dict[int, list[int]] = {}
        for row, copy in enumerate(twin.tolist()):
            rows_of.setdefault(copy, []).append(row)
        turns = ((copy, rows, (number + tensor_number) % (len(rows) + 1)) for copy, rows in rows_of.items())
        return {copy: rows[turn - 1] for copy, rows, turn in turns if turn and copy >= 0}

    return _choose_twins(plan, choose, keeps_others=False)


def _choose_twins(
    plan: Plan, choose: Callable[[int, TensorPlan, IntArray], dict[int, int]], *, keeps_others: bool
) -> Plan:
    """Read replicas in place of copies: `choose` returns row of the copy -> row of its twin, by tensor and twins."""
    numbers = count()

    def apply(tensor: TensorPlan) -> TensorPlan:
        number = next(numbers)
        if not len(tensor.replicas):
            return tensor
        copies, twin = tensor.copies, find_twins(tensor)
        chosen = choose(number, tensor, twin)
        if chosen:
            whole, table = range(len(copies)), tensor.replicas
            rows = [(table, chosen[row]) if row in chosen else (tensor.copies, row) for row in whole]
            copies = Copies(
                np.array([each.rank[row] for each, row in rows], np.int64),
                np.array([each.record[row] for each, row in rows], np.int64),
                NestTable.from_nests([each.nests[row] for each, row in rows]),
            )
        rest = np.flatnonzero((twin < 0) & keeps_others)
        return replace(tensor, copies=copies, replicas=tensor.replicas.take(rest))

    return replace(plan, files=tuple(FilePlan(file.output, tuple(map(apply, file.tensors))) for file in plan.files))


def find_twins(tensor: TensorPlan) -> IntArray:
    """Return for each replica the row of `copies` with the same destination; -1 without one."""
    depth = max(table.nests.loops.shape[1] for table in (tensor.copies, tensor.replicas))
    tables = [copies.nests.with_depth(depth) for copies in (tensor.copies, tensor.replicas)]
    count = len(tensor.copies)
    keys = np.concatenate([destination_keys(table) for table in tables])
    _, number = np.unique(keys, axis=0, return_inverse=True)
    # numpy 2.0 returns the inverse as a column.
    number = number.reshape(-1)
    row_of = np.full(int(number.max(initial=-1)) + 1, -1, np.int64)
    row_of[number[:count]] = np.arange(count)
    return row_of[number[count:]]


def _pairs(plan: Plan) -> Iterator[tuple[TensorPlan, int, int]]:
    """Yield (tensor, row of its replicas, row of its copies) of all twins that are distinct memory."""
    for tensor in plan.tensors:
        for row, twin in enumerate(find_twins(tensor).tolist()) if len(tensor.replicas) else ():
            if twin >= 0 and tensor.replicas.record[row] != tensor.copies.record[twin]:
                yield tensor, row, twin


def list_digested(plan: Plan) -> Iterator[tuple[TensorPlan, Copies, int]]:
    """Yield every piece that has a twin once, in an order that follows from the plan."""
    seen: set[tuple[int, int]] = set()
    for tensor, row, twin in _pairs(plan):
        # A copy has a pair for each of its replicas. The plan keeps its tensors alive, so their ids stay distinct.
        if (id(tensor), twin) not in seen:
            seen.add((id(tensor), twin))
            yield tensor, tensor.copies, twin
        yield tensor, tensor.replicas, row


def digest_twins(
    plan: Plan, holder: IntArray, rank: int, source: Source, cancelled: Callable[[], bool] = lambda: False
) -> bytes:
    """Return the concatenated digests of all pieces with twins that a rank holds; `cancelled` may raise.

    A digest covers the elements in the order of the tensor's addresses, whatever their order in memory.
    """
    staging = memoryview(mmap.mmap(-1, DIGEST_STAGING_NBYTES))
    window = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    found = bytearray()
    for tensor, copies, row in list_digested(plan):
        record, width = int(copies.record[row]), dtypes.dtype(tensor.source_dtype).nbytes
        if holder[record] != rank:
            continue
        state = xxhash.xxh3_128()
        for length, chunk in cut_digest_tiles(copies.nests[row], width, len(staging)):
            cancelled()
            if len(chunk) == 1 and chunk[0].loops == ((length, 1, 1),):  # contiguous and in order: no copy is needed
                state.update(source.fetch(record, chunk[0].start * width, length * width, staging))
                continue
            for tile in chunk:
                data = source.fetch(record, tile.start * width, tile.length * width, staging)
                copy_same(data, window, tile.target, tile.loops, width)
            state.update(window[: length * width])
        found += state.digest()
    return bytes(found)


def find_different_twin(plan: Plan, holder: IntArray, digests: Sequence[bytes]) -> tuple[TensorPlan, int] | None:
    """Return the first tensor with twins that differ, and the row of its replicas; None if all are equal.

    `digests` has by rank the bytes that `digest_twins` returned there.
    """
    position = [0] * len(digests)
    known: dict[tuple[int, bool, int], bytes] = {}
    for tensor, copies, row in list_digested(plan):
        rank = int(holder[copies.record[row]])
        # Each rank digested its own pieces in the order of the plan: its next digest is of this piece.
        start = position[rank]
        position[rank] += DIGEST_NBYTES
        known[id(tensor), copies is tensor.copies, row] = digests[rank][start : start + DIGEST_NBYTES]
    for tensor, row, twin in _pairs(plan):
        if known[id(tensor), False, row] != known[id(tensor), True, twin]:
            return tensor, row
    return None


def cut_digest_tiles(nest: Nest, width: int, staging_nbytes: int) -> Iterator[tuple[int, Sequence[Tile]]]:
    """Yield (number of elements, their reads) for each chunk of a piece, by rising destination.

    An element has `width` bytes, and a read at most `staging_nbytes`.
    """
    turned = swap(nest)
    counts = [n for n, _, _ in turned.loops]
    strides = [int(np.prod(counts[k + 1 :], dtype=np.int64)) for k in range(len(counts))]
    # The same elements with consecutive destinations, without those that the tensor has in between.
    loops = tuple((n, dense, ys) for (n, _, ys), dense in zip(turned.loops, strides, strict=True))
    packed = canonical(Nest(0, turned.y, loops))
    total, step = int(np.prod(counts, dtype=np.int64)), _CHUNK_NBYTES // width
    for low in range(0, total, step):
        high = min(low + step, total)
        if not packed.loops or (len(packed.loops) == 1 and packed.loops[0][1:] == (1, 1)):
            yield high - low, [Tile(packed.y + low, high - low, 0, ((high - low, 1, 1),))]
            continue
        parts = restrict(packed, low, high)
        back = (Nest(one.y, one.x - low, tuple((n, ys, xs) for n, xs, ys in one.loops)) for one in parts)
        yield high - low, [tile for one in back for tile in cut_tiles(one, staging_nbytes // width)]


ReplicaChoice: TypeAlias = Literal["verify", "pick"]
