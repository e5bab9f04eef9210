"""Arithmetic of ZeRO: where each weight's elements lie in the ranks' flat buffers, in one array per tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from xrank.layout.nest_table import IntArray, NestTable
from xrank.plan.source import StoredShard
from xrank.readers.deepspeed.flat_rows import FlatTensors

DEALS = "round_robin_gradients"
"""The option of ZeRO 1 and 2 that deals parameters to ranks in turn."""


def piece_numel(numel: int, num_ranks: int) -> int:
    """Return the number of elements, with padding, that each rank has of a tensor in stage 3."""
    return -(-numel // num_ranks)


def locate_interleaved(
    name: str, shape: tuple[int, ...], flats: FlatTensors, columns: Sequence[int], offset: int = 0
) -> StoredShard:
    """Return a tensor of stage 3. It is padded to a multiple of the ranks; each rank's stream has an equal piece.

    Args:
        name: the tensor's name.
        shape: global shape.
        flats: the ranks' sub-groups.
        columns: the sub-groups that make up a rank's stream, in order; each has equal length on all ranks.
        offset: first element of the tensor's piece in the stream.
    """
    num_ranks, numel = len(flats.record), prod(shape)
    piece = piece_numel(numel, num_ranks)
    ranks = np.arange(num_ranks, dtype=np.int64)
    parts: list[tuple[IntArray, ...]] = []
    begin, dtype = 0, None
    for column in columns:
        end = begin + int(flats.length[0, column])
        # A piece may cross the border of two sub-groups: take the part of it in this one.
        low, high = max(begin, offset), min(end, offset + piece)
        if low < high:
            dtype = dtype or flats.dtypes[column]
            y = ranks * piece + (low - offset)
            # Elements past the tensor's end are padding.
            count = np.minimum(numel - y, high - low)
            parts.append((ranks, flats.record[:, column], flats.start[:, column] + (low - begin), y, count))
        begin = end
    dtype = dtype or flats.dtypes[columns[0]]
    return _shard(name, dtype, shape, parts)


def partition_numel(total: int, lengths: Sequence[int]) -> int | None:
    """Return the elements of a rank's partition of a group in stages 1 and 2; None if the lengths fit no rule.

    A group is padded to a multiple of twice the ranks (before version 0.3.16: of the ranks) and cut into equal
    partitions. Newer versions leave the padding at its end out of the file; `BF16_Optimizer` still stores it.

    Args:
        total: elements of the group, without the padding at its end.
        lengths: number of elements that each rank stored.
    """
    num_ranks = len(lengths)
    for factor in (2, 1):
        size = factor * -(-total // (factor * num_ranks))
        # Without stored padding the last ranks' partitions are shorter, down to empty.
        lean = [max(0, min(size, total - rank * size)) for rank in range(num_ranks)]
        if list(lengths) in (lean, [size] * num_ranks):
            return size
    return None


def stretches(shapes: Sequence[tuple[int, ...]], paddings: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return (first element, one past the last) of each tensor of a group in stages 1 and 2."""
    found, position = [], 0
    for number, shape in enumerate(shapes):
        found.append((position, position + prod(shape)))
        position = found[-1][1] + (paddings[number] if paddings is not None else 0)
    return found


def undo_dealing(shapes: Mapping[str, tuple[int, ...]], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return a group's shapes in the order before `DEALS` (stage_1_and_2.py: _round_robin_reorder)."""
    # Rank r was dealt parameters r, r + ranks, r + 2 * ranks, ...
    dealt = [number for rank in range(num_ranks) for number in range(rank, len(shapes), num_ranks)]
    return {name: shape for _, (name, shape) in sorted(zip(dealt, shapes.items(), strict=True))}


def locate_successive(
    name: str, shape: tuple[int, ...], flats: FlatTensors, column: int, size: int, first: int
) -> StoredShard:
    """Return a tensor of stages 1 and 2: one range of a group's flat buffer, which is cut into equal partitions.

    Args:
        name: the tensor's name.
        shape: global shape.
        flats: the ranks' groups.
        column: the group.
        size: elements of a partition.
        first: the tensor's first element in the flat buffer.
    """
    end = first + prod(shape)
    if first == end:
        return _shard(name, flats.dtypes[column], shape, [])
    # Only the partitions that the range touches: thousands of ranks times thousands of tensors would be too many.
    ranks = np.arange(first // size, (end - 1) // size + 1, dtype=np.int64)
    low = np.maximum(ranks * size, first)
    count = np.minimum((ranks + 1) * size, end) - low
    x = flats.start[ranks, column] + (low - ranks * size)
    return _shard(name, flats.dtypes[column], shape, [(ranks, flats.record[ranks, column], x, low - first, count)])


def _shard(name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[IntArray, ...]]) -> StoredShard:
    empty = np.zeros(0, dtype=np.int64)
    rank, record, x, y, count = (
        np.concatenate([part[column] for part in parts]) if parts else empty for column in range(5)
    )
    # A rank that has only padding of the tensor counts zero or less.
    real = count > 0
    count = count[real]
    loops = np.stack((count, np.ones_like(count), np.ones_like(count)), axis=1)
    # A single element has no loop, and this row is `NestTable`'s filler for one.
    loops[count == 1] = (1, 0, 0)
    nests = NestTable(x[real], y[real], loops[:, None, :])
    return StoredShard(name, dtype, shape, rank[real], record[real], nests)
