"""Boxes, one range per dim of a tensor, and the search for cuts by mesh axes that give each rank its box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from math import prod
from typing import TypeAlias

from xrank.dialects.cuts import Cuts, chain_cuts, is_even_split
from xrank.layout.local_part import local_part
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Loop, Nest, canonical
from xrank.layout.notation import Count, Node, Size, Split
from xrank.layout.tensor_layout import TensorLayout, free_size_names

Box: TypeAlias = tuple[tuple[int, int], ...]
"""Per dim of the global tensor: the first position, and the position after the last."""


def volume(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(high - low for low, high in box)


def box_text(box: Box) -> str:
    """Return a box as a Python slice, such as ``[0:2, 0:4]``."""
    return "[" + ", ".join(f"{low}:{high}" for low, high in box) + "]"


def boxes_overlap(a: Box, b: Box) -> bool:
    """Return whether two non-empty boxes share an element."""
    return all(low < other[1] and other[0] < high for (low, high), other in zip(a, b, strict=True))


def box_nests(box: Box, shape: Sequence[int]) -> tuple[Nest, ...]:
    """Return the nest that fills a local tensor of the box's size; an empty box has no nest."""
    if not volume(box):
        return ()
    loops: list[Loop] = []
    start, local_stride, global_stride = 0, 1, 1
    for (low, high), size in zip(reversed(box), reversed(shape), strict=True):
        loops.insert(0, (high - low, local_stride, global_stride))
        start += low * global_stride
        local_stride *= high - low
        global_stride *= size
    return (canonical(Nest(0, start, tuple(loops))),)


def range_of(axes: Sequence[str], size: int, mesh: DeviceMesh, at: Mapping[str, int]) -> tuple[int, int]:
    """Return the range at a place after cuts by these axes in turn, each into ceil chunks."""
    low, high = 0, size
    for axis in axes:
        chunk = -(-(high - low) // mesh.axis_length(axis))
        low, high = min(low + at[axis] * chunk, high), min(low + (at[axis] + 1) * chunk, high)
    return low, high


def layout_of_boxes(boxes: Mapping[int, Box | None], mesh: DeviceMesh, shape: Sequence[int]) -> TensorLayout | None:
    """Return the layout under which every rank holds its box; None if no cuts by axes give these boxes.

    Args:
        boxes: rank -> its box; None for a rank that holds nothing.
        mesh: the mesh of exactly these ranks.
        shape: the tensor's global shape.
    """
    # A rank without a box is past the end of one dim, but of which one is unknown: try each, the same for all ranks.
    for empty_dim in range(len(shape)) if None in boxes.values() else (-1,):
        layout = _search_layout(boxes, mesh, shape, empty_dim)
        # The search went dim by dim and ignored empty ranges, so its result must be proven for every rank.
        if layout is not None and _is_met(layout, boxes, mesh, shape):
            return layout
    return None


def _is_met(layout: TensorLayout, boxes: Mapping[int, Box | None], mesh: DeviceMesh, shape: Sequence[int]) -> bool:
    for rank, box in boxes.items():
        part = local_part(layout, mesh, mesh.coordinate(rank), shape)
        if part is None or part.nests != (() if box is None else box_nests(box, shape)):
            return False
    return True


def _search_layout(
    boxes: Mapping[int, Box | None], mesh: DeviceMesh, shape: Sequence[int], empty_dim: int
) -> TensorLayout | None:
    names = free_size_names(len(shape), mesh.axis_names)
    dims: list[Node] = []
    used = set[str]()
    for dim, size in enumerate(shape):
        # An empty range may begin anywhere.
        ranges = {
            rank: box[dim] if box[dim][1] > box[dim][0] else (0, 0) for rank, box in boxes.items() if box is not None
        }
        if dim == empty_dim:
            ranges |= {rank: (0, 0) for rank, box in boxes.items() if box is None}
        axes = _axes_of_dim(ranges, size, mesh)
        listed = _list_cut(ranges, size, mesh) if axes is None else None
        if listed is not None:
            axes = (listed[0],)
        if axes is None or used & set(axes):
            return None
        used |= set(axes)
        if listed is not None:
            dims.append(Split(Size(names[dim]), listed[0], "/", sizes=listed[1]))
            continue
        cuts = Cuts(names[dim], tuple((axis, "/") for axis in axes))
        dims.append(chain_cuts(names[dim], axes, "/" if is_even_split(cuts, size, mesh) else "/~"))
    return TensorLayout.from_dims(dims, mesh)


def _list_cut(
    ranges: Mapping[int, tuple[int, int]], size: int, mesh: DeviceMesh
) -> tuple[str, tuple[Count, ...]] | None:
    """Return the one axis that cuts a dim into these ranges, and their sizes; None if none does so."""
    for axis in mesh.axis_names:
        found: dict[int, tuple[int, int]] = {}
        if any(found.setdefault(mesh.coordinate(rank)[axis], each) != each for rank, each in ranges.items()):
            continue
        sizes = [found[at][1] - found[at][0] if at in found else 0 for at in range(mesh.axis_length(axis))]
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        if sum(sizes) == size and all(not sizes[at] or low == starts[at] for at, (low, _) in found.items()):
            return axis, tuple((each,) for each in sizes)
    return None


def _axes_of_dim(ranges: Mapping[int, tuple[int, int]], size: int, mesh: DeviceMesh) -> tuple[str, ...] | None:
    """Return the axes that cut a dim into these ranges, in the order of the cuts; None if no order does so."""
    places = {rank: mesh.coordinate(rank) for rank in ranges}

    def is_met(axes: Sequence[str]) -> bool:
        for rank, (low, high) in ranges.items():
            found = range_of(axes, size, mesh, places[rank])
            if found != (low, high) and (found[0] < found[1] or low < high):
                return False
        return True

    # An axis matters if ranks that differ only along it hold different ranges.
    matter = []
    for axis in mesh.axis_names:
        seen: dict[tuple[int, ...], tuple[int, int]] = {}
        for rank, found in ranges.items():
            others = tuple(place for name, place in places[rank].items() if name != axis)
            if seen.setdefault(others, found) != found:
                matter.append(axis)
                break
    # Two or three axes cut a dim at most, so all orders can be tried.
    return next((axes for axes in permutations(matter) if is_met(axes)), None)
