"""Local parts: what one rank holds of one tensor, as nests from its local elements to the global ones.

Everything is one function: a dim's tree compiles to (global size, local size, nests over its indices), and dims combine
as a product does, so that a new kind of node is one more case of `_compile`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias

from xrank.errors import IncompleteError, LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest, canonical, restrict
from xrank.layout.notation import Node, Size, Split, SplitKind, axes_of, render, render_dim, size_names_of
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["DimPart", "LocalPart", "infer_shape", "local_part"]

Places: TypeAlias = tuple[tuple[str, int, int], ...]
"""(axis, its length, the rank's coordinate along it) for each axis that matters: the key of the memo."""

Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""(name, size) for each named size."""


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What a rank holds of one tensor.

    Args:
        shape: the local shape.
        nests: canonical; x is the element's row-major address in the local shape, y in the global shape. None for an
            empty shard, whose shape has a 0.
    """

    shape: tuple[int, ...]
    nests: tuple[Nest, ...]


@dataclass(frozen=True, slots=True)
class DimPart:
    """One dim compiled for one place: x of its nests is an index of the local dim, y of the global one."""

    global_size: int
    local_size: int
    nests: tuple[Nest, ...]


def local_part(
    layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int], shape: Sequence[int]
) -> LocalPart:
    """Return what the rank at a coordinate holds of a tensor.

    Args:
        layout: how the tensor is cut.
        mesh: the mesh that gives the axes their lengths; the layout's own, if it has one.
        coordinate: the rank's place along the mesh's axes, as `DeviceMesh.coordinate` gives it.
        shape: the tensor's global shape.

    Raises:
        LayoutError: the layout fits neither the mesh nor the shape, or an even split does not divide.
    """
    if layout.device_mesh is not None and layout.device_mesh != mesh:
        raise LayoutError(
            f"the layout {layout} belongs to another mesh", got=mesh.grid, want=f"the mesh {layout.device_mesh.grid!r}"
        )
    return _layout_part(layout.dims, _checked_shape(shape), _places(layout, mesh, coordinate))


def infer_shape(layout: TensorLayout, mesh: DeviceMesh, local_shapes: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the global shape of a tensor from the local shapes that ranks hold.

    The ranks given must reach every place along the axes that cut the tensor; along other axes they may be any.

    Args:
        layout: how the tensor is cut.
        mesh: the mesh of the ranks.
        local_shapes: rank -> its local shape.

    Raises:
        IncompleteError: no rank is given for some place.
        LayoutError: ranks at one place disagree, or the shapes are not those that the layout gives.
    """
    shapes = {rank: _checked_shape(shape) for rank, shape in local_shapes.items()}
    coordinates = {rank: mesh.coordinate(rank) for rank in shapes}
    for rank, shape in shapes.items():
        if len(shape) != len(layout.dims):
            raise LayoutError(
                f"rank {rank}'s local shape {shape} has not the dims of the layout {layout}",
                rank=rank,
                got=f"{len(shape)} dims",
                want=f"{len(layout.dims)} dims",
            )
    if not shapes:
        raise IncompleteError(f"no rank's local shape is given for the layout {layout}", want="one rank or more")
    inferred = tuple(_inferred_size(layout, i, mesh, shapes, coordinates) for i in range(len(layout.dims)))
    for rank, shape in shapes.items():
        expected = local_part(layout, mesh, coordinates[rank], inferred).shape
        if shape != expected:
            raise LayoutError(
                f"rank {rank}'s local shape is not the one that the layout {layout} gives for {inferred}",
                rank=rank,
                got=str(shape),
                want=str(expected),
                next_step="correct the layout, or the mesh's order of ranks",
            )
    return inferred


def _inferred_size(
    layout: TensorLayout,
    dim: int,
    mesh: DeviceMesh,
    shapes: Mapping[int, tuple[int, ...]],
    coordinates: Mapping[int, Mapping[str, int]],
) -> int:
    """Return a dim's global size: the sum of the local sizes over the places along the axes that cut it."""
    axes = axes_of(layout.dims[dim])
    lengths = [mesh.axis_length(axis) for axis in axes]
    holders: dict[tuple[int, ...], int] = {}  # place -> the first rank there
    for rank, shape in shapes.items():
        place = tuple(coordinates[rank][axis] for axis in axes)
        first = holders.setdefault(place, rank)
        if shapes[first][dim] != shape[dim]:
            raise LayoutError(
                f"ranks {first} and {rank} hold the same part of dim {dim} of the layout {layout}, with other sizes",
                rank=rank,
                got=f"rank {first}: {shapes[first]}, rank {rank}: {shape}",
                want="equal sizes of that dim",
                next_step="correct the layout, or the mesh's order of ranks",
            )
    for place in product(*(range(length) for length in lengths)):
        if place not in holders:
            where = ", ".join(f"{axis}={at}" for axis, at in zip(axes, place, strict=True))
            raise IncompleteError(
                f"no rank's local shape is given at {where}, which dim {dim} of the layout {layout} needs",
                got=f"ranks {sorted(shapes)[:16]}",
                want=f"a rank at {where}",
            )
    return sum(shapes[rank][dim] for rank in holders.values())


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise LayoutError("a shape is no sequence of integers", got=repr(shape)[:200], want="such as (4, 8)") from None
    if any(size < 0 for size in sizes):
        raise LayoutError(f"the shape {sizes} has a negative size", got=str(sizes), want="sizes of 0 or more")
    return sizes


def _places(layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int]) -> Places:
    """Return the places along the axes of the layout alone: ranks that differ elsewhere share the compiled part."""
    places: list[tuple[str, int, int]] = []
    for axis in (axis for axes in layout.axes for axis in axes):
        length = mesh.axis_length(axis)
        if axis not in coordinate:
            raise LayoutError(
                f"a coordinate does not say where the rank is along {axis!r}, which cuts the layout {layout}",
                got=str(dict(coordinate)),
                want=f"{axis}=0 to {axis}={length - 1}",
            )
        place = operator.index(coordinate[axis])
        if not 0 <= place < length:
            raise LayoutError(
                f"the mesh {mesh.grid!r} has no place {place} along {axis!r}",
                got=f"{axis}={place}",
                want=f"0 to {length - 1}",
            )
        places.append((axis, length, place))
    return tuple(places)


def _bound(dims: tuple[Node, ...], shape: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes that the names of a layout have when it meets a global shape."""
    if len(dims) != len(shape):
        raise LayoutError(
            f"the layout {render(dims)} does not fit the shape {shape}: {len(dims)} dims for {len(shape)}",
            got=f"shape {shape}",
            want=f"{len(dims)} dims",
        )
    bound: dict[str, int] = {}
    for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        node = dim
        while isinstance(node, Split):
            node = node.of
        known = node.value if isinstance(node.value, int) else bound.setdefault(node.value, size)
        if known != size:
            raise LayoutError(
                f"the layout {render(dims)} does not fit the shape {shape}: dim {i}, {render_dim(dim)}, "
                f"is {known} in the layout and {size} in the shape",
                got=f"{size} in dim {i} of shape {shape}",
                want=str(known),
            )
    return bound


@lru_cache(maxsize=16_384)
def _layout_part(dims: tuple[Node, ...], shape: tuple[int, ...], places: Places) -> LocalPart:
    """Compile a whole layout: its dims, major first, combined as a product."""
    bound = _bound(dims, shape)
    parts = []
    for dim in dims:
        axes = axes_of(dim)
        sizes = tuple((name, bound[name]) for name in dict.fromkeys(size_names_of(dim)))
        parts.append(_dim_part(dim, sizes, tuple(place for place in places if place[0] in axes)))
    whole = DimPart(1, 1, (Nest(0, 0),))
    for part in parts:
        whole = _product(whole, part)
    return LocalPart(tuple(part.local_size for part in parts), tuple(canonical(nest) for nest in whole.nests))


@lru_cache(maxsize=16_384)
def _dim_part(dim: Node, sizes: Sizes, places: Places) -> DimPart:
    """Compile one dim, remembered by its text and by the sizes and places that it depends on, and nothing else."""
    return _compile(dim, dict(sizes), {axis: (length, place) for axis, length, place in places})


def _compile(node: Node, sizes: Mapping[str, int], places: Mapping[str, tuple[int, int]]) -> DimPart:
    match node:
        case Size(value):
            size = value if isinstance(value, int) else sizes[value]
            nests = (canonical(Nest(0, 0, ((size, 1, 1),))),) if size else ()
            return DimPart(size, size, nests)
        case Split(of, axis, kind):
            inner = _compile(of, sizes, places)
            length, place = places[axis]
            if kind == "/" and inner.local_size % length:
                raise LayoutError(
                    f"{render_dim(node)}: {inner.local_size} does not divide by {length}, the length of {axis!r}",
                    got=f"{inner.local_size} positions over {length} ranks",
                    want=f"a multiple of {length}",
                    next_step=f'write "/~{axis}" if the last ranks hold less',
                )
            low, high = _cut(kind, inner.local_size, length, place)
            kept = (piece for nest in inner.nests for piece in restrict(nest, low, high))
            return DimPart(inner.global_size, high - low, tuple(Nest(x - low, y, loops) for x, y, loops in kept))


def _cut(kind: SplitKind, size: int, length: int, place: int) -> tuple[int, int]:
    """Return the range of local positions that a split keeps at a place."""
    chunk = size // length if kind == "/" else -(-size // length)
    return min(place * chunk, size), min((place + 1) * chunk, size)


def _product(major: DimPart, minor: DimPart) -> DimPart:
    """Combine two index spaces: local and global addresses each grow by the minor one's size."""
    local_size, global_size = minor.local_size, minor.global_size
    nests = tuple(
        Nest(
            a.x * local_size + b.x,
            a.y * global_size + b.y,
            (*((n, xs * local_size, ys * global_size) for n, xs, ys in a.loops), *b.loops),
        )
        for a in major.nests
        for b in minor.nests
    )
    return DimPart(major.global_size * global_size, major.local_size * local_size, nests)
