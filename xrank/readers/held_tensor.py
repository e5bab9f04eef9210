"""One rank's part of a tensor, as it lies in a record, and the table of pieces that such parts form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from xrank.errors import ContradictionError, CorruptError
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, intersect, row_major
from xrank.plan.source import StoredShard

if TYPE_CHECKING:
    from xrank.formats.torch_archive import ArchivedTensor


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One rank's part of a tensor, as it lies in a record."""

    rank: int
    file: str
    record: int
    dtype: str
    shape: tuple[int, ...]
    """Local shape."""
    strides: tuple[int, ...]
    """Strides in the storage, in elements."""
    storage_offset: int
    """Index of the first element, counted from the record's start."""
    layout: str | None = None
    """Layout that the rank recorded; the attributes below are the rank's records, too."""
    mesh: DeviceMesh | None = None
    view: DeviceMesh | None = None
    """The view of the mesh that the layout refers to."""
    pattern: str | None = None
    """The tensor's name with dims, if the rank's own name for it differs."""
    global_shape: tuple[int, ...] | None = None

    @classmethod
    def from_archive(cls, tensor: ArchivedTensor, *, rank: int, file: str, record: int) -> HeldTensor:
        """Return the part that a tensor of a torch archive is, without a layout."""
        return cls(rank, file, record, tensor.dtype, tensor.shape, tensor.strides, tensor.storage_offset)

    def contradiction(self, name: str, problem: str, *, got: str, want: str, next_step: str) -> ContradictionError:
        """Return the error that this part contradicts other parts or its rank's own record."""
        return ContradictionError(
            f"{name}: {problem}", tensor=name, rank=self.rank, file=self.file, got=got, want=want, next_step=next_step
        )


def replicate(held: HeldTensor, mesh: DeviceMesh) -> HeldTensor:
    """Return the tensor with the layout that every rank of the mesh holds it whole."""
    return replace(held, layout=str(TensorLayout((None,) * len(held.shape))), mesh=mesh)


def whole(shape: tuple[int, ...]) -> tuple[Nest, ...]:
    """Return the nest of a whole tensor, of the same shape on both sides."""
    return row_slice(shape, 0, 0, shape[0]) if shape else (Nest(0, 0),)


def row_slice(shape: tuple[int, ...], dim: int, start: int, length: int) -> tuple[Nest, ...]:
    """Return the nest of rows [start, start + length) of one dim."""
    local = tuple(length if d == dim else n for d, n in enumerate(shape))
    if 0 in local:
        return ()
    strides = row_major(shape)
    loops = tuple((n, xs, ys) for n, xs, ys in zip(local, row_major(local), strides, strict=True))
    return (canonical(Nest(0, start * strides[dim], loops)),)


def pieces_of(
    name: str, held: Sequence[HeldTensor], shape: tuple[int, ...], nests: Sequence[Sequence[Nest]]
) -> StoredShard:
    """Return the table of all pieces. Nests of local addresses become nests of the records' addresses.

    Args:
        name: the tensor's name.
        held: the ranks' parts.
        shape: global shape.
        nests: for each part, the map from its local row-major addresses to global ones.

    Raises:
        CorruptError: elements of a stored view share bytes.
    """
    rows = [
        (h, nest)
        for h, local_nests in zip(held, nests, strict=True)
        for local in local_nests
        for nest in _from_storage(name, h, local)
    ]
    return StoredShard(
        name,
        held[0].dtype,
        tuple(shape),
        int_array(h.rank for h, _ in rows),
        int_array(h.record for h, _ in rows),
        NestTable.from_nests([nest for _, nest in rows]),
    )


def _from_storage(name: str, held: HeldTensor, local: Nest) -> list[Nest]:
    """Turn local row-major addresses into addresses of the storage, of which the tensor is a view."""
    if held.strides == row_major(held.shape) or 0 in held.shape:
        return [Nest(local.x + held.storage_offset, local.y, local.loops)]
    if any(stride <= 0 for n, stride in zip(held.shape, held.strides, strict=True) if n > 1):
        raise CorruptError(
            f"{name}: rank {held.rank} stored an expanded view, whose elements share bytes",
            tensor=name,
            rank=held.rank,
            file=held.file,
            got=f"strides {list(held.strides)}",
            want="strides of at least 1",
            next_step="write the tensor with .contiguous()",
        )
    # From the storage to the local row-major addresses, at which `local` begins: to intersect them is to compose them.
    storage = Nest(
        held.storage_offset,
        0,
        tuple((n, stride, row) for n, stride, row in zip(held.shape, held.strides, row_major(held.shape), strict=True)),
    )
    return intersect(storage, local)
