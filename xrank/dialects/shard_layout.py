"""The layout under which ranks hold the shards that they say they do: boxes, several of one tensor on a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TypeAlias

from xrank.dialects.boxes import Box, layout_of_boxes
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Product, Size, Where
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["Shards", "layout_of_shards", "place_bounds"]

Shards: TypeAlias = Mapping[int, Sequence[Box]]
"""Rank -> the boxes of its shards; none for a rank that has no shard."""


def place_bounds(ranks: Iterable[int], mesh: DeviceMesh) -> dict[str, tuple[int, int]]:
    """Return per axis of a mesh the first and the last place of these ranks."""
    places = [mesh.coordinate(rank) for rank in ranks]
    return {axis: (min(at[axis] for at in places), max(at[axis] for at in places)) for axis in mesh.axis_names}


def layout_of_shards(
    shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int
) -> TensorLayout | None:
    """Return the layout under which every rank of a mesh holds its shards, if there is one.

    Ranks without a shard are left out by a "where", or hold empty parts.

    Args:
        shards: at least one rank has some.
        mesh: the mesh; all of its ranks must be there, and no others.
        shape: the tensor's global shape, with the prepended axes.
        num_prepended: how many leading dims are told shard by shard.
    """
    if set(shards) != set(mesh.ranks):
        return None
    held = [rank for rank in mesh.ranks if shards[rank]]
    found = None
    # Without prepended axes a rank whose part is empty says so by a shard of no elements.
    if len(held) == len(shards) or num_prepended:
        found = _of_all(shards, mesh, shape, num_prepended)
    bounds = place_bounds(held, mesh)
    partly = {axis for axis, (first, last) in bounds.items() if last - first + 1 < mesh.axis_length(axis)}
    if found is not None or not partly or prod(last - first + 1 for first, last in bounds.values()) != len(held):
        return found
    # Along axes of the "where" all hold the same, so that one place along each of them shows the cuts.
    alike = {rank: mesh.coordinate(rank) | {axis: bounds[axis][0] for axis in partly} for rank in held}
    shown = {rank: mesh.rank_at(at) for rank, at in alike.items()}
    if any(list(shards[rank]) != list(shards[shown[rank]]) for rank in held):
        return None
    lengths = [1 if axis in partly else mesh.axis_length(axis) for axis in mesh.axis_names]
    ranks = [rank for rank in mesh.ranks if shown.get(rank) == rank]
    thin = DeviceMesh(lengths, mesh.axis_names, ranks)
    cut = _of_all({rank: shards[rank] for rank in ranks}, thin, shape, num_prepended)
    if cut is None:
        return None
    where = tuple(Where(axis, *bounds[axis]) for axis in mesh.axis_names if axis in partly)
    return TensorLayout.from_tree(LayoutTree(cut.dims, where=where), mesh)


def _of_all(shards: Shards, mesh: DeviceMesh, shape: tuple[int, ...], num_prepended: int) -> TensorLayout | None:
    """Return the layout of cuts and packed pieces alone."""
    packed = _packed_dim(next(boxes for boxes in shards.values() if boxes), shape, num_prepended)
    if packed is not None:
        dim, pieces = packed
        step = shape[dim] // pieces
        first = {rank: tuple(box for box in boxes if box[dim][0] < step) for rank, boxes in shards.items()}
        for rank, boxes in shards.items():
            moved = {_moved(box, dim, i * step) for box in first[rank] for i in range(pieces)}
            if moved != set(boxes) or any(box[dim][1] > step for box in first[rank]):
                return None
        piece = _of_all(first, mesh, (*shape[:dim], step, *shape[dim + 1 :]), num_prepended)
        if piece is None:
            return None
        dims = [Product((Size(pieces), node)) if i == dim else node for i, node in enumerate(piece.dims)]
        return TensorLayout.from_dims(dims, mesh)
    stacked: dict[int, Box | None] = {}
    for rank, boxes in shards.items():
        stacked[rank] = _stacked(boxes, num_prepended) if boxes else None
        if boxes and stacked[rank] is None:
            return None
    return layout_of_boxes(stacked, mesh, shape)


def _packed_dim(boxes: Sequence[Box], shape: tuple[int, ...], num_prepended: int) -> tuple[int, int] | None:
    """Return the first dim of which a rank has parts of several equal pieces, and how many; None if it has one box."""
    for dim in range(num_prepended, len(shape)):
        pieces = len({box[dim] for box in boxes})
        if pieces > 1 and shape[dim] % pieces == 0:
            return dim, pieces
    return None


def _moved(box: Box, dim: int, by: int) -> Box:
    low, high = box[dim]
    return (*box[:dim], (low + by, high + by), *box[dim + 1 :])


def _stacked(boxes: Sequence[Box], num_prepended: int) -> Box | None:
    """Return the box that a rank's shards make, stacked by their prepended axes; None if they make none."""
    hull = tuple((min(low for low, _ in dim), max(high for _, high in dim)) for dim in zip(*boxes, strict=True))
    if {box[num_prepended:] for box in boxes} != {hull[num_prepended:]} or len(set(boxes)) != len(boxes):
        return None
    return hull if prod(high - low for low, high in hull[:num_prepended]) == len(boxes) else None
