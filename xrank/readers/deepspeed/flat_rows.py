"""One-dimensional tensors that every rank has, in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout.nest_table import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensors:
    """One-dimensional tensors that every rank has; each array is [ranks, tensors]."""

    record: IntArray
    start: IntArray
    """Index of the first element, counted from the record's start."""
    length: IntArray
    """Number of elements."""
    dtypes: tuple[str, ...]

    def of(self, ranks: Sequence[int]) -> FlatTensors:
        """Return the rows of some of the ranks."""
        rows = list(ranks)
        return FlatTensors(self.record[rows], self.start[rows], self.length[rows], self.dtypes)


class FlatRows:
    """Collects one-dimensional tensors, rank by rank, into their table.

    Args:
        names: names of the tensors, the same on every rank, for messages.
        num_ranks: number of rows.
    """

    def __init__(self, names: Sequence[str], num_ranks: int) -> None:
        self._names = names
        self._record, self._start, self._length = (np.zeros((num_ranks, len(names)), dtype=np.int64) for _ in range(3))
        self._dtypes: tuple[str, ...] | None = None

    def add(self, rank: int, tensors: Sequence[ArchivedTensor], index: Callable[[str], int], origin: Origin) -> None:
        """Add a rank's tensors, in the order of the names.

        Raises:
            ContradictionError: the element type differs from an earlier rank's.
            CorruptError: a tensor is not a row of elements.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors)
        self._dtypes = self._dtypes or dtypes
        for column, tensor in enumerate(tensors):
            name = self._names[column]
            if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
                raise origin.corrupt(
                    f"{name} is not a row of elements", got=f"shape {quote(tensor.shape)}", want="one dimension"
                )
            if tensor.dtype != self._dtypes[column]:
                raise ContradictionError(
                    origin.locate(f"{name} has another type than on earlier ranks"),
                    rank=origin.rank,
                    file=origin.path,
                    got=tensor.dtype,
                    want=self._dtypes[column],
                    next_step="all files must come from one save of one run; copy them again",
                )
            self._record[rank, column] = index(tensor.key)
            self._start[rank, column], self._length[rank, column] = tensor.storage_offset, tensor.shape[0]

    def table(self) -> FlatTensors:
        """Return the table of all ranks."""
        return FlatTensors(self._record, self._start, self._length, self._dtypes or ())
