"""Output files as a writer lays them out before any data moves: header and offsets of the tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.layout.nests import Nest, restrict, size

PlacedBytes: TypeAlias = tuple[int, bytes]
"""Offset in an output file, and the bytes there."""


class TensorPart(Struct, frozen=True):
    """The part of a tensor that an output contains: one rank's, in another layout."""

    shape: tuple[int, ...]
    """Global shape."""
    nests: tuple[Nest, ...]
    """Canonical; x is a row-major address in the part, y in the tensor. Elements outside all nests are zeros."""
    compared: tuple[Nest, ...]
    """Nests, of `nests`, that the source's replicas are compared with. Equal parts of several outputs are compared in
    one of them only."""


class OutputTensor(Struct, frozen=True):
    """A tensor, or a part of one, at its place in an output file."""

    name: str
    dtype: str
    """Safetensors name of the written element type."""
    shape: tuple[int, ...]
    """Global shape; for a part the shape of the part."""
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
        """Whether some of its elements are padding."""
        return self.part is not None and sum(map(size, self.part.nests)) < self.num_elements

    def global_address(self, address: int) -> int:
        """Return the address in the whole tensor of the element at `address` here, which must not be padding."""
        if self.part is None:
            return address
        return next(piece.y for nest in self.part.nests for piece in restrict(nest, address, address + 1))


class OutputFile(Struct, frozen=True):
    """A file to write: header, tensors, `fragments`, `ending`, and zeros in between.

    A safetensors file has neither fragments nor zeros in between; a torch archive has both.
    """

    name: str
    header: bytes
    tensors: tuple[OutputTensor, ...]
    """By rising offset."""
    nbytes: int
    """Whole file, header included."""
    fragments: tuple[PlacedBytes, ...] = ()
    """Further bytes that are known before any data moves, by rising offset."""
    ending: Callable[[Sequence[int]], Sequence[PlacedBytes]] | None = None
    """Returns the bytes that depend on the tensors' CRC-32; their number and offsets do not depend on the CRCs. The
    last of them depend on all CRCs."""
    trailer: Callable[[int, int], PlacedBytes | None] | None = None
    """Returns, for a tensor and its CRC-32, those of the ending's bytes that depend on this CRC alone."""
    window_nbytes: int = 0
    """Bytes that are made at once, such as whole rows of a tensor to encode; 0: as many as of other files."""

    @property
    def late_places(self) -> tuple[tuple[int, int], ...]:
        """(Offset, bytes) of the ending's parts, by rising offset."""
        if self.ending is None:
            return ()
        return tuple((offset, len(data)) for offset, data in self.ending([0] * len(self.tensors)))

    @classmethod
    def bare(cls, tensor: OutputTensor, window_nbytes: int = 0) -> OutputFile:
        """Return a file of that tensor alone, without a header, to make it in memory."""
        return cls(tensor.name, b"", (replace(tensor, offset=0),), tensor.nbytes, window_nbytes=window_nbytes)


class Selection(Struct, frozen=True):
    """The source's tensors that are written, tied, cast or left out."""

    outputs: tuple[OutputTensor, ...]
    tied: Mapping[str, tuple[str, ...]]
    """Written name -> names that must hold the same values and are not written."""
    excluded: tuple[str, ...]
    cast: Mapping[str, str]
    """Name -> its cast, as in ``"F32 -> BF16"``."""
    notes: tuple[tuple[str, str], ...]
