"""Compile dims for one place of a mesh; this defines the meaning of each node of the notation.

A dim's tree compiles to (global size, local size, nests over its indices). In a product sizes multiply; parts lie end
to end; a pad adds local positions without a nest; a split keeps a range of the local positions of its operand and
numbers them from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import TypeAlias

from msgspec import Struct

from xrank.errors import LayoutError
from xrank.layout.nests import Nest, canonical, restrict
from xrank.layout.notation import (
    MAX_SIZE,
    Count,
    Flat,
    Node,
    Pad,
    Parts,
    Product,
    Size,
    Split,
    axes_of,
    render_count,
    render_dim,
)

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


UNIT = DimPart(1, 1, (Nest(0, 0),))
"""A dim with one index: the empty product."""


@lru_cache(maxsize=16_384)
def compile_dim(dim: Node, sizes: Sizes, places: Places) -> DimPart:
    """Compile one dim, cached by its tree and the sizes and places that it depends on.

    Raises:
        LayoutError: an even split does not divide, listed sizes do not fit, or a limit is exceeded.
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
            inner = _inner_part(of, sizes, places)
            low, high = cut_bounds(node, inner.local_size, *places[axis], sizes)
            kept = (piece for nest in inner.nests for piece in restrict(nest, low, high))
            nests = tuple(Nest(x - low, y, loops) for x, y, loops in kept)
            return _check(DimPart(inner.global_size, high - low, nests))
        case Flat(members, multiple):
            whole = _end_to_end(product_of(_compile(dim, sizes, places) for dim in member.dims) for member in members)
            return whole if multiple is None else _pad(whole, multiple, sizes)


def _inner_part(node: Node, sizes: Mapping[str, int], places: Mapping[str, tuple[int, int]]) -> DimPart:
    """Compile the operand of a split; the cache shares it between all places along the split's own axis."""
    if isinstance(node, Size):
        return _compile(node, sizes, places)
    own = tuple((axis, *places[axis]) for axis in _axes_of(node))
    return compile_dim(node, tuple(sizes.items()), own)


_axes_of = lru_cache(maxsize=4096)(axes_of)


def product_of(parts: Iterable[DimPart]) -> DimPart:
    """Multiply index spaces, major first: indices of a space are scaled by the sizes of all later ones."""
    whole = UNIT
    for minor in parts:
        # Before the product is made: two parts within the limit may have 2^28 pairs.
        if len(whole.nests) * len(minor.nests) > MAX_NESTS:
            raise _limit_error(len(whole.nests) * len(minor.nests))
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
        whole = _check(DimPart(whole.global_size * global_size, whole.local_size * local_size, nests))
    return whole


def _end_to_end(parts: Iterable[DimPart]) -> DimPart:
    """Lay index spaces end to end. Adjacent nests are not merged, because one part alone may have replicas."""
    local_size = global_size = 0
    nests: list[Nest] = []
    for part in parts:
        nests += (Nest(x + local_size, y + global_size, loops) for x, y, loops in part.nests)
        local_size += part.local_size
        global_size += part.global_size
    return _check(DimPart(global_size, local_size, tuple(nests)))


def _pad(part: DimPart, multiple: Count, sizes: Mapping[str, int]) -> DimPart:
    step = evaluate_count(multiple, sizes)
    return _check(DimPart(part.global_size, -(-part.local_size // step) * step, part.nests))


def evaluate_count(count: Count, sizes: Mapping[str, int], least: int = 1) -> int:
    """Return the number of a count; refuse numbers below `least`."""
    number = prod(factor if isinstance(factor, int) else sizes[factor] for factor in count)
    if number < least:
        raise LayoutError(
            f"the count {render_count(count)} is {number}", got=str(number), want=f"a number of {least} or more"
        )
    return number


def cut_bounds(split: Split, size: int, length: int, place: int, sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the range of `size` local positions that a split keeps at a place along an axis of `length` places.

    Raises:
        LayoutError: an even split does not divide, or listed sizes do not fit.
    """
    unit = 1 if split.unit is None else evaluate_count(split.unit, sizes)
    if split.sizes is not None:
        bounds = _bounds_of_list(split, size, length, unit, sizes)
        return bounds[place], bounds[place + 1]
    if split.kind == "/":
        # Each rank's share must itself be a multiple of the unit.
        if size % (length * unit):
            raise _uneven(split, size, length, unit)
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


def _uneven(split: Split, size: int, length: int, unit: int) -> LayoutError:
    text = render_dim(split)
    if size % length:
        return LayoutError(
            f"{text}: {size} does not divide by {length}, the length of {split.axis!r}",
            got=f"{size} positions over {length} ranks",
            want=f"a multiple of {length}",
            next_step=f'write "/~{split.axis}" if the last ranks hold less',
        )
    return LayoutError(
        f"{text}: {size // length} positions on each of {length} ranks are not a multiple of {unit}",
        got=f"{size} positions over {length} ranks, {size // length} each",
        want=f"a multiple of {length * unit}",
        next_step=f'write "/={split.axis}%{unit}" if some ranks hold a block more than others',
    )


def _bounds_of_list(split: Split, size: int, length: int, unit: int, sizes: Mapping[str, int]) -> list[int]:
    assert split.sizes is not None
    text = render_dim(split)
    listed = [evaluate_count(count, sizes, least=0) for count in split.sizes]
    if len(listed) != length:
        raise LayoutError(
            f"{text}: {len(listed)} sizes are listed for {length} ranks along {split.axis!r}",
            got=f"{len(listed)} sizes",
            want=f"{length}, the length of {split.axis!r}",
        )
    if sum(listed) != size:
        raise LayoutError(
            f"{text}: the listed sizes make {sum(listed)} positions of {size}",
            got=f"{' + '.join(map(str, listed[:16]))}{' ...' if len(listed) > 16 else ''} = {sum(listed)}",
            want=str(size),
        )
    bounds = [0, *accumulate(listed)]
    for low, high in pairwise(bounds):
        # The end of the dim is no cut, so it may lie within a unit.
        if high % unit and high != size:
            raise LayoutError(
                f"{text}: a cut at {high} is not at a multiple of {unit}",
                got=f"{high - low} positions from {low} on",
                want=f"cuts at multiples of {unit}",
            )
    return bounds


def _check(part: DimPart) -> DimPart:
    check_limits(part.global_size, part.local_size, len(part.nests))
    return part


def check_limits(global_size: int, local_size: int, num_nests: int) -> None:
    """Refuse a dim with more elements than addresses, or more nests than `MAX_NESTS`."""
    if max(global_size, local_size) > MAX_SIZE:
        raise LayoutError(
            "a layout gives a tensor more elements than addresses can count",
            got=f"{max(global_size, local_size):,}",
            want=f"at most {MAX_SIZE:,}",
        )
    if num_nests > MAX_NESTS:
        raise _limit_error(num_nests)


def _limit_error(num_nests: int) -> LayoutError:
    return LayoutError(
        "a layout cuts one rank's part of a tensor into too many pieces",
        got=f"{num_nests:,} pieces",
        want=f"at most {MAX_NESTS:,}",
    )
