"""What a writer has decided before any data moves: each output file, its header, and where each tensor lies in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from xrank import dtypes
from xrank.layout.nests import Nest, restrict, size

__all__ = ["OutputFile", "OutputTensor", "PlacedBytes", "TensorPart"]

PlacedBytes: TypeAlias = tuple[int, bytes]
"""Bytes of an output file, after the offset of the first."""


@dataclass(frozen=True, slots=True)
class TensorPart:
    """What an output holds of a tensor, where it holds a part only: one rank's, in another layout."""

    shape: tuple[int, ...]
    """Global shape."""
    nests: tuple[Nest, ...]
    """Canonical; x is an address in the part, row-major, y in the tensor. What none reaches is padding: zeros."""
    compared: tuple[Nest, ...]
    """Those of `nests` that the source's replicas are compared with. Parts of several outputs may be equal: in one of
    them is enough."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor, or a part of one, at its place in an output file."""

    name: str
    dtype: str
    """Safetensors name of the element type it is written as."""
    shape: tuple[int, ...]
    """Global shape; of a part its own."""
    offset: int = 0
    """First byte in the output file; a multiple of the element's width."""
    part: TensorPart | None = None
    """None: the whole tensor."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of data."""
        return self.num_elements * dtypes.dtype(self.dtype).nbytes

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.shape if self.part is None else self.part.shape

    @property
    def is_padded(self) -> bool:
        """Whether some of its elements are no element of the tensor."""
        return self.part is not None and sum(map(size, self.part.nests)) < self.num_elements

    def global_address(self, address: int) -> int:
        """Return the tensor's address of the element at that address here, which must not be padding."""
        if self.part is None:
            return address
        return next(piece.y for nest in self.part.nests for piece in restrict(nest, address, address + 1))


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file to be: its header's bytes, then its tensors; zeros where neither they nor `fragments` or `ending` are.

    A safetensors file has no such places and no fragments. A torch archive has.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    """By rising offset."""
    nbytes: int
    """Whole file, header included."""
    fragments: tuple[PlacedBytes, ...] = ()
    """Further bytes that are known beforehand, by rising offset."""
    ending: Callable[[Sequence[int]], Sequence[PlacedBytes]] | None = None
    """Returns what can only be said when each tensor's CRC-32 is known; as many bytes at the same offsets, always."""

    @classmethod
    def bare(cls, tensor: OutputTensor) -> OutputFile:
        """Return a file of that tensor alone, without a header: for what is made in memory."""
        return cls(tensor.name, b"", (replace(tensor, offset=0),), tensor.nbytes)
