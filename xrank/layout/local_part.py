"""The part of a tensor that a rank holds by a layout, and the global shape that the parts of ranks imply."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from msgspec import Struct

from xrank.errors import IncompleteError, LayoutError
from xrank.layout.binding import (
    bind,
    check_shape,
    check_sizes,
    collect_known_names,
    count_names_of_dim,
    find_least,
    global_size,
    names_of_dim,
    solve_dims,
    unknown_size_error,
)
from xrank.layout.dim_part import DimPart, Places, Sizes, compile_dim, cut_bounds, evaluate_count, product_of
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest
from xrank.layout.notation import (
    Flat,
    LayoutTree,
    Node,
    Pad,
    Parts,
    Product,
    Size,
    Split,
    Where,
    axes_of,
    children,
    render_dim,
    walk,
)
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, check_sound


class LocalPart(Struct, frozen=True):
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


_Place = tuple[int, ...]


def infer_shape(
    layout: TensorLayout,
    mesh: DeviceMesh,
    local_shapes: Mapping[int, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """Return the global shape of a tensor from the local shapes on ranks.

    There must be a rank for each place along the axes that cut the tensor; other axes do not matter.

    Args:
        layout: the tensor's layout.
        mesh: the mesh of the ranks.
        local_shapes: rank -> its local shape, pads included.
        sizes: sizes by name, for names that local shapes do not determine: in a pad, or several in one dim.

    Raises:
        IncompleteError: there is no rank for a place.
        LayoutError: ranks at the same place disagree, the layout does not give these shapes, or several global shapes
            would give them.
    """
    shapes = {rank: check_shape(shape) for rank, shape in local_shapes.items()}
    at = {rank: _places_by_axis(layout, mesh, rank) for rank in shapes}
    for rank, shape in shapes.items():
        if len(shape) != len(layout.dims):
            raise LayoutError(
                f"rank {rank}'s local shape {shape} does not have the dims of the layout {layout}",
                rank=rank,
                got=f"{len(shape)} dims",
                want=f"{len(layout.dims)} dims",
            )
        if at[rank] is None:
            raise LayoutError(
                f"rank {rank} has a part, but holds none by the layout {layout}",
                rank=rank,
                got=str(shape),
                want="no part",
                next_step="correct the layout's \"where\", or the mesh's order of ranks",
            )
    if not shapes:
        raise IncompleteError(
            f"no rank's local shape is given for the layout {layout}",
            want="one rank or more",
            next_step="give the local shapes of all ranks",
        )
    holders = {rank: places for rank, places in at.items() if places is not None}
    inferred = _Inference(layout, mesh, shapes, holders, check_sizes(sizes)).shape()
    for rank, shape in shapes.items():
        # The sizes came from sums over ranks and loose rules, which a wrong layout may also satisfy.
        expected = local_part(layout, mesh, mesh.coordinate(rank), inferred, sizes=sizes)
        if expected is not None and shape != expected.shape:
            raise LayoutError(
                f"rank {rank}'s local shape is not the one that the layout {layout} gives for {inferred}",
                rank=rank,
                got=str(shape),
                want=str(expected.shape),
                next_step="correct the layout, or the mesh's order of ranks",
            )
    return inferred


def _places_by_axis(layout: TensorLayout, mesh: DeviceMesh, rank: int) -> dict[str, int] | None:
    """Return a rank's places along the layout's axes; None for a rank that holds nothing."""
    coordinate = mesh.coordinate(rank)
    if not holds(layout, mesh, coordinate):
        return None
    return {axis: place for axis, _, place in places_of(layout, mesh, coordinate)[1]}


class _Inference:
    """The local shapes of one tensor, and the sizes that they determine."""

    def __init__(
        self,
        layout: TensorLayout,
        mesh: DeviceMesh,
        shapes: Mapping[int, tuple[int, ...]],
        holders: Mapping[int, Mapping[str, int]],
        sizes: Mapping[str, int],
    ) -> None:
        self._layout, self._mesh = layout, mesh
        self._shapes, self._holders = shapes, holders
        self._lengths = axis_lengths(mesh, layout.view_mesh)
        self._bound = collect_known_names(layout.tree, self._lengths, sizes)

    def shape(self) -> tuple[int, ...]:
        dims = self._layout.dims
        observed = [self._local_sizes(i) for i in range(len(dims))]
        # If the parts at all places partition the dim, its size is their sum, and its names are not needed.
        found = {i: sum(observed[i].values()) for i, dim in enumerate(dims) if _is_partition(dim)}
        solve_dims(self._layout.tree, found, self._bound)
        waiting = [i for i in range(len(dims)) if i not in found]
        # Dims with fewer unknown names first: they may determine names of other dims.
        waiting.sort(key=lambda i: len(self._unknown(dims[i])))
        for i in waiting:
            unknown = self._unknown(dims[i])
            if len(unknown) > 1:
                raise unknown_size_error(self._layout.tree, unknown[0])
            for name in count_names_of_dim(dims[i]):
                if name not in self._bound:
                    raise unknown_size_error(self._layout.tree, name)
            for name in unknown:
                self._bound[name] = self._solve_name(i, name, observed[i])
            found[i] = global_size(dims[i], self._bound)
        return tuple(found[i] for i in range(len(dims)))

    def _unknown(self, dim: Node) -> list[str]:
        return [name for name in names_of_dim(dim) if name not in self._bound]

    def _local_sizes(self, dim: int) -> dict[_Place, int]:
        """Return a dim's local size at each place along the axes that cut it."""
        axes = self._layout.cut_axes[dim]
        first_at: dict[_Place, int] = {}
        for rank, shape in self._shapes.items():
            place = tuple(self._holders[rank][axis] for axis in axes)
            first = first_at.setdefault(place, rank)
            if self._shapes[first][dim] != shape[dim]:
                raise LayoutError(
                    f"ranks {first} and {rank} hold the same part of dim {dim} of the layout {self._layout}, "
                    "with different sizes",
                    rank=rank,
                    got=f"rank {first}: {self._shapes[first]}, rank {rank}: {shape}",
                    want="equal sizes of that dim",
                    next_step="correct the layout, or the mesh's order of ranks",
                )
        for place in self._places(axes):
            if place not in first_at:
                where = ", ".join(f"{axis}={at}" for axis, at in zip(axes, place, strict=True))
                raise IncompleteError(
                    f"no rank's local shape is given at {where}, which dim {dim} of the layout {self._layout} needs",
                    got=f"ranks {sorted(self._shapes)[:16]}",
                    want=f"a rank at {where}",
                    next_step="give the local shapes of all ranks",
                )
        return {place: self._shapes[rank][dim] for place, rank in first_at.items()}

    def _places(self, axes: Sequence[str]) -> Iterator[_Place]:
        """Yield the places of the mesh along these axes."""
        if self._layout.view_mesh is None:
            yield from product(*(range(self._lengths[axis]) for axis in axes))
            return
        # Axes of the mesh and of its view depend on each other, so only the ranks' coordinates are places.
        for rank in self._mesh.ranks:
            at = _places_by_axis(self._layout, self._mesh, rank)
            if at is not None:
                yield tuple(at[axis] for axis in axes)

    def _solve_name(self, i: int, name: str, observed: Mapping[_Place, int]) -> int:
        """Return the only size of a name that gives a dim the local sizes on ranks."""
        dim, axes = self._layout.dims[i], self._layout.cut_axes[i]
        target = sum(observed.values())

        def total(value: int) -> int:
            # Strict rules would raise at candidates that do not divide, and a binary search needs a value for each.
            sizes = {**self._bound, name: value}
            return sum(
                _loose_size(dim, sizes, self._lengths, dict(zip(axes, place, strict=True))) for place in observed
            )

        # Each position of the dim is on some rank, so no size exceeds the sum of the local sizes.
        least = find_least(total, target, target)
        if least is None or total(least) != target:
            raise LayoutError(
                f"no size {name!r} gives the ranks dim {i} of the layout {self._layout}, {render_dim(dim)}",
                got=f"local sizes {sorted(set(observed.values()))[:8]}",
                want="sizes that the layout gives",
                next_step="correct the layout, or the mesh's order of ranks",
            )
        # A pad rounds several sizes up to the same one; guessing among them would add or lose elements.
        over = find_least(total, target + 1, 2 * target + 1)
        most = target if over is None else over - 1
        if most > least:
            raise LayoutError(
                f"the local shapes do not determine the size {name!r} of the layout {self._layout}",
                got=f"any size from {least} to {most} would give them",
                want=f"the number that {name!r} stands for",
                next_step=f"give it in sizes={{{name!r}: ...}}, in the [sizes] table of a layout file, or as a shape",
            )
        return least


def _is_partition(node: Node) -> bool:
    """Return whether local sizes at all places add up to the global size: no pads, all parts cut by the same axes."""
    for below in walk(node):
        if isinstance(below, Pad) or (isinstance(below, Flat) and below.multiple is not None):
            return False
        if isinstance(below, Parts) and len({frozenset(axes_of(child)) for child in children(below)}) > 1:
            return False
        if isinstance(below, Flat):
            axes = {frozenset(axis for dim in member.dims for axis in axes_of(dim)) for member in below.members}
            if len(axes) > 1:
                return False
    return True


def _loose_size(node: Node, sizes: Mapping[str, int], lengths: Mapping[str, int], at: Mapping[str, int]) -> int:
    """Return a dim's local size by non-decreasing rules: even cuts are ceil chunks, and lists are truncated."""
    match node:
        case Size():
            return global_size(node, sizes)
        case Product(factors):
            return prod(_loose_size(factor, sizes, lengths, at) for factor in factors)
        case Parts(parts):
            return sum(_loose_size(part.of, sizes, lengths, at) for part in parts)
        case Pad(of, multiple):
            step = evaluate_count(multiple, sizes)
            return -(-_loose_size(of, sizes, lengths, at) // step) * step
        case Flat(members, multiple):
            size = sum(prod(_loose_size(dim, sizes, lengths, at) for dim in member.dims) for member in members)
            step = 1 if multiple is None else evaluate_count(multiple, sizes)
            return -(-size // step) * step
        case Split(of, axis):
            size = _loose_size(of, sizes, lengths, at)
            if node.sizes is not None:
                listed = [evaluate_count(count, sizes, least=0) for count in node.sizes][: at[axis] + 1]
                low = sum(listed[: at[axis]])
                return max(0, min(sum(listed), size) - min(low, size))
            kind = "/~" if node.kind == "/" else node.kind
            low, high = cut_bounds(Split(of, axis, kind, node.unit), size, lengths[axis], at[axis], sizes)
            return high - low
