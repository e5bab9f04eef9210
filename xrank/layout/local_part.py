"""The part of a tensor that a rank holds by a layout, and the global shape that the parts of ranks imply."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise, product
from math import prod
from typing import TypeAlias

from msgspec import Struct

from xrank.errors import IncompleteError, LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.nests import Nest, canonical, restrict
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
    axes_of,
    children,
    count_names_of,
    render,
    render_count,
    render_dim,
    size_names_of,
    walk,
)
from xrank.layout.tensor_layout import TensorLayout, axis_lengths, check_sound


@lru_cache(maxsize=4096)
def _names_of(tree: LayoutTree) -> tuple[str, ...]:
    """Return all names in a layout's sizes and counts, each once."""
    return tuple(dict.fromkeys(name for dim in tree.dims for name in (*size_names_of(dim), *count_names_of(dim))))


_check_sound = lru_cache(maxsize=4096)(lambda tree, lengths: check_sound(tree, dict(lengths)))


def bind(
    tree: LayoutTree, shape: Sequence[int], lengths: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of every name in a layout's sizes and counts; an axis in a count is its length.

    A name's number is in `sizes`, or follows from a dim whose other names are known. LayoutError if the shape does not
    fit, or a name is unknown.
    """
    dims = tree.dims
    if len(dims) != len(shape):
        what = f"the layout {render(tree)} does not fit the shape {tuple(shape)}: {len(dims)} dims for {len(shape)}"
        raise LayoutError(what, got=f"shape {tuple(shape)}", want=f"{len(dims)} dims")
    bound = collect_known_names(tree, lengths, sizes)
    solve_dims(tree, dict(enumerate(shape)), bound)
    for name in _names_of(tree):
        if name not in bound:
            raise unknown_size_error(f"the layout {render(tree)}", name)
    # A dim without an unknown name has not been compared with the shape yet.
    for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        held = global_size(dim, bound)
        if held != size:
            what = f"the layout {render(tree)} does not fit the shape {tuple(shape)}: dim {i}, {render_dim(dim)}, "
            what += f"is {held} in the layout and {size} in the shape"
            raise LayoutError(what, got=f"{size} in dim {i} of shape {tuple(shape)}", want=str(held))
    return bound


def collect_known_names(tree: LayoutTree, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the names that are known without a shape; a name that is both a size and an axis is refused."""
    bound: dict[str, int] = {}
    for name in _names_of(tree):
        if name in sizes:
            if name in lengths:
                what = f"{name!r} is both a size and an axis in the layout {render(tree)}"
                got = f"size {sizes[name]}, axis of length {lengths[name]}"
                raise LayoutError(what, got=got, want="another name for the size")
            bound[name] = sizes[name]
    return {**bound, **dict(_count_lengths(tree, lengths))}


def solve_dims(tree: LayoutTree, shape: Mapping[int, int], bound: dict[str, int]) -> None:
    """Add the names that dims of known sizes determine: each round solves the dims with one unknown name."""
    waiting = [i for i in shape if size_names_of(tree.dims[i])]
    while waiting:
        later = []
        for i in waiting:
            dim = tree.dims[i]
            unknown = [name for name in size_names_of(dim) if name not in bound]
            if len(unknown) == 1:
                _solve(tree, i, shape[i], unknown[0], bound)
            elif unknown:
                later.append(i)
        # No progress: the other names need a size from the caller, who raises the error.
        if len(later) == len(waiting):
            return
        waiting = later


def _solve(tree: LayoutTree, i: int, size: int, name: str, bound: dict[str, int]) -> None:
    """Bind the only unknown name of a dim with a known global size."""
    dim = tree.dims[i]
    node = dim
    while isinstance(node, Split):
        node = node.of
    if isinstance(node, Size):
        bound[name] = size
        return

    def evaluate(value: int) -> int:
        return global_size(dim, {**bound, name: value})

    # A name may occur several times in a dim, so dividing would not do. Sizes only grow with a name: search for it.
    first, step = evaluate(0), evaluate(1) - evaluate(0)
    if step == 0:
        return  # another factor is 0, so every value fits
    value = find_least(evaluate, size, size)
    if value is None or evaluate(value) != size:
        what = f"no size {name!r} makes dim {i} of the layout {render(tree)}, {render_dim(dim)}, as long as {size}"
        want = f"{first} and multiples of {step} more" if evaluate(2) - evaluate(1) == step else "another size"
        raise LayoutError(what, got=f"{size} in dim {i}", want=want)
    bound[name] = value


def find_least(function: Callable[[int], int], target: int, most: int) -> int | None:
    """Return the least value up to `most` at which a non-decreasing function reaches a target; None without one."""
    if function(most) < target:
        return None
    low, high = 0, most
    while low < high:
        middle = (low + high) // 2
        if function(middle) >= target:
            high = middle
        else:
            low = middle + 1
    return low


def global_size(node: Node, sizes: Mapping[str, int]) -> int:
    """Return a dim's global size; pads and splits do not change it."""
    match node:
        case Size(value):
            return value if isinstance(value, int) else sizes[value]
        case Product(factors):
            return prod(global_size(factor, sizes) for factor in factors)
        case Parts(parts):
            return sum(global_size(part.of, sizes) for part in parts)
        case Pad(of) | Split(of):
            return global_size(of, sizes)
        case Flat(members):
            return sum(prod(global_size(dim, sizes) for dim in member.dims) for member in members)


def unknown_size_error(of: str, name: str, *, has_shape: bool = True) -> LayoutError:
    """Return the error that a name's size is unknown, and does not follow from a shape if there is one."""
    return LayoutError(
        f"the size {name!r} of {of} is not known",
        got=f"no size {name!r}" + (f", and no dim determines {name!r}" if has_shape else ""),
        want=f"the number that {name!r} stands for",
        next_step=f"give it in sizes={{{name!r}: ...}}, or in the [sizes] table of a layout file",
    )


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as integers; refuse other values."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        what = "a shape is not a sequence of integers"
        raise LayoutError(what, got=repr(shape)[:200], want="a tuple such as (4, 8)") from None
    if any(size < 0 for size in sizes):
        raise LayoutError(f"the shape {sizes} has a negative size", got=str(sizes), want="sizes of 0 or more")
    return sizes


def check_sizes(sizes: Mapping[str, int] | None) -> dict[str, int]:
    """Return name -> size as integers; refuse other values."""
    checked: dict[str, int] = {}
    for name, size in (sizes or {}).items():
        number = size if type(size) is int else None
        if number is None and not isinstance(size, bool) and hasattr(size, "__index__"):
            number = operator.index(size)
        if number is None or not 0 <= number <= MAX_SIZE:
            what = f"the size {name!r} is not a number of elements"
            raise LayoutError(what, got=repr(size)[:80], want=f"an integer, 0 to {MAX_SIZE}")
        checked[name] = number
    return checked


MAX_NESTS = 1 << 14
"""Largest number of nests in one rank's part of a tensor; real layouts have up to a dozen."""

Places: TypeAlias = tuple[tuple[str, int, int], ...]
"""(axis, its length, the rank's coordinate along it) for each axis that the dim depends on: a cache key."""

Sizes: TypeAlias = tuple[tuple[str, int], ...]
"""(name, number) for each name that the dim depends on: a size, or an axis in a count with its length."""


class DimPart(Struct, frozen=True):
    """One dim compiled for one place; x of its canonical nests is an index of the local dim, y of the global dim."""

    global_size: int
    local_size: int
    nests: tuple[Nest, ...]

    def __post_init__(self) -> None:
        check_limits(self.global_size, self.local_size, len(self.nests))


@lru_cache(maxsize=16_384)
def compile_dim(dim: Node, sizes: Sizes, places: Places) -> DimPart:
    """Compile one dim, cached by its tree and the sizes and places that it depends on.

    LayoutError if an even split does not divide, listed sizes do not fit, or a limit is exceeded.
    """
    return _compile(dim, dict(sizes), {axis: (length, place) for axis, length, place in places})


def _compile(node: Node, sizes: Mapping[str, int], places: Mapping[str, tuple[int, int]]) -> DimPart:
    match node:
        case Size(value):
            size = value if isinstance(value, int) else sizes[value]
            # A nest has one element or more, so an empty dim has no nest.
            return DimPart(size, size, (canonical(Nest(0, 0, ((size, 1, 1),))),) if size else ())
        case Product(factors):
            return product_of(_compile(factor, sizes, places) for factor in factors)
        case Parts(parts):
            return _end_to_end(_compile(part.of, sizes, places) for part in parts)
        case Pad(of, multiple):
            return _pad(_compile(of, sizes, places), multiple, sizes)
        case Split(of, axis):
            if isinstance(of, Size):
                inner = _compile(of, sizes, places)
            else:  # the cache shares it between all places along the split's own axis
                inner = compile_dim(of, tuple(sizes.items()), tuple((each, *places[each]) for each in axes_of(of)))
            low, high = cut_bounds(node, inner.local_size, *places[axis], sizes)
            kept = (piece for nest in inner.nests for piece in restrict(nest, low, high))
            nests = tuple(Nest(x - low, y, loops) for x, y, loops in kept)
            return DimPart(inner.global_size, high - low, nests)
        case Flat(members, multiple):
            whole = _end_to_end(product_of(_compile(dim, sizes, places) for dim in member.dims) for member in members)
            return whole if multiple is None else _pad(whole, multiple, sizes)


def product_of(parts: Iterable[DimPart]) -> DimPart:
    """Multiply index spaces, major first: indices of a space are scaled by the sizes of all later ones."""
    whole = DimPart(1, 1, (Nest(0, 0),))
    for minor in parts:
        # Before the product is made: two parts within the limit may have 2^28 pairs.
        check_limits(0, 0, len(whole.nests) * len(minor.nests))
        local_size, global_size = minor.local_size, minor.global_size
        nests = tuple(
            canonical(
                Nest(
                    a.x * local_size + b.x,
                    a.y * global_size + b.y,
                    (*((n, xs * local_size, ys * global_size) for n, xs, ys in a.loops), *b.loops),
                )
            )
            for a in whole.nests
            for b in minor.nests
        )
        whole = DimPart(whole.global_size * global_size, whole.local_size * local_size, nests)
    return whole


def _end_to_end(parts: Iterable[DimPart]) -> DimPart:
    """Lay index spaces end to end. Adjacent nests are not merged, because one part alone may have replicas."""
    local_size = global_size = 0
    nests: list[Nest] = []
    for part in parts:
        nests += (Nest(x + local_size, y + global_size, loops) for x, y, loops in part.nests)
        local_size += part.local_size
        global_size += part.global_size
    return DimPart(global_size, local_size, tuple(nests))


def _pad(part: DimPart, multiple: Count, sizes: Mapping[str, int]) -> DimPart:
    step = evaluate_count(multiple, sizes)
    return DimPart(part.global_size, -(-part.local_size // step) * step, part.nests)


def evaluate_count(count: Count, sizes: Mapping[str, int], least: int = 1) -> int:
    """Return the number of a count; refuse numbers below `least`."""
    number = prod(factor if isinstance(factor, int) else sizes[factor] for factor in count)
    if number < least:
        what = f"the count {render_count(count)} is {number}"
        raise LayoutError(what, got=str(number), want=f"a number of {least} or more")
    return number


def cut_bounds(split: Split, size: int, length: int, place: int, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the range of `size` local positions that a split keeps at a place along an axis of `length` places.

    LayoutError if an even split does not divide, or listed sizes do not fit.
    """
    unit = 1 if split.unit is None else evaluate_count(split.unit, sizes)
    if split.sizes is not None:
        bounds = _bounds_of_list(split, size, length, unit, sizes)
        return bounds[place], bounds[place + 1]
    if split.kind == "/":
        # Each rank's share must itself be a multiple of the unit.
        if size % (length * unit):
            got = f"{size} positions over {length} ranks"
            what = f"{render_dim(split)}: {size} is not divisible by {length}, the length of {split.axis!r}"
            next_step = f'write "/~{split.axis}" if the last ranks hold less'
            if size % length:
                raise LayoutError(what, got=got, want=f"a multiple of {length}", next_step=next_step)
            each = size // length
            what = f"{render_dim(split)}: {each} positions on each of {length} ranks are not a multiple of {unit}"
            next_step = f'write "/={split.axis}%{unit}" if some ranks hold one more block than others'
            raise LayoutError(
                what, got=f"{got}, {each} each", want=f"a multiple of {length * unit}", next_step=next_step
            )
        return place * (size // length), (place + 1) * (size // length)
    units = -(-size // unit)
    if split.kind == "/~":
        # torch.chunk: equal chunks, so the last ranks hold less or nothing.
        chunk = -(-units // length)
        low, high = place * chunk, (place + 1) * chunk
    else:
        # numpy.array_split: the first ranks hold one unit more.
        share, more = divmod(units, length)
        low, high = (place * share + min(place, more), (place + 1) * share + min(place + 1, more))
    # The last unit may be incomplete, and ranks after the last chunk begin at the end.
    return min(low * unit, size), min(high * unit, size)


def _bounds_of_list(split: Split, size: int, length: int, unit: int, sizes: Mapping[str, int]) -> list[int]:
    assert split.sizes is not None
    text = render_dim(split)
    listed = [evaluate_count(count, sizes, least=0) for count in split.sizes]
    if len(listed) != length:
        what = f"{text}: {len(listed)} sizes are listed for {length} ranks along {split.axis!r}"
        raise LayoutError(what, got=f"{len(listed)} sizes", want=f"{length}, the length of {split.axis!r}")
    if sum(listed) != size:
        got = f"{' + '.join(map(str, listed[:16]))}{' ...' if len(listed) > 16 else ''} = {sum(listed)}"
        raise LayoutError(f"{text}: the listed sizes make {sum(listed)} positions of {size}", got=got, want=str(size))
    bounds = [0, *accumulate(listed)]
    for low, high in pairwise(bounds):
        # The end of the dim is no cut, so it may lie within a unit.
        if high % unit and high != size:
            what = f"{text}: a cut at {high} is not at a multiple of {unit}"
            got = f"{high - low} positions from {low} on"
            raise LayoutError(what, got=got, want=f"cuts at multiples of {unit}")
    return bounds


def check_limits(global_size: int, local_size: int, num_nests: int) -> None:
    """Refuse a dim with more elements than addresses, or more nests than `MAX_NESTS`."""
    if max(global_size, local_size) > MAX_SIZE:
        what = "a layout gives a tensor more elements than addresses can count"
        got = f"{max(global_size, local_size):,}"
        raise LayoutError(what, got=got, want=f"at most {MAX_SIZE:,}")
    if num_nests > MAX_NESTS:
        what = "a layout cuts one rank's part of a tensor into too many pieces"
        raise LayoutError(what, got=f"{num_nests:,} pieces", want=f"at most {MAX_NESTS:,}")


class LocalPart(Struct, frozen=True):
    """The part of a tensor that a rank holds."""

    shape: tuple[int, ...]
    """The local shape, pads included."""
    nests: tuple[Nest, ...]
    """Canonical; x is the element's row-major address in the local shape, y in the global shape. Empty for an empty
    shard, whose shape has a 0. Local elements without a nest are padding."""
    sums: tuple[str, ...] = ()
    """Axes along which the ranks hold addends of the tensor. If there are any, the elements are not values: the caller
    must add them up over these axes, or refuse them."""


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
    if not holds(layout, mesh, coordinate):
        return None
    known = _relevant(layout.tree, check_sizes(sizes)) if sizes else ()
    # Axes in "where" and "sum" do not change the part: without them in the key, ranks along them share a cache entry.
    cutting = places[: sum(map(len, layout.cut_axes))]
    return _layout_part(layout.tree, check_shape(shape), cutting, known, _count_lengths(layout.tree, lengths))


def holds(layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int]) -> bool:
    """Return whether the layout's "where" includes a rank; arguments as in `local_part`."""
    if not layout.tree.where:
        return True
    at = {axis: (length - 1, place) for axis, length, place in places_of(layout, mesh, coordinate)[1]}
    for where in layout.tree.where:
        end, place = at[where.axis]
        first, last = (end if bound is None else bound for bound in (where.first, where.last))
        if not first <= place <= last:
            return False
    return True


def places_of(
    layout: TensorLayout, mesh: DeviceMesh, coordinate: Mapping[str, int]
) -> tuple[Mapping[str, int], Places]:
    """Return the lengths of the axes that a layout may use, and the places along the axes that it uses.

    Ranks that differ only along other axes share the compiled part. LayoutError if the layout belongs to another mesh,
    or the coordinate is not in this one.
    """
    # Identity first: equality compares the tuples of all ranks, for each rank and tensor.
    if layout.device_mesh is not None and layout.device_mesh is not mesh and layout.device_mesh != mesh:
        what = f"the layout {layout} belongs to a different mesh"
        raise LayoutError(what, got=mesh.grid, want=f"the mesh {layout.device_mesh.grid!r}")
    if layout.tree.view is not None and layout.view_mesh is None:
        # The view's axes may have the mesh's names with other lengths.
        what = f"the layout {layout} names a view, but has no mesh with views"
        want = f"a layout with the view {layout.tree.view!r}"
        next_step = "attach the mesh and its views by TensorLayout.with_mesh"
        raise LayoutError(what, got=f"the mesh {mesh.grid!r} alone", want=want, next_step=next_step)
    lengths = axis_lengths(mesh, layout.view_mesh)
    if layout.view_mesh is not None:
        # For an axis in both meshes the view's place counts, as its length does in `axis_lengths`.
        coordinate = {**coordinate, **layout.view_mesh.coordinate(mesh.rank_at(coordinate))}
    places: list[tuple[str, int, int]] = []
    uncut = (*(where.axis for where in layout.tree.where), *layout.tree.sums)
    for axis in (*(axis for axes in layout.cut_axes for axis in axes), *uncut):
        if axis not in lengths:
            # Raises the error with the mesh's own axes.
            mesh.axis_length(axis)
        length = lengths[axis]
        if axis not in coordinate:
            what = f"a coordinate lacks the index along {axis!r}, which the layout {layout} uses"
            raise LayoutError(what, got=str(dict(coordinate)), want=f"{axis}=0 to {axis}={length - 1}")
        place = operator.index(coordinate[axis])
        mesh.check_place(axis, place, length)
        places.append((axis, length, place))
    # A layout with a mesh was checked when the mesh was attached.
    if layout.device_mesh is None:
        _check_sound(layout.tree, tuple(lengths.items()))
    return lengths, tuple(places)


def _relevant(tree: LayoutTree, sizes: Mapping[str, int]) -> Sizes:
    return tuple((name, sizes[name]) for name in _names_of(tree) if name in sizes)


def _count_lengths(tree: LayoutTree, lengths: Mapping[str, int]) -> Sizes:
    """Return the axes in counts with their lengths."""
    return tuple((name, lengths[name]) for dim in tree.dims for name in count_names_of(dim) if name in lengths)


@lru_cache(maxsize=16_384)
def _layout_part(
    tree: LayoutTree, shape: tuple[int, ...], places: Places, sizes: Sizes, count_lengths: Sizes
) -> LocalPart:
    parts = compile_bound_dims(_bind_dims(tree, shape, sizes, count_lengths), places)
    return LocalPart(tuple(part.local_size for part in parts), product_of(parts).nests, tree.sums)


@lru_cache(maxsize=4096)
def _bind_dims(
    tree: LayoutTree, shape: tuple[int, ...], sizes: Sizes, count_lengths: Sizes
) -> tuple[tuple[Node, frozenset[str], Sizes], ...]:
    """Return each dim with the axes that cut it and the numbers of its names; shared by all ranks."""
    bound = bind(tree, shape, dict(count_lengths), dict(sizes))
    names = {dim: (*size_names_of(dim), *count_names_of(dim)) for dim in tree.dims}
    numbers = {dim: tuple((name, bound[name]) for name in own) for dim, own in names.items()}
    return tuple((dim, frozenset(axes_of(dim)), numbers[dim]) for dim in tree.dims)


def compile_bound_dims(bound: Iterable[tuple[Node, frozenset[str], Sizes]], places: Places) -> list[DimPart]:
    """Return the compiled dims of `bind_dims` at a rank's places, as from `places_of`."""
    return [compile_dim(dim, known, tuple(p for p in places if p[0] in axes)) for dim, axes, known in bound]


def bind_dims(
    layout: TensorLayout, shape: Sequence[int], lengths: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[tuple[Node, frozenset[str], Sizes], ...]:
    """Return each dim with the axes that cut it and the numbers of its names; errors as `bind`."""
    own = _relevant(layout.tree, sizes)
    return _bind_dims(layout.tree, check_shape(shape), own, _count_lengths(layout.tree, lengths))


_Place = tuple[int, ...]
_CORRECT = "correct the layout, or the mesh's order of ranks"
_GIVE_ALL = "give the local shapes of all ranks"


def infer_shape(
    layout: TensorLayout,
    mesh: DeviceMesh,
    local_shapes: Mapping[int, Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
) -> tuple[int, ...]:
    """Return the global shape of a tensor from the local shapes on ranks.

    Local shapes include pads; the global shape does not. `sizes` has the names that local shapes do not determine: in a
    pad, or several in one dim.

    Raises:
        IncompleteError: no rank has a local shape for some place along the axes that cut the tensor.
        LayoutError: ranks at the same place disagree, the layout does not give these shapes, or several global shapes
            would give them.
    """
    shapes = {rank: check_shape(shape) for rank, shape in local_shapes.items()}
    at = {rank: _places_by_axis(layout, mesh, rank) for rank in shapes}
    for rank, shape in shapes.items():
        if len(shape) != len(layout.dims):
            what = f"rank {rank}'s local shape {shape} does not have the dims of the layout {layout}"
            raise LayoutError(what, rank=rank, got=f"{len(shape)} dims", want=f"{len(layout.dims)} dims")
        if at[rank] is None:
            what = f"rank {rank} has a part, but the layout {layout} gives it none"
            next_step = "correct the layout's \"where\", or the mesh's order of ranks"
            raise LayoutError(what, rank=rank, got=str(shape), want="no part", next_step=next_step)
    if not shapes:
        what = f"no rank's local shape is given for the layout {layout}"
        raise IncompleteError(what, want="one rank or more", next_step=_GIVE_ALL)
    holders = {rank: places for rank, places in at.items() if places is not None}
    lengths = axis_lengths(mesh, layout.view_mesh)
    bound = collect_known_names(layout.tree, lengths, check_sizes(sizes))
    inferred = _Inference(layout, mesh, shapes, holders, lengths, bound).shape()
    for rank, shape in shapes.items():
        # The sizes came from sums over ranks and loose rules, which a wrong layout may also satisfy.
        expected = local_part(layout, mesh, mesh.coordinate(rank), inferred, sizes=sizes)
        if expected is not None and shape != expected.shape:
            what = f"rank {rank}'s local shape is not the one that the layout {layout} gives for {inferred}"
            raise LayoutError(what, rank=rank, got=str(shape), want=str(expected.shape), next_step=_CORRECT)
    return inferred


def _places_by_axis(layout: TensorLayout, mesh: DeviceMesh, rank: int) -> dict[str, int] | None:
    """Return a rank's places along the layout's axes; None for a rank that holds nothing."""
    coordinate = mesh.coordinate(rank)
    if not holds(layout, mesh, coordinate):
        return None
    return {axis: place for axis, _, place in places_of(layout, mesh, coordinate)[1]}


class _Inference(Struct):
    """The local shapes of one tensor, and the sizes that they determine."""

    layout: TensorLayout
    mesh: DeviceMesh
    shapes: Mapping[int, tuple[int, ...]]
    holders: Mapping[int, Mapping[str, int]]
    """Rank -> its place along each axis."""
    lengths: Mapping[str, int]
    bound: dict[str, int]

    def shape(self) -> tuple[int, ...]:
        dims = self.layout.dims
        observed = [self._local_sizes(i) for i in range(len(dims))]
        # If the parts at all places partition the dim, its size is their sum, and its names are not needed.
        found = {i: sum(observed[i].values()) for i, dim in enumerate(dims) if _is_partition(dim)}
        solve_dims(self.layout.tree, found, self.bound)
        waiting = [i for i in range(len(dims)) if i not in found]
        # Dims with fewer unknown names first: they may determine names of other dims.
        waiting.sort(key=lambda i: len(self._unknown(dims[i])))
        for i in waiting:
            unknown = self._unknown(dims[i])
            if len(unknown) > 1:
                raise unknown_size_error(f"the layout {self.layout}", unknown[0])
            for name in count_names_of(dims[i]):
                if name not in self.bound:
                    raise unknown_size_error(f"the layout {self.layout}", name)
            for name in unknown:
                self.bound[name] = self._solve_name(i, name, observed[i])
            found[i] = global_size(dims[i], self.bound)
        return tuple(found[i] for i in range(len(dims)))

    def _unknown(self, dim: Node) -> list[str]:
        return [name for name in size_names_of(dim) if name not in self.bound]

    def _local_sizes(self, dim: int) -> dict[_Place, int]:
        """Return a dim's local size at each place along the axes that cut it."""
        axes = self.layout.cut_axes[dim]
        first_at: dict[_Place, int] = {}
        for rank, shape in self.shapes.items():
            place = tuple(self.holders[rank][axis] for axis in axes)
            first = first_at.setdefault(place, rank)
            if self.shapes[first][dim] != shape[dim]:
                what = f"ranks {first} and {rank} hold the same part of dim {dim} of the layout {self.layout}"
                got, want = f"rank {first}: {self.shapes[first]}, rank {rank}: {shape}", "equal sizes of that dim"
                raise LayoutError(f"{what}, with different sizes", rank=rank, got=got, want=want, next_step=_CORRECT)
        for place in self._places(axes):
            if place not in first_at:
                where = ", ".join(f"{axis}={at}" for axis, at in zip(axes, place, strict=True))
                what = f"no rank's local shape is given at {where}, which dim {dim} of the layout {self.layout} needs"
                got = f"ranks {sorted(self.shapes)[:16]}"
                raise IncompleteError(what, got=got, want=f"a rank at {where}", next_step=_GIVE_ALL)
        return {place: self.shapes[rank][dim] for place, rank in first_at.items()}

    def _places(self, axes: Sequence[str]) -> Iterator[_Place]:
        """Yield the places of the mesh along these axes."""
        if self.layout.view_mesh is None:
            yield from product(*(range(self.lengths[axis]) for axis in axes))
            return
        # Axes of the mesh and of its view depend on each other, so only the ranks' coordinates are places.
        for rank in self.mesh.ranks:
            at = _places_by_axis(self.layout, self.mesh, rank)
            if at is not None:
                yield tuple(at[axis] for axis in axes)

    def _solve_name(self, i: int, name: str, observed: Mapping[_Place, int]) -> int:
        """Return the only size of a name that gives a dim the local sizes on ranks."""
        dim, axes = self.layout.dims[i], self.layout.cut_axes[i]
        target = sum(observed.values())

        def total(value: int) -> int:
            # Strict rules would raise at candidates that do not divide, and a binary search needs a value for each.
            sizes = {**self.bound, name: value}
            at = (dict(zip(axes, place, strict=True)) for place in observed)
            return sum(_loose_size(dim, sizes, self.lengths, places) for places in at)

        # Each position of the dim is on some rank, so no size exceeds the sum of the local sizes.
        least = find_least(total, target, target)
        if least is None or total(least) != target:
            what = f"no size {name!r} gives the ranks dim {i} of the layout {self.layout}, {render_dim(dim)}"
            got = f"local sizes {sorted(set(observed.values()))[:8]}"
            raise LayoutError(what, got=got, want="sizes that the layout gives", next_step=_CORRECT)
        # A pad rounds several sizes up to the same one; guessing among them would add or lose elements.
        over = find_least(total, target + 1, 2 * target + 1)
        most = target if over is None else over - 1
        if most > least:
            what = f"the local shapes do not determine the size {name!r} of the layout {self.layout}"
            got = f"any size from {least} to {most} would give them"
            next_step = f"give it in sizes={{{name!r}: ...}}, in the [sizes] table of a layout file, or as a shape"
            raise LayoutError(what, got=got, want=f"the number that {name!r} stands for", next_step=next_step)
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
