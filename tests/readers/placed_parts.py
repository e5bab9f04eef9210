"""Parts of tensors as ranks hold them, whose storages say which element of the whole each one is."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.stored_model import StoredShard
from xrank.readers.placement import HeldTensor


class Part(HeldTensor, frozen=True):
    """A held tensor with its storage: numbers of the whole's elements, -1 around them."""

    storage: Any = None

    def replaced(self, **changes: Any) -> Part:
        return replace(self, **changes)


assert {*HeldTensor.__struct_fields__} < {*Part.__struct_fields__}


def held(rank: int, values: np.ndarray, *, storage: str = "contiguous", offset: int = 0, **known: Any) -> Part:
    """Return a rank's part; its storage is contiguous, transposed, or spread with gaps between rows and elements."""
    shape = values.shape
    order = range(len(shape)) if storage != "transposed" else range(len(shape) - 1, -1, -1)
    strides, extent = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = extent * (2 if storage == "spread" else 1)
        extent = strides[dim] * max(shape[dim], 1)
    memory = np.full(offset + extent + 1, -1)
    if values.size:
        at = sum(np.indices(shape)[d] * strides[d] for d in range(len(shape))) if shape else 0
        memory[offset + at] = values
    file = f"rank_{rank}"
    return Part(rank, file, rank, "F32", shape, tuple(strides), offset, storage=memory, **known)


def part_of(text: str, mesh: DeviceMesh, rank: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the numbers of the elements that a rank holds, by cutting as the layout says, dim by dim."""
    values = np.arange(int(np.prod(shape))).reshape(shape)
    for dim, axes in enumerate(TensorLayout.parse(text).axes):
        for axis in axes:
            step = -(-values.shape[dim] // mesh.axis_length(axis))
            start = mesh.coordinate(rank)[axis] * step
            values = values.take(range(*slice(start, start + step).indices(values.shape[dim])), axis=dim)
    return values


def whole_of(shard: StoredShard, parts: list[Part]) -> np.ndarray:
    """Check every pair of addresses against the storages, and return how often each element is held."""
    storages = {part.record: part.storage for part in parts}
    counts = np.zeros(int(np.prod(shard.shape)), dtype=int)
    for row in range(len(shard.rank)):
        assert shard.rank[row] == shard.record[row]
        nest = shard.nests[row]
        x, y = np.array(nest.x), np.array(nest.y)
        for n, xs, ys in nest.loops:
            x, y = x[..., None] + np.arange(n) * xs, y[..., None] + np.arange(n) * ys
        assert (storages[int(shard.record[row])][x] == y).all()
        np.add.at(counts, y.ravel(), 1)
    return counts
