"""Bind the names of a layout's sizes to numbers by a global shape."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod

from xrank.errors import LayoutError
from xrank.layout.notation import (
    MAX_SIZE,
    Flat,
    LayoutTree,
    Node,
    Pad,
    Parts,
    Product,
    Size,
    Split,
    count_names_of,
    render,
    render_dim,
    size_names_of,
)

names_of_dim = lru_cache(maxsize=4096)(size_names_of)
count_names_of_dim = lru_cache(maxsize=4096)(count_names_of)


def bind(
    tree: LayoutTree, shape: Sequence[int], lengths: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the number of every name in a layout's sizes and counts; an axis in a count is its length.

    A name's number is in `sizes`, or follows from a dim whose other names are known.

    Raises:
        LayoutError: the shape does not fit, or a name is unknown.
    """
    dims = tree.dims
    if len(dims) != len(shape):
        raise LayoutError(
            f"the layout {render(tree)} does not fit the shape {tuple(shape)}: {len(dims)} dims for {len(shape)}",
            got=f"shape {tuple(shape)}",
            want=f"{len(dims)} dims",
        )
    bound = collect_known_names(tree, lengths, sizes)
    solve_dims(tree, dict(enumerate(shape)), bound)
    for dim in dims:
        for name in (*names_of_dim(dim), *count_names_of_dim(dim)):
            if name not in bound:
                raise unknown_size_error(tree, name)
    # A dim without an unknown name has not been compared with the shape yet.
    for i, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        held = global_size(dim, bound)
        if held != size:
            raise LayoutError(
                f"the layout {render(tree)} does not fit the shape {tuple(shape)}: dim {i}, {render_dim(dim)}, "
                f"is {held} in the layout and {size} in the shape",
                got=f"{size} in dim {i} of shape {tuple(shape)}",
                want=str(held),
            )
    return bound


def collect_known_names(tree: LayoutTree, lengths: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the names that are known without a shape; a name that is both a size and an axis is refused."""
    bound: dict[str, int] = {}
    for dim in tree.dims:
        for name in (*names_of_dim(dim), *count_names_of_dim(dim)):
            if name in sizes:
                if name in lengths:
                    raise LayoutError(
                        f"{name!r} is both a size and an axis in the layout {render(tree)}",
                        got=f"size {sizes[name]}, axis of length {lengths[name]}",
                        want="another name for the size",
                    )
                bound[name] = sizes[name]
        for name in count_names_of_dim(dim):
            if name in lengths:
                bound[name] = lengths[name]
    return bound


def solve_dims(tree: LayoutTree, shape: Mapping[int, int], bound: dict[str, int]) -> None:
    """Add the names that dims of known sizes determine: each round solves the dims with one unknown name."""
    waiting = [i for i in shape if names_of_dim(tree.dims[i])]
    while waiting:
        later = []
        for i in waiting:
            dim = tree.dims[i]
            unknown = [name for name in names_of_dim(dim) if name not in bound]
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
        raise LayoutError(
            f"no size {name!r} makes dim {i} of the layout {render(tree)}, {render_dim(dim)}, as long as {size}",
            got=f"{size} in dim {i}",
            want=f"{first} and multiples of {step} more" if evaluate(2) - evaluate(1) == step else "another size",
        )
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


def unknown_size_error(tree: LayoutTree, name: str) -> LayoutError:
    """Return the error that a name is unknown."""
    return LayoutError(
        f"the size {name!r} of the layout {render(tree)} is not known",
        got=f"no size {name!r}, and no dim that leaves {name!r} alone to be found",
        want=f"the number that {name!r} stands for",
        next_step=f"give it in sizes={{{name!r}: ...}}, or in the [sizes] table of a layout file",
    )


def check_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape as integers; refuse other values."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise LayoutError(
            "a shape is not a sequence of integers", got=repr(shape)[:200], want="such as (4, 8)"
        ) from None
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
            raise LayoutError(
                f"the size {name!r} is not a number of elements",
                got=repr(size)[:80],
                want=f"an integer, 0 to {MAX_SIZE}",
            )
        checked[name] = number
    return checked
