"""One side of a recipe: the tensors that a text names, their shape, and the loops over each of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from xrank.errors import LayoutError
from xrank.layout.binding import global_size
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
    render,
    render_dim,
    size_names_of,
)
from xrank.layout.parser import TextParser
from xrank.layout.tensor_name import TensorName

GAP = "_"
"""Name of a part whose tensors are other rules': ``layers.{<_: L | next: M>}`` are M layers that count on from L."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a recipe: a tensor, or many of one kind whose names hold dims.

    Args:
        name: the tensor's name, possibly with dims; may be empty.
        dims: the tensor's own dims.
    """

    name: TensorName
    dims: tuple[Node, ...]

    def __str__(self) -> str:
        text = render(LayoutTree(self.dims))
        return f"{self.name} {text}" if str(self.name) else text

    @property
    def all_dims(self) -> tuple[Node, ...]:
        """The dims of the name, then those of the tensor: the shape of all these tensors as one."""
        return (*self.name.dims, *self.dims)


@dataclass(frozen=True, slots=True)
class SideLoop:
    """A size other than 1: its text (a name, a number or a sum), its count, and its stride in elements."""

    name: str
    count: int
    stride: int


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of a side: its name ("" without parts), its first address, and its loops with the largest stride first."""

    key: str
    start: int
    loops: tuple[SideLoop, ...]


def parse_side(text: str) -> Side:
    """Parse one side of a recipe: the dims of a layout, with or without a name before them.

    Raises:
        LayoutError: the text is not a side, or holds something for ranks: a cut, a pad, a clause, a flat.
    """
    reader = TextParser(text, "a side of a recipe")
    name = TensorName(*reader.naming())
    tree = reader.layout()
    reader.end()
    side = Side(name, tree.dims)
    for dim in side.all_dims:
        _refuse_ranks(dim, side)
    if (tree.view, tree.where, tree.sums) != (None, (), ()):
        raise LayoutError(f"a recipe describes whole tensors, and {text[:200]!r} has a clause", got=render(tree))
    return side


def _refuse_ranks(node: Node, side: Side) -> None:
    match node:
        case Split() | Pad() | Flat():
            raise LayoutError(
                f"a recipe describes whole tensors, and {side} holds {render_dim(node)}",
                got=render_dim(node),
                want="sizes, products and parts",
                next_step="describe in the layout how ranks share the tensor, and in the recipe its parts",
            )
        case Product(factors):
            for factor in factors:
                _refuse_ranks(factor, side)
        case Parts(parts):
            for part in parts:
                _refuse_ranks(part.of, side)


def global_shape(side: Side, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the sizes of all dims of a side, its name's first.

    Raises:
        LayoutError: a size is unknown or 0, or there are more elements than addresses.
    """
    for dim in side.all_dims:
        for name in size_names_of(dim):
            if name not in sizes:
                raise LayoutError(
                    f"the size {name!r} of {side} is not known",
                    got=f"sizes {sorted(sizes)[:16]}",
                    want=f"the number that {name!r} stands for",
                )
    shape = tuple(global_size(dim, sizes) for dim in side.all_dims)
    if 0 in shape:
        raise LayoutError(f"{side} has no element", got=f"shape {shape}", want="sizes of 1 or more")
    if prod(shape) > MAX_SIZE:
        raise LayoutError(f"{side} has too many elements", got=f"{prod(shape):,}", want=f"at most {MAX_SIZE:,}")
    return shape


def part_names(side: Side) -> tuple[str, ...]:
    """Return the names of the innermost parts of a side, in the order of the text.

    Example:
        >>> part_names(parse_side("[g <q: r d | kv: <k: d | v: d>>, h]"))
        ('q', 'k', 'v')
    """
    return tuple(name for dim in side.all_dims for name in _part_names(dim))


def _part_names(node: Node) -> list[str]:
    match node:
        case Product(factors):
            return [name for factor in factors for name in _part_names(factor)]
        case Parts(parts) if not node.is_sum:
            real = [part for part in parts if part.name != GAP]
            if len(real) == 1 < len(parts):
                return _part_names(real[0].of)
            return [name for part in real for name in _part_names(part.of) or [part.name]]
    return []


def find_range(dim: Node, sizes: Mapping[str, int]) -> tuple[int, int | None]:
    """Return the first index of a name's dim and the one after its last; None while a size is unknown."""
    gaps = [part.of for part in dim.parts if part.name == GAP] if isinstance(dim, Parts) else []
    first = sum(global_size(gap, sizes) for gap in gaps if {*size_names_of(gap)} <= sizes.keys())
    return first, global_size(dim, sizes) if {*size_names_of(dim)} <= sizes.keys() else None


def branches_of(side: Side, sizes: Mapping[str, int]) -> list[Branch]:
    """Return the innermost parts of a side; a side without parts is one branch without a key."""
    found = _combine(side.all_dims, sizes)
    keys = [branch.key for branch in found]
    for key in keys:
        if keys.count(key) > 1:
            raise LayoutError(f"two parts of {side} are called {key!r}", got=repr(key), want="each part's name once")
    return found


def _combine(nodes: Sequence[Node], sizes: Mapping[str, int]) -> list[Branch]:
    """Return the parts of a product of nodes, major node first."""
    found = [Branch("", 0, ())]
    for node in nodes:
        size = global_size(node, sizes)
        minors = _parts_of(node, sizes)
        # Parts in two places would make one part of each pair, and pairs have no names of their own.
        if len(found) > 1 and len(minors) > 1:
            raise LayoutError(
                f"a side of a recipe has parts in two places, {render_dim(node)} the second",
                got=render_dim(node),
                want="parts in one place, or parts in parts",
                next_step="split them with two recipes, one after the other",
            )
        found = [
            Branch(
                minor.key or major.key,
                major.start * size + minor.start,
                (*(SideLoop(loop.name, loop.count, loop.stride * size) for loop in major.loops), *minor.loops),
            )
            for major in found
            for minor in minors
        ]
    return found


def _parts_of(node: Node, sizes: Mapping[str, int]) -> list[Branch]:
    match node:
        case Size(value):
            return [Branch("", 0, () if value == 1 else (SideLoop(str(value), global_size(node, sizes), 1),))]
        case Product(factors):
            return _combine(factors, sizes)
        case Parts() if node.is_sum:
            return [Branch("", 0, (SideLoop(render_dim(node), global_size(node, sizes), 1),))]
        case Parts(parts):
            found: list[Branch] = []
            start = 0
            # Beside gaps, a single part is the whole of what the side has, and needs no name.
            is_named = sum(part.name != GAP for part in parts) > 1 or len(parts) == 1
            for part in parts:
                if part.name != GAP:
                    inner = _parts_of(part.of, sizes)
                    name = part.name if is_named else ""
                    found += [Branch(b.key or name, b.start + start, b.loops) for b in inner]
                start += global_size(part.of, sizes)
            return found
    raise AssertionError(node)  # parse_side refuses other nodes
