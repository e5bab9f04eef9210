"""One-dimensional tensors that every rank has, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xrank.errors import ContradictionError
from xrank.formats.regular_file import Origin, shown
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout.nest_table import IntArray

__all__ = ["FlatRows", "FlatTensors"]


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensors:
    """One-dimensional tensors that every rank has; each array is [ranks, tensors]."""

    record: IntArray
    start: IntArray
    """First element, counted from the record's first byte."""
    length: IntArray
    """In elements."""
    dtypes: tuple[str, ...]


class FlatRows:
    """Collects one-dimensional tensors, rank by rank, into their table.

    Args:
        names: of the tensors, the same on every rank, for messages.
        num_ranks: of the table.
    """

    def __init__(self, names: Sequence[str], num_ranks: int) -> None:
        self._names = names
        self._record, self._start, self._length = (np.zeros((num_ranks, len(names)), dtype=np.int64) for _ in range(3))
        self._dtypes: tuple[str, ...] | None = None

    def add(self, rank: int, tensors: Sequence[ArchivedTensor], index: Callable[[str], int], origin: Origin) -> None:
        """Take in a rank's tensors, in the order of the names.

        Raises:
            ContradictionError: an element type is another than on an earlier rank.
            CorruptError: a tensor is not one row of elements.
        """
        dtypes = tuple(tensor.dtype for tensor in tensors)
        self._dtypes = self._dtypes or dtypes
        for column, tensor in enumerate(tensors):
            name = self._names[column]
            if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
                raise origin.corrupt(
                    f"{name} is no row of elements", got=f"shape {shown(tensor.shape)}", want="one dimension"
                )
            if tensor.dtype != self._dtypes[column]:
                raise ContradictionError(
                    origin.named(f"{name} is of another type than on the ranks before"),
                    rank=origin.rank,
                    file=origin.path,
                    got=tensor.dtype,
                    want=self._dtypes[column],
                    next_step="all files must come from one save of one run; copy them again",
                )
            self._record[rank, column] = index(tensor.key)
            self._start[rank, column], self._length[rank, column] = tensor.storage_offset, tensor.shape[0]

    def table(self) -> FlatTensors:
        """Return all that was taken in."""
        return FlatTensors(self._record, self._start, self._length, self._dtypes or ())
