"""Replicas in ranks' memories: compared by digests that each rank takes of its own, then read where it is near.

Pieces with the same destination are twins. Where each rank digests its own twins, and equal ones are proven so, a rank
may read its own in place of another's; only what has no twin, such as a tied tensor that is cut otherwise, is left to
be compared while bytes move.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import xxhash

from xrank import dtypes
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.nests import Nest, canonical, restrict, swap
from xrank.plan.buffers import Source
from xrank.plan.casts import copy_same
from xrank.plan.coverage import destination_keys
from xrank.plan.planner import Copies, FilePlan, Plan, TensorPlan
from xrank.plan.tiles import Tile, tiles

__all__ = [
    "DIGEST_NBYTES",
    "DIGEST_STAGING_NBYTES",
    "digested_tiles",
    "digests_of_twins",
    "first_different",
    "nearest",
    "to_digest",
    "twins",
]

DIGEST_NBYTES = 16
DIGEST_STAGING_NBYTES = _CHUNK_NBYTES = 1 << 20


def nearest(plan: Plan, holder: IntArray, rank: int) -> Plan:
    """Return the plan for one rank, for source whose twins are equal: it reads its own where it has one.

    Args:
        plan: as all ranks have it.
        holder: by record, who holds it.
        rank: for whom.
    """
    files = tuple(FilePlan(f.output, tuple(_nearest(tensor, holder, rank) for tensor in f.tensors)) for f in plan.files)
    return replace(plan, files=files)


def _nearest(tensor: TensorPlan, holder: IntArray, rank: int) -> TensorPlan:
    if not len(tensor.replicas):
        return tensor
    twin = twins(tensor)
    own = np.flatnonzero((twin >= 0) & (holder[tensor.replicas.record] == rank))
    own = own[holder[tensor.copies.record[twin[own]]] != rank]
    pairs = dict(zip(twin[own].tolist(), own.tolist(), strict=True))
    rows = [
        (tensor.replicas, pairs[row]) if row in pairs else (tensor.copies, row) for row in range(len(tensor.copies))
    ]
    copies = tensor.copies if not pairs else _picked(rows)
    rest = np.flatnonzero(twin < 0)
    left = Copies(tensor.replicas.rank[rest], tensor.replicas.record[rest], tensor.replicas.nests.take(rest))
    return replace(tensor, copies=copies, replicas=left)


def _picked(rows: Sequence[tuple[Copies, int]]) -> Copies:
    return Copies(
        np.array([copies.rank[row] for copies, row in rows], np.int64),
        np.array([copies.record[row] for copies, row in rows], np.int64),
        NestTable.of([copies.nests[row] for copies, row in rows]),
    )


def twins(tensor: TensorPlan) -> IntArray:
    """Return for each replica the piece of `copies` with the same destination; -1 where there is none."""
    depth = max(table.nests.loops.shape[1] for table in (tensor.copies, tensor.replicas))
    tables = [copies.nests.deepened(depth) for copies in (tensor.copies, tensor.replicas)]
    count = len(tensor.copies)
    keys = np.concatenate([destination_keys(table) for table in tables])
    _, number = np.unique(keys, axis=0, return_inverse=True)
    number = number.reshape(-1)
    row_of = np.full(int(number.max(initial=-1)) + 1, -1, np.int64)
    row_of[number[:count]] = np.arange(count)
    return row_of[number[count:]]


def _pairs(plan: Plan) -> Iterator[tuple[TensorPlan, int, int]]:
    """Yield (tensor, row of its replicas, row of its copies) of all twins that are not one place in memory."""
    for tensor in plan.tensors:
        if not len(tensor.replicas):
            continue
        for row, twin in enumerate(twins(tensor).tolist()):
            is_one = twin >= 0 and tensor.replicas.record[row] == tensor.copies.record[twin]
            if twin >= 0 and not is_one:
                yield tensor, row, twin


def to_digest(plan: Plan) -> Iterator[tuple[TensorPlan, Copies, int]]:
    """Yield every piece that has a twin, each once, in an order that follows from the plan."""
    seen: set[tuple[int, int]] = set()
    for tensor, row, twin in _pairs(plan):
        if (id(tensor), twin) not in seen:
            seen.add((id(tensor), twin))
            yield tensor, tensor.copies, twin
        yield tensor, tensor.replicas, row


def digests_of_twins(
    plan: Plan, holder: IntArray, rank: int, source: Source, cancelled: Callable[[], bool] = lambda: False
) -> bytes:
    """Return the digests, one after another, of all pieces with twins that a rank holds; `cancelled` may raise.

    A digest is of the elements in the order of the tensor's addresses, however they lie in memory.
    """
    staging = memoryview(mmap.mmap(-1, DIGEST_STAGING_NBYTES))
    window = memoryview(mmap.mmap(-1, _CHUNK_NBYTES))
    found = bytearray()
    for tensor, copies, row in to_digest(plan):
        record = int(copies.record[row])
        if holder[record] == rank:
            width = dtypes.dtype(tensor.source_dtype).nbytes
            found += _digest(copies.nests[row], record, width, source, staging, window, cancelled)
    return bytes(found)


def first_different(plan: Plan, holder: IntArray, digests: Sequence[bytes]) -> tuple[TensorPlan, int] | None:
    """Return the first tensor of which twins differ, and the row of its replicas; None where all are equal.

    Args:
        plan: what was digested.
        holder: by record, who holds it.
        digests: by rank, what `digests_of_twins` returned there.
    """
    position = [0] * len(digests)
    known: dict[tuple[int, bool, int], bytes] = {}
    for tensor, copies, row in to_digest(plan):
        rank = int(holder[copies.record[row]])
        start = position[rank]
        position[rank] += DIGEST_NBYTES
        known[id(tensor), copies is tensor.copies, row] = digests[rank][start : start + DIGEST_NBYTES]
    for tensor, row, twin in _pairs(plan):
        if known[id(tensor), False, row] != known[id(tensor), True, twin]:
            return tensor, row
    return None


def digested_tiles(nest: Nest, width: int, staging_nbytes: int) -> Iterator[tuple[int, Sequence[Tile]]]:
    """Yield (elements, what is read of them) of a piece, chunk by chunk by rising destination, as digests are taken.

    Args:
        nest: of the piece.
        width: of an element.
        staging_nbytes: of the buffer that is read to.
    """
    turned = swap(nest)
    counts = [n for n, _, _ in turned.loops]
    strides = [int(np.prod(counts[k + 1 :], dtype=np.int64)) for k in range(len(counts))]
    # The same elements, one after another where the tensor has others between them.
    loops = tuple((n, dense, ys) for (n, _, ys), dense in zip(turned.loops, strides, strict=True))
    packed = canonical(Nest(0, turned.y, loops))
    total, step = int(np.prod(counts, dtype=np.int64)), _CHUNK_NBYTES // width
    for low in range(0, total, step):
        high = min(low + step, total)
        if not packed.loops or (len(packed.loops) == 1 and packed.loops[0][1:] == (1, 1)):
            yield high - low, [Tile(packed.y + low, high - low, 0, ((high - low, 1, 1),))]
            continue
        back = (
            Nest(part.y, part.x - low, tuple((n, ys, xs) for n, xs, ys in part.loops))
            for part in restrict(packed, low, high)
        )
        yield high - low, [tile for one in back for tile in tiles(one, staging_nbytes // width)]


def _digest(
    nest: Nest,
    record: int,
    width: int,
    source: Source,
    staging: memoryview,
    window: memoryview,
    cancelled: Callable[[], bool],
) -> bytes:
    """Return the digest of a piece's elements by rising destination."""
    state = xxhash.xxh3_128()
    for count, chunk in digested_tiles(nest, width, len(staging)):
        cancelled()
        if len(chunk) == 1 and chunk[0].loops == ((count, 1, 1),):  # they stand as they are to be digested
            state.update(source.fetch(record, chunk[0].start * width, count * width, staging))
            continue
        for tile in chunk:
            data = source.fetch(record, tile.start * width, tile.length * width, staging)
            copy_same(data, window, tile.target, tile.loops, width)
        state.update(window[: count * width])
    return state.digest()
