"""What a writer has decided before any data moves: each output file, its header, and where each tensor lies in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from xrank import dtypes

__all__ = ["OutputFile", "OutputTensor"]


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A whole tensor at its place in an output file."""

    name: str
    dtype: str
    """Safetensors name of the element type it is written as."""
    shape: tuple[int, ...]
    """Global shape."""
    offset: int = 0
    """First byte in the output file; a multiple of the element's width."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.num_elements * dtypes.dtype(self.dtype).nbytes


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A safetensors file to be: its header's bytes, then its tensors without gaps, to its last byte."""

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    """By rising offset."""
    nbytes: int
    """Whole file, header included."""
