"""Differences of two copies of a tensor: their number, the first and the largest, found stretch by stretch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xrank import dtypes


class Differences:
    """Counts elements whose bytes differ; stretches are added in the order of their addresses.

    Args:
        dtype: safetensors name of both copies' element type.
    """

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
