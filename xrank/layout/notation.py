"""The notation's trees: the parsed form of a layout's text, and the canonical text of each tree.

`xrank.layout.dim_part` defines their meaning, `xrank.layout.parser` the grammar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal, TypeAlias

from msgspec import Struct

MAX_CHARACTERS = 10_000
"""The longest text that is parsed; layouts in use have fewer than a hundred characters."""

MAX_DEPTH = 32
"""Largest depth of a dim's tree, so functions over it can recurse."""

MAX_SIZE = (1 << 63) - 1
"""The largest integer that is parsed: element addresses are 64-bit numbers."""

SplitKind: TypeAlias = Literal["/", "/~", "/="]

Count: TypeAlias = tuple[int | str, ...]
"""A number of positions as factors: integers, sizes, or axes, which stand for their lengths."""


class Size(Struct, frozen=True):
    """A whole dim: an integer, or a name that a shape binds to an integer."""

    value: int | str


class Product(Struct, frozen=True):
    """Dims as digits of one dim, major first; the factors are not products."""

    factors: tuple[Node, ...]


class Part(Struct, frozen=True):
    """One dim of `Parts`; its name is empty in a sum."""

    name: str
    of: Node


class Parts(Struct, frozen=True):
    """Dims laid end to end, locally and globally: ``<q: a | k: b>``, or without names the sum ``(a + b)``."""

    parts: tuple[Part, ...]

    @property
    def is_sum(self) -> bool:
        """Whether the parts have no names, so that they count as one size."""
        return not self.parts[0].name


class Pad(Struct, frozen=True):
    """A dim whose local size is rounded up to a multiple; the added positions are padding."""

    of: Node
    multiple: Count


class Split(Struct, frozen=True):
    """A range of the local positions of a dim for each coordinate along an axis.

    Args:
        of: the dim to cut.
        axis: the axis whose coordinate selects the range.
        kind: ``/`` equal ranges, ``/~`` ceil chunks, ``/=`` balanced ranges.
        unit: cuts are only at multiples of it.
        sizes: the sizes of the ranges, if they are listed; then the kind is ``/``.
    """

    of: Node
    axis: str
    kind: SplitKind
    unit: Count | None = None
    sizes: tuple[Count, ...] | None = None


class Member(Struct, frozen=True):
    """A tensor whose local elements are in a flat buffer, row-major."""

    name: str
    dims: tuple[Node, ...]


class Flat(Struct, frozen=True):
    """The local elements of tensors end to end in one dim, padded at the end; the only dim of its layout."""

    members: tuple[Member, ...]
    multiple: Count | None = None


Node: TypeAlias = Size | Product | Parts | Pad | Split | Flat


class Where(Struct, frozen=True):
    """The places along an axis whose ranks hold the tensor: first to last, inclusive; None is the last place."""

    axis: str
    first: int | None
    last: int | None


@dataclass(frozen=True, slots=True)
class LayoutTree:
    """A whole layout: dims and clauses.

    Args:
        dims: one node per dim.
        view: the view of the mesh whose axes it may use in addition to the mesh's own.
        where: the ranks that hold the tensor, with each axis at most once; empty: all ranks.
        sums: axes along which the ranks hold addends.
    """

    dims: tuple[Node, ...]
    view: str | None = None
    where: tuple[Where, ...] = ()
    sums: tuple[str, ...] = ()
    _hash: int = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Caches look up a layout for each rank and tensor, and hashing its tree again would dominate the time.
        object.__setattr__(self, "_hash", hash((self.dims, self.view, self.where, self.sums)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        # Hashes of texts differ between processes, so the receiver computes its own.
        return (LayoutTree, (self.dims, self.view, self.where, self.sums))


def render(tree: LayoutTree) -> str:
    """Return the canonical text of a layout; `parse` is the inverse."""
    dims = tree.dims
    # A flat layout's dim has no brackets around it, only around its members' dims.
    text = render_dim(dims[0]) if len(dims) == 1 and _is_flat(dims[0]) else _bracket(dims)
    if tree.view is not None:
        text += f" in {tree.view}"
    if tree.where:
        text += " where " + ", ".join(f"{where.axis}={_place(where)}" for where in tree.where)
    return text + "".join(f" sum({axis})" for axis in tree.sums)


def render_dim(node: Node) -> str:
    """Return the text of one dim."""
    match node:
        case Size(value):
            return str(value)
        case Product(factors):
            return " ".join(_term(factor) for factor in factors)
        case Parts(parts) if node.is_sum:
            return "(" + " + ".join(render_dim(part.of) for part in parts) + ")"
        case Parts(parts):
            return "<" + " | ".join(f"{part.name}: {render_dim(part.of)}" for part in parts) + ">"
        case Pad(of, multiple):
            return f"pad({render_dim(of)}, {render_count(multiple)})"
        case Split(of, axis, kind, unit, sizes):
            text = f"{_term(of)}{kind}{axis}"
            if unit is not None:
                text += f"%{render_count(unit)}"
            return text if sizes is None else text + "{" + ",".join(map(render_count, sizes)) + "}"
        case Flat(members, multiple):
            inner = [f"{member.name} {_bracket(member.dims)}" for member in members]
            return "flat(" + ", ".join(inner if multiple is None else [*inner, f"pad {render_count(multiple)}"]) + ")"


def render_count(count: Count) -> str:
    """Return the text of a count."""
    return "*".join(map(str, count))


def _term(node: Node) -> str:
    # A split binds tighter than a product, so a product as an operand or a factor needs parentheses.
    return f"({render_dim(node)})" if isinstance(node, Product) else render_dim(node)


def _bracket(dims: tuple[Node, ...]) -> str:
    return "[" + ", ".join(render_dim(dim) for dim in dims) + "]"


def _place(where: Where) -> str:
    if where.first is None:
        return "last"
    return str(where.first) if where.first == where.last else f"{where.first}..{where.last}"


def _is_flat(node: Node) -> bool:
    while isinstance(node, Split):
        node = node.of
    return isinstance(node, Flat)


def children(node: Node) -> tuple[Node, ...]:
    """Return the child nodes of a node, in the order of the text."""
    match node:
        case Size():
            return ()
        case Product(factors):
            return factors
        case Parts(parts):
            return tuple(part.of for part in parts)
        case Pad(of) | Split(of):
            return (of,)
        case Flat(members):
            return tuple(dim for member in members for dim in member.dims)


def walk(node: Node) -> Iterator[Node]:
    """Yield the nodes of a tree in post-order."""
    for child in children(node):
        yield from walk(child)
    yield node


def axes_of(node: Node) -> tuple[str, ...]:
    """Return the axes that cut a dim, each once, in the order of the cuts."""
    return tuple(dict.fromkeys(below.axis for below in walk(node) if isinstance(below, Split)))


def size_names_of(node: Node) -> tuple[str, ...]:
    """Return the names of sizes in a dim, each once, in the order of the text."""
    values = (below.value for below in walk(node) if isinstance(below, Size))
    return tuple(dict.fromkeys(value for value in values if isinstance(value, str)))


def count_names_of(node: Node) -> tuple[str, ...]:
    """Return the names in a dim's counts, each once: sizes, or axes, which stand for their lengths."""
    factors = (factor for below in walk(node) for count in _counts(below) for factor in count)
    return tuple(dict.fromkeys(factor for factor in factors if isinstance(factor, str)))


def _counts(node: Node) -> tuple[Count, ...]:
    match node:
        case Pad(_, multiple):
            return (multiple,)
        case Split(unit=unit, sizes=sizes):
            return (*(() if unit is None else (unit,)), *(sizes or ()))
        case Flat(multiple=multiple):
            return () if multiple is None else (multiple,)
    return ()


def with_sizes(tree: LayoutTree, sizes: Mapping[str, int]) -> LayoutTree:
    """Return the layout with these names replaced by numbers."""
    return dataclasses.replace(tree, dims=tuple(_with_sizes(dim, sizes) for dim in tree.dims))


def _with_sizes(node: Node, sizes: Mapping[str, int]) -> Node:
    def number(count: Count) -> Count:
        return tuple(sizes.get(factor, factor) if isinstance(factor, str) else factor for factor in count)

    match node:
        case Size(value):
            return Size(sizes.get(value, value)) if isinstance(value, str) else node
        case Product(factors):
            return Product(tuple(_with_sizes(factor, sizes) for factor in factors))
        case Parts(parts):
            return Parts(tuple(Part(part.name, _with_sizes(part.of, sizes)) for part in parts))
        case Pad(of, multiple):
            return Pad(_with_sizes(of, sizes), number(multiple))
        case Split(of, axis, kind, unit, listed):
            return Split(
                _with_sizes(of, sizes),
                axis,
                kind,
                None if unit is None else number(unit),
                None if listed is None else tuple(map(number, listed)),
            )
        case Flat(members, multiple):
            dims = (tuple(_with_sizes(dim, sizes) for dim in member.dims) for member in members)
            named = tuple(Member(member.name, own) for member, own in zip(members, dims, strict=True))
            return Flat(named, None if multiple is None else number(multiple))
