"""Megatron-core's ShardedTensors: the box of a global tensor that each local tensor of a rank holds.

They are read by their attributes (megatron/core/dist_checkpointing/mapping.py:ShardedTensor), without megatron or
torch. The checks are those of its ``validate_metadata_integrity`` and of validation.py:_validate_sharding_for_key, and
two that these leave out: irregular grids, and replicas that equal no main replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from msgspec import Struct

from xrank.errors import ContradictionError, IncompleteError, LayoutError
from xrank.layout.local_part import LocalPart, holds, local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout
from xrank.layout.terms.tensors import (
    Box,
    box_nests,
    box_text,
    boxes_overlap,
    cuts_of,
    is_even_split,
    layout_of_shards,
    place_bounds,
    range_of,
    resolve_mesh,
    volume,
)

_GIVE_MAIN = "give replica_id 0 to one replica of each part"


class ShardedTensorData(Struct, frozen=True):
    """The metadata of a ShardedTensor, under the same names."""

    key: str
    local_shape: tuple[int, ...]
    """Without the prepended axes."""
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """In elements; along prepended axes the index there."""
    axis_fragmentations: tuple[int, ...] | None
    """Number of equal fragments per global dim; None for an irregular grid."""
    replica_id: int | tuple[int, ...] = 0
    """All zeros for the main replica."""
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: None = None

    @property
    def box(self) -> Box:
        """The box of the global tensor that this shard holds."""
        local = (1,) * self.prepend_axis_num + self.local_shape
        return tuple((at, at + size) for at, size in zip(self.global_offset, local, strict=True))

    @property
    def is_main(self) -> bool:
        """Whether this is the replica that Megatron saves (mapping.py:is_main_replica)."""
        return self.replica_id == 0 if isinstance(self.replica_id, int) else not any(self.replica_id)


class PlacedTensor(Struct, frozen=True):
    """The places of all parts of one global tensor."""

    key: str
    shape: tuple[int, ...]
    """The recorded global shape; it may be padded if `may_be_padded`, and no shard records the real one."""
    parts: Mapping[int, tuple[LocalPart, ...]]
    """Rank -> its shards in the given order, with local shapes without the prepended axes."""
    layout: TensorLayout | None
    """The equivalent layout; None if none was found.

    It joins the shards of a rank to one local tensor: stacked along the prepended axes, pieces of a dim end to end.
    """
    may_be_padded: bool
    """Whether the shards allow another shape of the stored tensor (``allow_shape_mismatch``)."""


def from_sharded_tensor(shards: Mapping[int, Any], mesh: DeviceMesh | None = None) -> PlacedTensor:
    """Return the places of the parts of one tensor, from all ranks' ShardedTensors of one key.

    Args:
        shards: rank -> its ShardedTensor, or a sequence of them, such as several layers along a prepended axis; an
            empty sequence for a rank without this key.
        mesh: the mesh to find a layout on, if `shards` has all of its ranks; None: the result has no layout.

    Raises:
        LayoutError: a shard contradicts itself, holds flattened data, or is not a ShardedTensor.
        ContradictionError: the shards belong to several tensors, main replicas overlap, or a replica equals no main
            replica.
        IncompleteError: the main replicas do not cover the tensor, or no shard is given.

    Example:
        >>> mesh = DeviceMesh((2,), ("tp",))
        >>> shards = to_sharded_tensors(TensorLayout.parse("[f/tp, h]"), mesh, (4, 3))
        >>> str(from_sharded_tensor(shards, mesh).layout)
        '[d0/tp, d1]'
    """
    read = {rank: tuple(_read(shard, rank) for shard in _as_list(of_rank)) for rank, of_rank in sorted(shards.items())}
    every = [(rank, shard) for rank, of_rank in read.items() for shard in of_rank]
    if not every:
        want = "the ShardedTensors of all ranks"
        raise IncompleteError("no shard is given", want=want, next_step="give the shards of every rank")
    first = every[0][1]
    _check_agreement(every, [shard for of_rank in shards.values() for shard in _as_list(of_rank)])
    _check_cover(every)
    boxes = {rank: tuple(shard.box for shard in of_rank) for rank, of_rank in read.items()}
    parts = {
        rank: tuple(LocalPart(shard.local_shape, box_nests(shard.box, shard.global_shape)) for shard in of_rank)
        for rank, of_rank in read.items()
    }
    layout = None if mesh is None else layout_of_shards(boxes, mesh, first.global_shape, first.prepend_axis_num)
    return PlacedTensor(first.key, first.global_shape, parts, layout, first.allow_shape_mismatch)


def to_sharded_tensors(
    layout: TensorLayout,
    mesh: DeviceMesh,
    shape: Sequence[int],
    key: str = "",
    *,
    prepend_axis_num: int = 0,
) -> dict[int, tuple[ShardedTensorData, ...]]:
    """Return the metadata of each rank's ShardedTensors of a tensor.

    Ranks that differ only along axes without cuts hold replicas, numbered in the mesh's order; ranks that a "where"
    excludes have no shard. A grid with uneven parts is irregular, without ``axis_fragmentations``. If a dim has several
    pieces, a rank has a shard of each, as Megatron does for gate and up
    (transformer/mlp.py:apply_swiglu_sharded_factory).

    Args:
        layout: a layout whose dims, or equal pieces of them, are only cut by axes.
        mesh: the mesh; the layout's own mesh must be equal.
        shape: the global shape, with the prepended axes.
        key: the tensor's name.
        prepend_axis_num: number of leading dims, such as layers and experts, along which a rank has one ShardedTensor
            for each index.

    Raises:
        LayoutError: a part that ShardedTensors cannot express, which the error names; a shape that does not fit.

    Example:
        >>> shards = to_sharded_tensors(TensorLayout.parse("[f/tp, h]"), DeviceMesh((2,), ("tp",)), (4, 3))
        >>> shards[1][0].global_offset, shards[1][0].local_shape
        ((2, 0), (2, 3))
    """
    resolve_mesh(layout, mesh)
    every = cuts_of(layout, "ShardedTensors", packed=True, where=True)
    sizes = tuple(shape)
    if not 0 <= prepend_axis_num <= len(sizes):
        raise LayoutError(f"{prepend_axis_num} axes cannot be prepended", got=f"shape {sizes}", want="a number of dims")
    for rank in mesh.ranks:
        local_part(layout, mesh, mesh.coordinate(rank), sizes)  # raises for a shape that does not fit
    is_regular = all(is_even_split(cuts, size, mesh) for cuts, size in zip(every, sizes, strict=True))
    fragments = tuple(cuts.pieces * prod(mesh.axis_length(axis) for axis in cuts.axes) for cuts in every)
    replicated = [name for name in mesh.axis_names if not any(name in cuts.axes for cuts in every)]
    held = [rank for rank in mesh.ranks if holds(layout, mesh, mesh.coordinate(rank))]
    shards: dict[int, tuple[ShardedTensorData, ...]] = {}
    bounds = place_bounds(held, mesh)
    for rank in mesh.ranks:
        if rank not in held:
            shards[rank] = ()
            continue
        at = mesh.coordinate(rank)
        replica = 0
        for axis in replicated:
            first, last = bounds[axis]
            replica = replica * (last - first + 1) + at[axis] - first
        ranges: list[list[tuple[int, int]]] = []
        """By dim, a range for each piece of it."""
        for cuts, size in zip(every, sizes, strict=True):
            piece = size // cuts.pieces
            low, high = range_of(cuts.axes, piece, mesh, at)
            ranges.append([(low + i * piece, high + i * piece) for i in range(cuts.pieces)])
        leading = ranges[:prepend_axis_num]
        stacked = [[(i, i + 1) for low, high in of_dim for i in range(low, high)] for of_dim in leading]
        shards[rank] = tuple(
            ShardedTensorData(
                key=key,
                local_shape=tuple(high - low for low, high in box[prepend_axis_num:]),
                global_shape=sizes,
                global_offset=tuple(low for low, _ in box),
                axis_fragmentations=(*sizes[:prepend_axis_num], *fragments[prepend_axis_num:]) if is_regular else None,
                replica_id=replica,
                prepend_axis_num=prepend_axis_num,
            )
            for box in product(*stacked, *ranges[prepend_axis_num:])
        )
    return shards


def _as_list(shards: Any) -> Sequence[Any]:
    return shards if isinstance(shards, list | tuple) else (shards,)


def _read(shard: Any, rank: int) -> ShardedTensorData:
    """Return the metadata of a shard after checks of the shard alone."""
    missing = [name for name in ("local_shape", "global_shape", "global_offset") if not hasattr(shard, name)]
    if missing:
        what = f"rank {rank} has a {type(shard).__name__}, which is not a box of a tensor"
        next_step = "build a ShardedTensorFactory's shards first; ShardedObjects hold no tensor"
        raise LayoutError(what, rank=rank, got=f"no {missing[0]}", want="a ShardedTensor", next_step=next_step)
    if getattr(shard, "flattened_range", None) is not None:
        what = f"{shard.key}: rank {rank}'s shard is a range of flattened data, which Megatron-core refuses since 0.16"
        got = f"flattened_range={shard.flattened_range}"
        next_step = "save the optimizer with a format that is not flattened"
        raise LayoutError(what, tensor=shard.key, rank=rank, got=got, want="a box of the tensor", next_step=next_step)
    fragments, replica = shard.axis_fragmentations, shard.replica_id
    read = ShardedTensorData(
        shard.key,
        tuple(shard.local_shape),
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        None if fragments is None else tuple(fragments),
        replica if isinstance(replica, int) else tuple(replica),
        shard.prepend_axis_num,
        bool(shard.allow_shape_mismatch),
    )
    ndim = len(read.global_shape)
    counts = {len(read.global_offset), len(read.local_shape) + read.prepend_axis_num}
    if counts != {ndim} or (read.axis_fragmentations is not None and len(read.axis_fragmentations) != ndim):
        raise _integrity_error(read, rank, "its shapes, offset and fragments have different numbers of dims")
    for dim, ((low, high), size) in enumerate(zip(read.box, read.global_shape, strict=True)):
        if not 0 <= low <= high <= size:
            raise _integrity_error(read, rank, f"dim {dim}: {low} to {high} is not within 0 to {size}")
        if read.axis_fragmentations is None:
            continue
        if high > low and low % (high - low):
            raise _integrity_error(read, rank, f"dim {dim}: offset {low} is not a multiple of the size {high - low}")
        if read.axis_fragmentations[dim] * (high - low) != size:
            count = read.axis_fragmentations[dim]
            raise _integrity_error(read, rank, f"dim {dim}: {count} fragments of {high - low} do not make {size}")
    return read


def _integrity_error(shard: ShardedTensorData, rank: int, problem: str) -> LayoutError:
    what = f"{shard.key}: rank {rank}'s shard contradicts itself: {problem}"
    want = "the integrity that Megatron-core's ShardedTensor requires"
    return LayoutError(what, tensor=shard.key, rank=rank, got=str(shard), want=want)


def _check_agreement(every: Sequence[tuple[int, ShardedTensorData]], raw: Sequence[Any]) -> None:
    first_rank, first = every[0]
    names = ["key", "global_shape", "prepend_axis_num", "allow_shape_mismatch", "axis_fragmentations"]
    if first.axis_fragmentations is not None:
        names.append("local_shape")
    for rank, shard in every:
        for name in names:
            if getattr(shard, name) != getattr(first, name):
                what = f"ranks {first_rank} and {rank} have shards with different {name}"
                got = f"rank {first_rank}: {getattr(first, name)}, rank {rank}: {getattr(shard, name)}"
                want, next_step = f"one {name} for all shards of a tensor", "let all ranks write the tensor again"
                raise _contradiction(first.key, rank, what, got, want, f"{next_step} from one state")
    dtypes = {str(shard.dtype) for shard in raw if hasattr(shard, "dtype")}
    if len(dtypes) > 1:
        what, next_step = "its shards have several dtypes", "let all ranks write the tensor again with one dtype"
        raise _contradiction(first.key, None, what, str(sorted(dtypes)), "one dtype", next_step)


def _contradiction(key: str, rank: int | None, what: str, got: str, want: str, next_step: str) -> ContradictionError:
    return ContradictionError(f"{key}: {what}", tensor=key, rank=rank, got=got, want=want, next_step=next_step)


def _check_cover(every: Sequence[tuple[int, ShardedTensorData]]) -> None:
    """Refuse main replicas that do not cover each element once, and replicas that equal no main replica."""
    key, shape = every[0][1].key, every[0][1].global_shape
    boxes = sorted((shard.box, rank) for rank, shard in every if shard.is_main and volume(shard.box))
    reaching: list[tuple[Box, int]] = []  # may still overlap later boxes: boxes are sorted by their start in dim 0
    for box, rank in boxes:
        reaching = [(other, holder) for other, holder in reaching if not box or other[0][1] > box[0][0]]
        for other, holder in reaching:
            if boxes_overlap(box, other):
                what = f"main replicas of ranks {holder} and {rank} overlap"
                got = f"rank {holder}: {box_text(other)}, rank {rank}: {box_text(box)}"
                raise _contradiction(key, rank, what, got, "replica_id 0 on one rank for each part", _GIVE_MAIN)
        reaching.append((box, rank))
    covered = sum(volume(box) for box, _ in boxes)
    if covered != prod(shape):
        what = f"{key}: the main replicas hold {covered} of {prod(shape)} elements of shape {shape}"
        got = f"{len(boxes)} main replicas: " + ", ".join(f"rank {rank}: {box_text(box)}" for box, rank in boxes[:4])
        want = "the shards of all ranks, each part once with replica_id 0"
        next_step = "give the shards of the missing ranks, too"
        raise IncompleteError(what, tensor=key, got=got, want=want, next_step=next_step)
    mains = {box for box, _ in boxes}
    for rank, shard in every:
        if volume(shard.box) and shard.box not in mains:
            what, got = f"rank {rank}'s replica equals no main", f"{box_text(shard.box)}, replica_id {shard.replica_id}"
            want, next_step = "the box of a shard with replica_id 0", f"{_GIVE_MAIN}, and the shards of all ranks"
            raise _contradiction(key, rank, f"{what} replica", got, want, next_step)
