"""The parts of all ranks of a mesh at once, and the places of the members of flat buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, reduce
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.layout_map import Companion, PlacedDim, blocks_of, companion_shape, divide_nest
from xrank.layout.local_part import (
    bind,
    bind_dims,
    check_limits,
    check_shape,
    check_sizes,
    cut_bounds,
    evaluate_count,
    local_part,
    places_of,
)
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nest_table import (
    IntArray,
    NestTable,
    canonical_rows,
    int_array,
    join_rows,
    product_rows,
    restrict_rows,
    rows_of,
)
from xrank.layout.nests import Nest
from xrank.layout.notation import (
    MAX_SIZE,
    Count,
    Flat,
    LayoutTree,
    Node,
    Pad,
    Parts,
    Product,
    Size,
    Split,
    Where,
)
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, flat_of

PlaceArrays: TypeAlias = Mapping[str, tuple[int, IntArray]]
"""Axis -> (its length, the coordinate of each place along it)."""


class DimTable(Struct, frozen=True, eq=False):
    """One dim compiled for n places; each as in `DimPart`."""

    global_size: int
    local_sizes: IntArray
    """Local size at each place, [n]."""
    owner: IntArray
    """The place of each nest, rising."""
    nests: NestTable


def compile_places(dim: Node, sizes: Mapping[str, int], places: PlaceArrays, num_places: int) -> DimTable:
    """Compile one dim for all of these places, known along at least the axes that cut it; errors as `compile_dim`."""
    match dim:
        case Size(value):
            return whole_table(value if isinstance(value, int) else sizes[value], num_places)
        case Product(factors):
            return product_table([compile_places(each, sizes, places, num_places) for each in factors], num_places)
        case Parts(parts):
            return _end_to_end([compile_places(part.of, sizes, places, num_places) for part in parts])
        case Pad(of, multiple):
            return _pad(compile_places(of, sizes, places, num_places), multiple, sizes)
        case Split(of, axis):
            return _cut(dim, compile_places(of, sizes, places, num_places), *places[axis], sizes)
        case Flat(members, multiple):
            dims = [[compile_places(each, sizes, places, num_places) for each in member.dims] for member in members]
            whole = _end_to_end([product_table(own, num_places) for own in dims])
            return whole if multiple is None else _pad(whole, multiple, sizes)


def whole_table(size: int, num_places: int) -> DimTable:
    """Return a dim that all places hold whole."""
    num_nests = num_places if size else 0
    zeros = np.zeros(num_nests, dtype=np.int64)
    loops = np.empty((num_nests, int(size > 1), 3), dtype=np.int64)
    loops[:] = (size, 1, 1)
    return DimTable(size, np.full(num_places, size), np.arange(num_nests), NestTable(zeros, zeros, loops))


def product_table(tables: Sequence[DimTable], num_places: int) -> DimTable:
    """Multiply index spaces of the same places, major first; without tables the result has one index."""
    return reduce(_times, tables) if tables else whole_table(1, num_places)


def _times(major: DimTable, minor: DimTable) -> DimTable:
    num_places = len(major.local_sizes)
    counts = [np.bincount(table.owner, minlength=num_places) for table in (major, minor)]
    global_size = major.global_size * minor.global_size
    # Before the arrays are multiplied: numpy's int64 overflows without an error.
    largest = _largest(prod, major.local_sizes, minor.local_sizes)
    check_limits(global_size, largest, int((counts[0] * counts[1]).max(initial=0)))
    minor_rows, major_rows = rows_of(minor.owner, major.owner, num_places)
    owner = major.owner[major_rows]
    pairs = major.nests.take(major_rows), minor.nests.take(minor_rows)
    nests = product_rows(*pairs, minor.local_sizes[owner], minor.global_size)
    return DimTable(global_size, major.local_sizes * minor.local_sizes, owner, nests)


def _end_to_end(tables: Sequence[DimTable]) -> DimTable:
    local_sizes = [table.local_sizes for table in tables]
    global_size = sum(table.global_size for table in tables)
    num_nests = sum(np.bincount(table.owner, minlength=len(local_sizes[0])) for table in tables)
    check_limits(global_size, _largest(sum, *local_sizes), int(np.max(num_nests, initial=0)))
    before, shifted = np.zeros_like(tables[0].local_sizes), []
    start = 0
    for table in tables:
        nests = table.nests
        shifted.append(NestTable(nests.x + before[table.owner], nests.y + start, nests.loops))
        before = before + table.local_sizes
        start += table.global_size
    owner = np.concatenate([table.owner for table in tables])
    # Stable, so a place's nests keep the order of the parts, as in `dim_part`.
    order = np.argsort(owner, kind="stable")
    return DimTable(global_size, before, owner[order], join_rows(shifted).take(order))


def _pad(table: DimTable, multiple: Count, sizes: Mapping[str, int]) -> DimTable:
    step = evaluate_count(multiple, sizes)
    local_sizes = np.empty_like(table.local_sizes)
    # In Python's integers, which cannot overflow; there are only a few different sizes.
    for length, rows in _group_by_value(table.local_sizes):
        padded = -(-length // step) * step
        check_limits(table.global_size, padded, 0)
        local_sizes[rows] = padded
    return DimTable(table.global_size, local_sizes, table.owner, table.nests)


def _cut(split: Split, inner: DimTable, length: int, at: IntArray, sizes: Mapping[str, int]) -> DimTable:
    low, high = np.empty_like(at), np.empty_like(at)
    # Ranks far outnumber the different sizes and places, so each pair is cut once.
    for held, rows in _group_by_value(inner.local_sizes):
        bounds = np.zeros((length, 2), dtype=np.int64)
        for place in dict.fromkeys(at[rows].tolist()):
            bounds[place] = cut_bounds(split, held, length, place, sizes)
        low[rows], high[rows] = bounds[at[rows]].T
    rows, nests = restrict_rows(inner.nests, low[inner.owner], high[inner.owner])
    owner = inner.owner[rows]
    check_limits(inner.global_size, 0, int(np.bincount(owner).max(initial=0)))
    return DimTable(inner.global_size, high - low, owner, NestTable(nests.x - low[owner], nests.y, nests.loops))


def _group_by_value(values: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield each value with its rows, in the order of first occurrence."""
    for value in dict.fromkeys(values.tolist()):
        yield value, np.flatnonzero(values == value)


def _largest(combined: Callable[[Iterable[int]], int], *sizes: IntArray) -> int:
    """Return the largest sum or product of a row, which may be too large for an array."""
    # The largest values bound every row; only a bound beyond the limit makes a look at each row necessary.
    most = combined([int(each.max(initial=0)) for each in sizes])
    return most if most <= MAX_SIZE else max(map(combined, zip(*(each.tolist() for each in sizes), strict=True)))


class MeshParts(Struct, frozen=True, eq=False):
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
        kinds = ((tuple(nests), shape, num_elements) for nests, shape, num_elements in map(held.__getitem__, ranks))
        part = int_array(found.setdefault(kind, len(found)) for kind in kinds)
        sizes = int_array(num_elements for _, _, num_elements in found)
        owner = np.repeat(np.arange(len(found)), [len(nests) for nests, _, _ in found])
        table = NestTable.from_nests([nest for nests, _, _ in found for nest in nests])
        known = [shape for _, shape, _ in found if shape is not None]
        shapes = np.array(known, dtype=np.int64).reshape(len(found), -1) if known else None
        return cls(int_array(ranks), part, sizes, owner, table, shapes)

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
    layout: TensorLayout,
    mesh: DeviceMesh,
    shape: Sequence[int],
    *,
    sizes: Mapping[str, int] | None = None,
    companion: Companion | None = None,
) -> MeshParts:
    """Return the parts of a tensor on all ranks of a mesh, equal to `local_part` for each rank.

    Each dim is compiled once for each distinct place along the axes that cut it. Where a companion is given, its parts
    are returned, equal to `companion_part`. Arguments and errors as there.
    """
    blocks = None if companion is None else blocks_of(companion, len(companion_shape(companion, shape)))
    # Called for its checks and the lengths, which are the same for every rank.
    lengths, _ = places_of(layout, mesh, mesh.coordinate(mesh.ranks[0]))
    ranks, part, dims = _place_ranks(mesh, layout.view_mesh, layout.tree.where, layout.cut_axes)
    if not len(ranks):
        none = np.zeros(0, dtype=np.int64)
        return MeshParts(none, none, none, none, NestTable.from_nests(()))
    bound = bind_dims(layout, shape, lengths, check_sizes(sizes))
    compiled = [
        compile_places(dim, dict(known), places, num_places)
        for (dim, _, known), (places, num_places, _) in zip(bound, dims, strict=True)
    ]
    tables = []
    for i, (table, (_, _, chosen)) in enumerate(zip(compiled, dims, strict=True)):
        if companion is not None and blocks is not None:
            table = _divide_table(table, blocks[i], (companion, layout, i))
        rows, owner = rows_of(table.owner, chosen, len(table.local_sizes))
        tables.append(DimTable(table.global_size, table.local_sizes[chosen], owner, table.nests.take(rows)))
    num_parts = int(part.max()) + 1
    whole = product_table(tables, num_parts)
    shapes = np.stack([table.local_sizes for table in tables], axis=1) if tables else np.zeros((num_parts, 0), np.int64)
    return MeshParts(ranks, part, whole.local_sizes, whole.owner, whole.nests, shapes)


@lru_cache(maxsize=256)
def _place_ranks(
    mesh: DeviceMesh, view: DeviceMesh | None, where: tuple[Where, ...], axes: tuple[tuple[str, ...], ...]
) -> tuple[IntArray, IntArray, tuple[tuple[PlaceArrays, int, IntArray], ...]]:
    """Return the ranks in a layout's "where", the part of each rank, and for each dim a tuple.

    The tuple has the distinct places along the axes that cut the dim, their number, and the place of each part.
    """
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
    return ranks[is_held], part, tuple(dims)


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


class FlatPart(Struct, frozen=True):
    """The part of a flat buffer that one rank holds."""

    size: int
    """Number of elements, padding included."""
    members: Mapping[str, tuple[Nest, ...]]
    """Name -> nests; x is an element's place in the rank's buffer, y its row-major address in the member's global
    shape. Empty for a member on other ranks."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends, as in `LocalPart`."""


def flat_part(
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    shapes: Mapping[str, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> FlatPart | None:
    """Return the part of a flat buffer that the rank at a coordinate holds; None if the layout excludes the rank.

    `shapes` has the global shape of each member; other arguments and errors are as in `local_part`. LayoutError also if
    the layout is not flat, or a member has no shape.
    """
    starts, total, known = _members(layout, mesh, shapes, sizes)
    part = local_part(layout, mesh, coordinate, (total,), sizes=known)
    if part is None:
        return None
    members = {
        # `dim_part` never merges nests of two members, so the first address of a nest decides its member.
        name: tuple(Nest(nest.x, nest.y - low, nest.loops) for nest in part.nests if low <= nest.y < high)
        for name, (low, high) in starts.items()
    }
    return FlatPart(part.shape[0], members, part.sums)


def flat_mesh_parts(
    layout: TensorLayout,
    mesh: DeviceMesh,
    shapes: Mapping[str, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> dict[str, MeshParts]:
    """Return member -> its parts on all ranks of a mesh; the buffer's padding counts as part of the last member.

    A member's parts exclude ranks without elements of it. Arguments and errors as in `flat_part`.
    """
    starts, total, known = _members(layout, mesh, shapes, sizes)
    whole = mesh_parts(layout, mesh, (total,), sizes=known)
    num_pads, last = whole.num_pads, next(reversed(starts))
    found: dict[str, MeshParts] = {}
    for name, (low, high) in starts.items():
        rows = np.flatnonzero((whole.nests.y >= low) & (whole.nests.y < high))
        nests = whole.nests.take(rows)
        nests = NestTable(nests.x, nests.y - low, nests.loops)
        local_sizes = num_pads.copy() if name == last else np.zeros_like(num_pads)
        # Not `+=`, which would count only one of several nests of the same part.
        np.add.at(local_sizes, whole.owner[rows], nests.sizes)
        member = MeshParts(whole.ranks, whole.part, local_sizes, whole.owner[rows], nests)
        found[name] = member.select(local_sizes[whole.part] > 0)
    return found


def _members(
    layout: TensorLayout, mesh: DeviceMesh, shapes: Mapping[str, Sequence[int]], sizes: Mapping[str, int] | None
) -> tuple[dict[str, tuple[int, int]], int, dict[str, int]]:
    """Return member -> (start, end) among all elements, the number of elements, and the sizes that shapes define."""
    flat = flat_of(layout)
    if flat is None:
        raise LayoutError(f"the layout {layout} is not flat", got=str(layout), want="flat(name [dims], ...)")
    lengths = axis_lengths(mesh, layout.view_mesh)
    known = check_sizes(sizes)
    starts: dict[str, tuple[int, int]] = {}
    total = 0
    for member in flat.members:
        if member.name not in shapes:
            what = f"the shape of {member.name} is not given, which is in {layout}"
            got = f"shapes of {sorted(shapes)[:16]}"
            raise LayoutError(what, tensor=member.name, got=got, want=f"a shape for {member.name}")
        shape = check_shape(shapes[member.name])
        bound = bind(LayoutTree(member.dims), shape, lengths, known)
        # A name has one size in all members, even if only one member defines it.
        known |= {name: size for name, size in bound.items() if name not in lengths}
        starts[member.name] = (total, total + prod(shape))
        total += prod(shape)
    return starts, total, known


def _divide_table(table: DimTable, block: int, at: PlacedDim) -> DimTable:
    """Do the work of `_divide` for all places at once."""
    if block == 1:
        return table
    table = _with_wholes(table)
    x, y, loops = table.nests.x, table.nests.y, table.nests.loops
    rows, num_loops = np.arange(len(x)), (loops[:, :, 0] > 1).sum(axis=1)
    # Add a loop of one iteration, so every row has a last loop; it does not change the nest.
    outer = np.concatenate((np.broadcast_to((1, 1, 1), (len(x), 1, 3)), loops), axis=1)
    has_run = (outer[rows, num_loops, 1:] == 1).all(axis=1)
    count = np.where(has_run, outer[rows, num_loops, 0], 1)
    # The run is divided apart; its loop becomes a single iteration, which divides by any block.
    outer[rows[has_run], num_loops[has_run]] = (1, 0, 0)
    outer[:, 0] = (1, 0, 0)
    is_last = (outer[:, :, 0] == 1).all(axis=1) & (y + count == table.global_size)
    run = np.where(is_last, -(-count // block) * block, count)
    is_even = (run % block == 0) & (y % block == 0) & (x % block == 0) & (outer[:, :, 1:] % block == 0).all(axis=(1, 2))
    for row in np.flatnonzero(~is_even)[:1]:
        divide_nest(table.nests[int(row)], table.global_size, block, at)  # raises the error with the numbers
    outer[:, :, 1:] //= block
    inner = np.stack((run // block, np.ones_like(run), np.ones_like(run)), axis=1)[:, None]
    nests = NestTable(x // block, y // block, np.concatenate((outer, inner), axis=1))
    local_sizes = -(-table.local_sizes // block)
    return DimTable(-(-table.global_size // block), local_sizes, table.owner, canonical_rows(nests))


def _with_wholes(table: DimTable) -> DimTable:
    """Return the table with a single nest for each place that holds the whole dim."""
    # Parts laid end to end leave several nests, which may end within a block even where a rank holds the whole dim.
    nests, size = table.nests, table.global_size
    is_same = (nests.x == nests.y) & (nests.loops[:, :, 1] == nests.loops[:, :, 2]).all(axis=1)
    held = np.zeros_like(table.local_sizes)
    np.add.at(held, table.owner, np.where(is_same, nests.sizes, 0))
    is_whole = (table.local_sizes == size) & (held == size) & (size > 0)
    rest, whole = np.flatnonzero(~is_whole[table.owner]), np.flatnonzero(is_whole)
    owner = np.concatenate((table.owner[rest], whole))
    order = np.argsort(owner, kind="stable")
    joined = join_rows([nests.take(rest), whole_table(size, len(whole)).nests])
    return DimTable(size, table.local_sizes, owner[order], joined.take(order))
