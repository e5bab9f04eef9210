"""Sampled values of tensors: the first elements of each row, or of each column, as arrays of numbers.

Only the strips are read, whatever the size of the tensor; small tensors are read once as a whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt

from xrank.dtypes import dtype, numpy_dtype
from xrank.layout.nests import Nest, canonical
from xrank.plan.buffers import MemoryTarget, Source
from xrank.plan.executor import Budget, execute
from xrank.plan.output import OutputFile, OutputTensor
from xrank.plan.planner import make_plan
from xrank.plan.source import NO_CHECKSUM, StoredModel
from xrank.recipes.rewriting import move_shard

Array = npt.NDArray[np.generic]

WIDTH = 64
"""Number of elements that are read of each line."""

_SMALL_NBYTES = 1 << 20
_CACHE_NBYTES = 128 << 20
_BUDGET = Budget.from_memory(16 << 20, 1)


class LineSamples:
    """Reads samples of a model's tensors, and keeps the latest ones.

    Args:
        model: the model, from metadata.
        source: reads its records; the caller closes it.
    """

    def __init__(self, model: StoredModel, source: Source) -> None:
        self._shards = {shard.name: shard for shard in model.shards}
        # A checksum covers a whole record, which would be read to the end for it. A gather compares all of them.
        records = replace(model.records, crc32=np.full_like(model.records.crc32, NO_CHECKSUM))
        self._model = replace(model, records=records, shards=(), aliases={}, absent=())
        self._source = source
        self._cache: OrderedDict[object, Array] = OrderedDict()

    def dtype(self, name: str) -> str:
        """Return the safetensors name of a tensor's element type."""
        return self._shards[name].dtype

    def lines(self, name: str, at: tuple[int, ...], rows: int, *, by_column: bool) -> Array:
        """Return the first elements of each line of a matrix, as (lines, elements).

        Args:
            name: the tensor.
            at: indices in its leading dims; the rest of its dims is taken as a matrix.
            rows: number of rows of that matrix.
            by_column: whether the lines are the columns.
        """
        shape = self._shards[name].shape
        columns = prod(shape[len(at) :]) // max(rows, 1)
        start = sum(i * prod(shape[place + 1 :]) for place, i in enumerate(at))
        width = dtype(self._shards[name].dtype).nbytes
        if rows * columns * width <= _SMALL_NBYTES:
            whole = self._read(name, start, ((rows * columns, 1, 1),)).reshape(rows, columns)
            return whole[:WIDTH].T if by_column else whole[:, :WIDTH]
        if by_column:
            taken = min(rows, WIDTH)
            return self._read(name, start, ((taken * columns, 1, 1),)).reshape(taken, columns).T
        taken = min(columns, WIDTH)
        return self._read(name, start, ((rows, columns, taken), (taken, 1, 1))).reshape(rows, taken)

    def few(self, name: str, at: tuple[int, ...], rows: int, numbers: Sequence[int], *, by_column: bool) -> Array:
        """Return the first elements of some lines, by their numbers; the other arguments are those of `lines`."""
        shape = self._shards[name].shape
        columns = prod(shape[len(at) :]) // max(rows, 1)
        start = sum(i * prod(shape[place + 1 :]) for place, i in enumerate(at))
        if by_column:
            loops = ((min(rows, WIDTH), columns, 1),)
            return np.stack([self._read(name, start + number, loops) for number in numbers])
        loops = ((min(columns, WIDTH), 1, 1),)
        return np.stack([self._read(name, start + number * columns, loops) for number in numbers])

    def vector(self, name: str, at: tuple[int, ...]) -> Array:
        """Return all elements at these indices of a tensor's leading dims."""
        shape = self._shards[name].shape
        start = sum(i * prod(shape[place + 1 :]) for place, i in enumerate(at))
        return self._read(name, start, ((prod(shape[len(at) :]), 1, 1),))

    def _read(self, name: str, start: int, loops: tuple[tuple[int, int, int], ...]) -> Array:
        key = (name, start, loops)
        found = self._cache.pop(key, None)
        if found is None:
            found = self._fetch(name, start, loops)
        self._cache[key] = found
        while sum(array.nbytes for array in self._cache.values()) > _CACHE_NBYTES and len(self._cache) > 1:
            self._cache.popitem(last=False)
        return found

    def _fetch(self, name: str, start: int, loops: tuple[tuple[int, int, int], ...]) -> Array:
        shard = self._shards[name]
        count = prod(n for n, _, _ in loops)
        if not count:
            return np.zeros(0, numpy_dtype(shard.dtype))
        part = move_shard(shard, name, (count,), canonical(Nest(start, 0, loops)))
        output = OutputTensor(name, shard.dtype, (count,))
        plan = make_plan(replace(self._model, shards=(part,)), [OutputFile.bare(output)])
        memory = np.empty(output.nbytes, np.uint8)
        execute(plan, self._source, MemoryTarget([memory.data]), budget=_BUDGET, replicas="pick")
        return memory.view(numpy_dtype(shard.dtype))
