"""Mesh parts: the parts of a tensor on all ranks of a mesh, in arrays; `local_part` is for one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from xrank.layout.binding import check_sizes
from xrank.layout.dim_table import DimTable, PlaceArrays, compile_places, product_table, take_places
from xrank.layout.local_part import bind_dims, places_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nest_rows import rows_of
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest
from xrank.layout.notation import Where
from xrank.layout.tensor_layout import TensorLayout


@dataclass(frozen=True, slots=True, eq=False)
class MeshParts:
    """The parts of a tensor on ranks: n ranks and p distinct parts; each rank has one part."""

    ranks: IntArray
    """The ranks with a part, rising; shape [n]."""
    part: IntArray
    """The part of each rank; shape [n]."""
    local_sizes: IntArray
    """Local elements of each part, pads included; shape [p]."""
    owner: IntArray
    """The part of each nest, rising."""
    nests: NestTable
    """x is an element's row-major address in the local shape, y in the global shape; canonical."""
    shapes: IntArray | None = None
    """Local shape of each part, pads included, [p, dims]; None for parts in a flat buffer or a file."""

    @classmethod
    def from_held(cls, held: Mapping[int, tuple[Sequence[Nest], tuple[int, ...] | None, int]]) -> MeshParts:
        """Convert rank -> (nests, local shape, local elements); either all ranks have a shape or none."""
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
            NestTable.from_nests([nest for nests, _, _ in found for nest in nests]),
            np.array(shapes, dtype=np.int64).reshape(len(found), -1) if shapes else None,
        )

    @property
    def first_ranks(self) -> IntArray:
        """The lowest rank of each part; shape [p]."""
        first = np.empty(len(self.local_sizes), dtype=np.int64)
        # For a repeated index the last assignment remains: in reverse order that of the lowest rank.
        first[self.part[::-1]] = self.ranks[::-1]
        return first

    @property
    def num_pads(self) -> IntArray:
        """Number of padding elements in each part; shape [p]."""
        held = np.zeros_like(self.local_sizes)
        np.add.at(held, self.owner, self.nests.sizes)
        return self.local_sizes - held

    def select(self, having: npt.NDArray[np.bool_]) -> MeshParts:
        """Return the parts on the ranks where `having` is true."""
        parts, part = _distinct(self.part[having])
        rows, owner = rows_of(self.owner, self.part[having][parts], len(self.local_sizes))
        parts = self.part[having][parts]
        shapes = None if self.shapes is None else self.shapes[parts]
        return MeshParts(self.ranks[having], part, self.local_sizes[parts], owner, self.nests.take(rows), shapes)


def mesh_parts(
    layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int], *, sizes: Mapping[str, int] | None = None
) -> MeshParts:
    """Return the parts of a tensor on all ranks of a mesh, equal to `local_part` for each rank.

    Each dim is compiled once for each distinct place along the axes that cut it.

    Args:
        layout: the tensor's layout.
        mesh: the mesh, which defines the lengths of the axes.
        shape: the tensor's global shape, as in `local_part`.
        sizes: sizes by name.

    Raises:
        LayoutError: as `local_part`, for at least one rank.
    """
    placed, tables = compile_dims(layout, mesh, shape, sizes=sizes)
    return combine_dims(placed, tables)


def compile_dims(
    layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int], *, sizes: Mapping[str, int] | None = None
) -> tuple[PlacedRanks, list[DimTable]]:
    """Return the ranks with a part of a tensor, and each dim compiled for its own distinct places."""
    # Called for its checks and the lengths, which are the same for every rank.
    lengths, _ = places_of(layout, mesh, mesh.coordinate(mesh.ranks[0]))
    placed = _place_ranks(mesh, layout.view_mesh, layout.tree.where, layout.cut_axes)
    if not len(placed.ranks):
        return placed, []
    bound = bind_dims(layout, shape, lengths, check_sizes(sizes))
    return placed, [
        compile_places(dim, dict(known), places, num_places)
        for (dim, _, known), (places, num_places, _) in zip(bound, placed.dims, strict=True)
    ]


def combine_dims(placed: PlacedRanks, dims: Sequence[DimTable]) -> MeshParts:
    """Return the parts of a tensor with these dims, from `compile_dims` or derived from its result."""
    if not len(placed.ranks):
        none = np.zeros(0, dtype=np.int64)
        return MeshParts(none, none, none, none, NestTable.from_nests(()))
    num_parts = int(placed.part.max()) + 1
    tables = [take_places(table, index) for table, (_, _, index) in zip(dims, placed.dims, strict=True)]
    whole = product_table(tables, num_parts)
    shapes = np.stack([table.local_sizes for table in tables], axis=1) if tables else np.zeros((num_parts, 0), np.int64)
    return MeshParts(placed.ranks, placed.part, whole.local_sizes, whole.owner, whole.nests, shapes)


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRanks:
    """The ranks in a layout's "where", and their distinct places along the axes that cut."""

    ranks: IntArray
    part: IntArray
    dims: tuple[tuple[PlaceArrays, int, IntArray], ...]
    """For each dim: its distinct places, their number, and the place of each part."""


@lru_cache(maxsize=256)
def _place_ranks(
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
    # First the places along all axes that cut, which are the parts; then each dim's own among these.
    first_of, part = _distinct(_keys(at, (axis for own in axes for axis in own), int(is_held.sum())))
    at = {axis: (length, places[first_of]) for axis, (length, places) in at.items()}
    dims = []
    for own in axes:
        chosen, index = _distinct(_keys(at, own, len(first_of)))
        dims.append(({axis: (at[axis][0], at[axis][1][chosen]) for axis in own}, len(chosen), index))
    return PlacedRanks(ranks[is_held], part, tuple(dims))


def _coordinates(mesh: DeviceMesh, view: DeviceMesh | None) -> tuple[IntArray, PlaceArrays]:
    """Return the ranks, rising, and their coordinates; for an axis in both meshes those of the view."""
    at: dict[str, tuple[int, IntArray]] = {}
    for each in (mesh, view):
        if each is not None:
            order = np.argsort(int_array(each.ranks))
            places = np.unravel_index(order, each.shape)
            at.update({axis: (n, place) for axis, n, place in zip(each.axis_names, each.shape, places, strict=True)})
    return np.sort(int_array(mesh.ranks)), at


def _keys(at: PlaceArrays, axes: Iterable[str], num_places: int) -> IntArray:
    """Return a number for each place; places with equal coordinates along these axes have equal numbers."""
    keys = np.zeros(num_places, dtype=np.int64)
    for axis in dict.fromkeys(axes):
        length, places = at[axis]
        # Digits of a mixed radix; two meshes of at most 2^22 ranks each stay within 64 bits.
        keys = keys * length + places
    return keys


def _distinct(keys: IntArray) -> tuple[IntArray, IntArray]:
    """Return the row of each value's first occurrence, in that order, and the value's number for each row."""
    # np.unique would number the values by size; parts are numbered by their first rank, as in `MeshParts.from_held`.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    # The slice is for no keys at all, where the first True has no key.
    is_first = np.append(True, ordered[1:] != ordered[:-1])[: len(keys)]
    firsts = order[is_first]
    by_first = np.argsort(firsts)
    number = np.empty_like(by_first)
    number[by_first] = np.arange(len(by_first))
    index = np.empty_like(keys)
    index[order] = number[np.cumsum(is_first) - 1]
    return firsts[by_first], index
