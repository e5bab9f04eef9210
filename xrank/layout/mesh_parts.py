"""Mesh parts: what every rank of a mesh holds of one tensor, in arrays, where `local_part` says one rank's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from xrank.layout.binding import checked_sizes
from xrank.layout.dim_table import DimTable, PlaceArrays, compile_places, product_table, taken
from xrank.layout.local_part import bound_dims, places_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nest_rows import rows_of
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.notation import Where
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["MeshParts", "PlacedRanks", "combined_dims", "compiled_dims", "mesh_parts"]


@dataclass(frozen=True, slots=True, eq=False)
class MeshParts:
    """What ranks hold of one tensor: n ranks, p parts, of which each rank has one."""

    ranks: IntArray
    """The ranks that have the tensor, rising; shape [n]."""
    part: IntArray
    """The part of each of them; shape [n]."""
    local_sizes: IntArray
    """Local elements of each part, pads included; shape [p]."""
    owner: IntArray
    """The part that each nest is of, rising."""
    nests: NestTable
    """x is an element's row-major address in the local shape, y in the global shape; canonical."""
    shapes: IntArray | None = None
    """Local shape of each part, pads included, [p, dims]; None where the parts lie in a flat buffer or in a file."""

    @classmethod
    def of(cls, held: Mapping[int, tuple[Sequence[Nest], tuple[int, ...] | None, int]]) -> MeshParts:
        """Return rank -> (nests, local shape, local elements) as arrays; all ranks have a shape, or none."""
        found: dict[tuple[tuple[Nest, ...], tuple[int, ...] | None, int], int] = {}
        ranks = sorted(held)
        part = int_array(
            found.setdefault((tuple(nests), shape, num_elements), len(found))
            for nests, shape, num_elements in map(held.__getitem__, ranks)
        )
        shapes = [shape for _, shape, _ in found if shape is not None]
        return cls(
            int_array(ranks),
            part,
            int_array(num_elements for _, _, num_elements in found),
            np.repeat(np.arange(len(found)), [len(nests) for nests, _, _ in found]),
            NestTable.of([nest for nests, _, _ in found for nest in nests]),
            np.array(shapes, dtype=np.int64).reshape(len(found), -1) if shapes else None,
        )

    @property
    def first_ranks(self) -> IntArray:
        """The lowest rank of each part; shape [p]."""
        first = np.empty(len(self.local_sizes), dtype=np.int64)
        first[self.part[::-1]] = self.ranks[::-1]
        return first

    @property
    def num_pads(self) -> IntArray:
        """Local elements of each part that stand for none of the tensor's; shape [p]."""
        held = np.zeros_like(self.local_sizes)
        np.add.at(held, self.owner, self.nests.sizes)
        return self.local_sizes - held

    def kept(self, having: npt.NDArray[np.bool_]) -> MeshParts:
        """Return what is held where only these of the ranks have the tensor."""
        parts, part = _distinct(self.part[having])
        rows, owner = rows_of(self.owner, self.part[having][parts], len(self.local_sizes))
        parts = self.part[having][parts]
        shapes = None if self.shapes is None else self.shapes[parts]
        return MeshParts(self.ranks[having], part, self.local_sizes[parts], owner, self.nests.take(rows), shapes)


def mesh_parts(
    layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int], *, sizes: Mapping[str, int] | None = None
) -> MeshParts:
    """Return what all ranks of a mesh hold of a tensor: rank by rank what `local_part` says.

    Each dim is compiled once for each distinct place along the axes that cut it.

    Args:
        layout: how the tensor is cut.
        mesh: the mesh that gives the axes their lengths.
        shape: the tensor's global shape, as for `local_part`.
        sizes: sizes by name.

    Raises:
        LayoutError: as `local_part`, for some of the ranks.
    """
    placed, tables = compiled_dims(layout, mesh, shape, sizes=sizes)
    return combined_dims(placed, tables)


def compiled_dims(
    layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int], *, sizes: Mapping[str, int] | None = None
) -> tuple[PlacedRanks, list[DimTable]]:
    """Return the ranks that have a tensor, and each of its dims for its own distinct places; as `mesh_parts`."""
    lengths, _ = places_of(layout, mesh, mesh.coordinate(mesh.ranks[0]))
    placed = _placed(mesh, layout.view_mesh, layout.tree.where, layout.axes)
    if not len(placed.ranks):
        return placed, []
    bound = bound_dims(layout, shape, lengths, checked_sizes(sizes))
    return placed, [
        compile_places(dim, dict(known), places, num_places)
        for (dim, _, known), (places, num_places, _) in zip(bound, placed.dims, strict=True)
    ]


def combined_dims(placed: PlacedRanks, dims: Sequence[DimTable]) -> MeshParts:
    """Return what ranks hold of a tensor of these dims, which `compiled_dims` gave, or others of the same places."""
    if not len(placed.ranks):
        none = np.zeros(0, dtype=np.int64)
        return MeshParts(none, none, none, none, NestTable.of(()))
    num_parts = int(placed.part.max()) + 1
    tables = [taken(table, index) for table, (_, _, index) in zip(dims, placed.dims, strict=True)]
    whole = product_table(tables, num_parts)
    shapes = np.stack([table.local_sizes for table in tables], axis=1) if tables else np.zeros((num_parts, 0), np.int64)
    return MeshParts(placed.ranks, placed.part, whole.local_sizes, whole.owner, whole.nests, shapes)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRanks:
    """The ranks that a layout's "where" names, and their distinct places along the axes that cut."""

    ranks: IntArray
    part: IntArray
    dims: tuple[tuple[PlaceArrays, int, IntArray], ...]
    """Per dim its distinct places, how many, and which of them each part has."""


@lru_cache(maxsize=256)
def _placed(
    mesh: DeviceMesh, view: DeviceMesh | None, where: tuple[Where, ...], axes: tuple[tuple[str, ...], ...]
) -> PlacedRanks:
    ranks, at = _coordinates(mesh, view)
    is_held = np.ones(len(ranks), dtype=np.bool_)
    for each in where:
        length, places = at[each.axis]
        first = length - 1 if each.first is None else each.first
        last = length - 1 if each.last is None else each.last
        is_held &= (first <= places) & (places <= last)
    at = {axis: (length, places[is_held]) for axis, (length, places) in at.items()}
    first_of, part = _distinct(_keys(at, (axis for own in axes for axis in own), int(is_held.sum())))
    at = {axis: (length, places[first_of]) for axis, (length, places) in at.items()}
    dims = []
    for own in axes:
        chosen, index = _distinct(_keys(at, own, len(first_of)))
        dims.append(({axis: (at[axis][0], at[axis][1][chosen]) for axis in own}, len(chosen), index))
    return PlacedRanks(ranks[is_held], part, tuple(dims))


def _coordinates(mesh: DeviceMesh, view: DeviceMesh | None) -> tuple[IntArray, PlaceArrays]:
    """Return the ranks, rising, and their coordinates; an axis of one name in both meshes is the view's."""
    at: dict[str, tuple[int, IntArray]] = {}
    for each in (mesh, view):
        if each is not None:
            order = np.argsort(int_array(each.ranks))
            places = np.unravel_index(order, each.shape)
            at.update({axis: (n, place) for axis, n, place in zip(each.axis_names, each.shape, places, strict=True)})
    return np.sort(int_array(mesh.ranks)), at


def _keys(at: PlaceArrays, axes: Iterable[str], num_places: int) -> IntArray:
    """Return a number for each place that is equal where the coordinates along these axes are."""
    keys = np.zeros(num_places, dtype=np.int64)
    for axis in dict.fromkeys(axes):
        length, places = at[axis]
        keys = keys * length + places
    return keys


def _distinct(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return where each value stands first, in that order, and which of them each row has."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(keys)]
    firsts = order[is_first]
    by_first = np.argsort(firsts)
    number = np.empty_like(by_first)
    number[by_first] = np.arange(len(by_first))
    index = np.empty_like(keys)
    index[order] = number[np.cumsum(is_first) - 1]
    return firsts[by_first], index
