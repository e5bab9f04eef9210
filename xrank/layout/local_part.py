"""Local parts: the part of a tensor that one rank holds, as nests from its local elements to the global ones."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from xrank.errors import LayoutError
from xrank.layout.binding import bind, check_shape, check_sizes, count_names_of_dim, names_of_dim
from xrank.layout.dim_part import DimPart, Places, Sizes, compile_dim, product_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest
from xrank.layout.notation import LayoutTree, Node, Where, axes_of
from xrank.layout.soundness import check_sound
from xrank.layout.tensor_layout import TensorLayout


@dataclass(frozen=True, slots=True)
class LocalPart:
    """The part of a tensor that a rank holds.

    Args:
        shape: the local shape, pads included.
        nests: canonical; x is the element's row-major address in the local shape, y in the global shape. Empty for an
            empty shard, whose shape has a 0. Local elements without a nest are padding.
        sums: axes along which the ranks hold addends of the tensor. If there are any, the elements are not values:
            the caller must add them up over these axes, or refuse them.
    """

    shape: tuple[int, ...]
    nests: tuple[Nest, ...]
    sums: tuple[str, ...] = ()


def local_part(
    layout: TensorLayout,
    mesh: DeviceMesh,
    coordinate: Mapping[str, int],
    shape: Sequence[int],
    *,
    sizes: Mapping[str, int] | None = None,
) -> LocalPart | None:
    """Return the part of a tensor that the rank at a coordinate holds; None if the layout's "where" excludes it.

    Args:
        layout: the tensor's layout.
        mesh: the mesh, which defines the lengths of the axes; the layout's own mesh must be equal.
        coordinate: the rank's place along the mesh's axes, as from `DeviceMesh.coordinate`.
        shape: the tensor's global shape; for a flat layout (number of all members' elements,).
        sizes: sizes by name, for names that the shape does not define.

    Raises:
        LayoutError: the layout does not fit the mesh or the shape, a size is unknown, or an even split does not divide.

    Example:
        >>> mesh = DeviceMesh((2,), ("tp",))
        >>> local_part(TensorLayout.parse("[f/tp, h]"), mesh, {"tp": 1}, (4, 3))
        LocalPart(shape=(2, 3), nests=(Nest(x=0, y=6, loops=((6, 1, 1),)),), sums=())
    """
    lengths, places = places_of(layout, mesh, coordinate)
    if not _is_held(layout.tree, lengths, places):
        return None
    known = _relevant(layout.tree, check_sizes(sizes)) if sizes else ()
    # Axes in "where" and "sum" do not change the part: without them in the key, ranks along them share a cache entry.
    others = _uncut_axes(layout.tree)
    cutting = tuple(place for place in places if place[0] not in others) if others else places
    return _layout_part(layout.tree, check_shape(shape), cutting, known, _count_lengths(layout.tree, lengths))


def holds(layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int]) -> bool:
    """Return whether the layout's "where" includes a rank; arguments as in `local_part`."""
    return not layout.tree.where or _is_held(layout.tree, *places_of(layout, mesh, coordinate))


def _is_held(tree: LayoutTree, lengths: Mapping[str, int], places: Places) -> bool:
    if not tree.where:
        return True
    at = {axis: place for axis, _, place in places}
    return all(_includes(where, at[where.axis], lengths[where.axis]) for where in tree.where)


def _includes(where: Where, place: int, length: int) -> bool:
    first = length - 1 if where.first is None else where.first
    last = length - 1 if where.last is None else where.last
    return first <= place <= last


def places_of(
    layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int]
) -> tuple[Mapping[str, int], Places]:
    """Return the lengths of the axes that a layout may use, and the places along the axes that it uses.

    Ranks that differ only along other axes share the compiled part.

    Raises:
        LayoutError: the layout belongs to another mesh, or the coordinate is not in this one.
    """
    # Identity first: equality compares the tuples of all ranks, for each rank and tensor.
    if layout.device_mesh is not None and layout.device_mesh is not mesh and layout.device_mesh != mesh:
        raise LayoutError(
            f"the layout {layout} belongs to another mesh", got=mesh.grid, want=f"the mesh {layout.device_mesh.grid!r}"
        )
    if layout.tree.view is not None and layout.view_mesh is None:
        # The view's axes may have the mesh's names with other lengths.
        raise LayoutError(
            f"the layout {layout} names a view, and its mesh with views is not attached",
            got=f"the mesh {mesh.grid!r} alone",
            want=f"a layout with the view {layout.tree.view!r}",
            next_step="attach the mesh and its views by TensorLayout.with_mesh",
        )
    lengths = _lengths(mesh, layout.view_mesh)
    if layout.view_mesh is not None:
        # For an axis in both meshes the view's place counts, as its length does in `axis_lengths`.
        coordinate = {**coordinate, **layout.view_mesh.coordinate(mesh.rank_at(coordinate))}
    places: list[tuple[str, int, int]] = []
    for axis in (*(axis for axes in layout.cut_axes for axis in axes), *_uncut_axes(layout.tree)):
        if axis not in lengths:
            # Raises the error with the mesh's own axes.
            mesh.axis_length(axis)
        length = lengths[axis]
        if axis not in coordinate:
            raise LayoutError(
                f"a coordinate lacks the place along {axis!r}, which the layout {layout} uses",
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
    # A layout with a mesh was checked when the mesh was attached.
    if layout.device_mesh is None:
        _check_sound_on(layout.tree, tuple(lengths.items()))
    return lengths, tuple(places)


@lru_cache(maxsize=4096)
def _check_sound_on(tree: LayoutTree, lengths: Sizes) -> None:
    check_sound(tree, dict(lengths))


@lru_cache(maxsize=64)
def _lengths_of(
    shape: tuple[int, ...], names: tuple[str, ...], view_shape: tuple[int, ...], view_names: tuple[str, ...]
) -> Mapping[str, int]:
    return {**dict(zip(names, shape, strict=True)), **dict(zip(view_names, view_shape, strict=True))}


def _lengths(mesh: DeviceMesh, view: DeviceMesh | None) -> Mapping[str, int]:
    if view is None:
        return _lengths_of(mesh.shape, mesh.axis_names, (), ())
    return _lengths_of(mesh.shape, mesh.axis_names, view.shape, view.axis_names)


def _uncut_axes(tree: LayoutTree) -> tuple[str, ...]:
    """Return the axes in a layout's "where" and "sum" clauses."""
    if not tree.where and not tree.sums:
        return ()
    return (*(where.axis for where in tree.where), *tree.sums)


def _relevant(tree: LayoutTree, sizes: Mapping[str, int]) -> Sizes:
    names = dict.fromkeys(name for dim in tree.dims for name in (*names_of_dim(dim), *count_names_of_dim(dim)))
    return tuple((name, sizes[name]) for name in names if name in sizes)


def _count_lengths(tree: LayoutTree, lengths: Mapping[str, int]) -> Sizes:
    """Return the axes in counts with their lengths."""
    return tuple((name, lengths[name]) for name in _names_in_counts(tree) if name in lengths)


@lru_cache(maxsize=4096)
def _names_in_counts(tree: LayoutTree) -> tuple[str, ...]:
    return tuple(name for dim in tree.dims for name in count_names_of_dim(dim))


@lru_cache(maxsize=16_384)
def _layout_part(
    tree: LayoutTree, shape: tuple[int, ...], places: Places, sizes: Sizes, count_lengths: Sizes
) -> LocalPart:
    """Compile a whole layout as the product of its dims."""
    parts = [
        compile_dim(dim, own, tuple(place for place in places if place[0] in axes))
        for dim, axes, own in _bind_dims(tree, shape, sizes, count_lengths)
    ]
    return LocalPart(tuple(part.local_size for part in parts), product_of(parts).nests, tree.sums)


@lru_cache(maxsize=4096)
def _bind_dims(
    tree: LayoutTree, shape: tuple[int, ...], sizes: Sizes, count_lengths: Sizes
) -> tuple[tuple[Node, frozenset[str], Sizes], ...]:
    """Return each dim with the axes that cut it and the numbers of its names; shared by all ranks."""
    bound = bind(tree, shape, dict(count_lengths), dict(sizes))
    return tuple(
        (
            dim,
            frozenset(axes_of(dim)),
            tuple((name, bound[name]) for name in (*names_of_dim(dim), *count_names_of_dim(dim))),
        )
        for dim in tree.dims
    )


def dim_parts(
    layout: TensorLayout, shape: Sequence[int], lengths: Mapping[str, int], places: Places, sizes: Mapping[str, int]
) -> list[DimPart]:
    """Return the compiled dims of a layout at a rank's places, as from `places_of`."""
    bound = bind_dims(layout, shape, lengths, sizes)
    return [compile_dim(dim, known, tuple(p for p in places if p[0] in axes)) for dim, axes, known in bound]


def bind_dims(
    layout: TensorLayout, shape: Sequence[int], lengths: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[tuple[Node, frozenset[str], Sizes], ...]:
    """Return each dim with the axes that cut it and the numbers of its names.

    Args:
        layout: the tensor's layout.
        shape: its global shape.
        lengths: lengths of the axes that the layout may use, as from `places_of`.
        sizes: sizes by name.

    Raises:
        LayoutError: the layout does not fit the shape, or a size is unknown.
    """
    own = _relevant(layout.tree, sizes)
    return _bind_dims(layout.tree, check_shape(shape), own, _count_lengths(layout.tree, lengths))
