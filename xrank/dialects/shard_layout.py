"""Find the layout of ranks' shards: boxes, possibly several of one tensor on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias

from xrank.dialects.boxes import Box, layout_of_boxes
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Product, Size, Where
from xrank.layout.tensor_layout import TensorLayout

Shards: TypeAlias = Mapping[int, Sequence[Box]]
"""Rank -> the boxes of its shards; empty for a rank without a shard."""


def place_bounds(ranks: Iterable[int], mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    """Return for each axis of a mesh the first and the last place of these ranks."""
    places = [mesh.coordinate(rank) for rank in ranks]
    return {axis: (min(at[axis] for at in places), max(at[axis] for at in places)) for axis in mesh.axis_names}


def layout_of_shards(
    shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int
) -> TensorLayout | None:
    """Return the layout under which every rank of a mesh holds its shards; None if the search fails.

    A "where" clause excludes ranks without a shard, or they hold empty parts.

    Args:
        shards: the shards of all ranks; at least one rank has a shard.
        mesh: the mesh; with other ranks than `shards`, the result is None.
        shape: the tensor's global shape, with the prepended axes.
        num_prepended: number of leading dims along which each index has a shard of its own.
    """
    if set(shards) != set(mesh.ranks):
        return None
    held = [rank for rank in mesh.ranks if shards[rank]]
    found = None
    # Without prepended axes, a rank with an empty part has a shard without elements.
    if len(held) == len(shards) or num_prepended:
        found = _find_cuts(shards, mesh, shape, num_prepended)
    bounds = place_bounds(held, mesh)
    partly = {axis for axis, (first, last) in bounds.items() if last - first + 1 < mesh.axis_length(axis)}
    if found is not None or not partly or prod(last - first + 1 for first, last in bounds.values()) != len(held):
        return found
    # Along axes of the "where" all ranks hold the same, so one place along each axis shows the cuts.
    alike = {rank: mesh.coordinate(rank) | {axis: bounds[axis][0] for axis in partly} for rank in held}
    shown = {rank: mesh.rank_at(at) for rank, at in alike.items()}
    if any(list(shards[rank]) != list(shards[shown[rank]]) for rank in held):
        return None
    lengths = [1 if axis in partly else mesh.axis_length(axis) for axis in mesh.axis_names]
    ranks = [rank for rank in mesh.ranks if shown.get(rank) == rank]
    thin = DeviceMesh(lengths, mesh.axis_names, ranks)
    cut = _find_cuts({rank: shards[rank] for rank in ranks}, thin, shape, num_prepended)
    if cut is None:
        return None
    where = tuple(Where(axis, *bounds[axis]) for axis in mesh.axis_names if axis in partly)
    return TensorLayout.from_tree(LayoutTree(cut.dims, where=where), mesh)


def _find_cuts(shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int) -> TensorLayout | None:
    """Return a layout of cuts and packed pieces, without a "where"; None if the search fails."""
    packed = _find_pieces(next(boxes for boxes in shards.values() if boxes), shape, num_prepended)
    if packed is not None:
        dim, pieces = packed
        step = shape[dim] // pieces
        first = {rank: tuple(box for box in boxes if box[dim][0] < step) for rank, boxes in shards.items()}
        for rank, boxes in shards.items():
            moved = {_shift(box, dim, i * step) for box in first[rank] for i in range(pieces)}
            if moved != set(boxes) or any(box[dim][1] > step for box in first[rank]):
                return None
        piece = _find_cuts(first, mesh, (*shape[:dim], step, *shape[dim + 1 :]), num_prepended)
        if piece is None:
            return None
        dims = [Product((Size(pieces), node)) if i == dim else node for i, node in enumerate(piece.dims)]
        return TensorLayout.from_dims(dims, mesh)
    stacked: dict[int, Box | None] = {}
    for rank, boxes in shards.items():
        stacked[rank] = _stack_boxes(boxes, num_prepended) if boxes else None
        if boxes and stacked[rank] is None:
            return None
    return layout_of_boxes(stacked, mesh, shape)


def _find_pieces(boxes: Sequence[Box], shape: tuple[int, ...], num_prepended: int) -> tuple[int, int] | None:
    """Return the first dim with several equal pieces on a rank, and their number; None if each dim has one piece."""
    for dim in range(num_prepended, len(shape)):
        pieces = len({box[dim] for box in boxes})
        if pieces > 1 and shape[dim] % pieces == 0:
            return dim, pieces
    return None


def _shift(box: Box, dim: int, by: int) -> Box:
    low, high = box[dim]
    return (*box[:dim], (low + by, high + by), *box[dim + 1 :])


def _stack_boxes(boxes: Sequence[Box], num_prepended: int) -> Box | None:
    """Return the box of a rank's shards, stacked along their prepended axes; None if they do not fill a box."""
    hull = tuple((min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*boxes, strict=True))
    if {box[num_prepended:] for box in boxes} != {hull[num_prepended:]} or len(set(boxes)) != len(boxes):
        return None
    return hull if prod(high - low for low, high in hull[:num_prepended]) == len(boxes) else None
