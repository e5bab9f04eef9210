"""The shape and element type of an array, without its elements."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from xrank import dtypes


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A shape and an element type.

    Args:
        shape: the length of each dim.
        dtype: an element type's name as in a safetensors header: ``"BF16"``.
    """

    shape: tuple[int, ...]
    dtype: str = "F32"

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * dtypes.dtype(self.dtype).nbytes
