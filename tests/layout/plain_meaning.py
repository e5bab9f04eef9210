"""What layouts mean, element by element: the slow words of the notation, and random layouts of all of it.

Nothing here is shared with the package but the trees themselves: positions are listed, cut by numpy, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from xrank.layout.notation import Count, Flat, Member, Node, Pad, Part, Parts, Product, Size, Split

Integer = Callable[[int, int], int]
"""Draws from low to high, both included: ``random.Random.randint``, or hypothesis."""

NOTHING = -1
"""The element of a local position that stands for none."""

Place = Mapping[str, int]


def counted(count: Count, names: Mapping[str, int]) -> int:
    return math.prod(factor if isinstance(factor, int) else names[factor] for factor in count)


def whole(node: Node, names: Mapping[str, int]) -> int:
    """Return a dim's global size."""
    match node:
        case Size(value):
            return value if isinstance(value, int) else names[value]
        case Product(factors):
            return math.prod(whole(factor, names) for factor in factors)
        case Parts(parts):
            return sum(whole(part.of, names) for part in parts)
        case Pad(of) | Split(of):
            return whole(of, names)
        case Flat(members):
            return sum(math.prod(whole(dim, names) for dim in member.dims) for member in members)


def positions(node: Node, names: Mapping[str, int], lengths: Mapping[str, int], at: Place) -> list[int]:
    """Return, local position by local position, the global index that it holds."""
    match node:
        case Size():
            return list(range(whole(node, names)))
        case Product(factors):
            return combined(factors, names, lengths, at)
        case Parts(parts):
            return end_to_end([(part.of,) for part in parts], names, lengths, at)
        case Pad(of, multiple):
            return padded(positions(of, names, lengths, at), counted(multiple, names))
        case Flat(members, multiple):
            held = end_to_end([member.dims for member in members], names, lengths, at)
            return held if multiple is None else padded(held, counted(multiple, names))
        case Split(of, axis, kind, unit, sizes):
            held = positions(of, names, lengths, at)
            step = 1 if unit is None else counted(unit, names)
            blocks = [held[i : i + step] for i in range(0, len(held), step)]
            length = lengths[axis]
            if sizes is not None:
                ends = np.cumsum([counted(size, names) for size in sizes])
                return held[ends[at[axis] - 1] if at[axis] else 0 : ends[at[axis]]]
            if kind == "/":
                assert len(held) % (length * step) == 0
            if kind in ("/", "/="):  # numpy deals balanced shares; where they are equal they are even
                mine = np.array_split(np.arange(len(blocks)), length)[at[axis]]
            else:
                chunk = math.ceil(len(blocks) / length)
                mine = np.arange(len(blocks))[at[axis] * chunk : (at[axis] + 1) * chunk]
            return [element for i in mine for element in blocks[i]]


def padded(held: list[int], multiple: int) -> list[int]:
    held = list(held)
    while len(held) % multiple:
        held.append(NOTHING)
    return held


def combined(dims: tuple[Node, ...], names, lengths, at) -> list[int]:
    """Return the positions of dims taken together, row-major on both sides."""
    held = [0]
    for dim in dims:
        size, minor = whole(dim, names), positions(dim, names, lengths, at)
        held = [a * size + b if NOTHING not in (a, b) else NOTHING for a in held for b in minor]
    return held


def end_to_end(parts: list[tuple[Node, ...]], names, lengths, at) -> list[int]:
    held: list[int] = []
    start = 0
    for dims in parts:
        held += [x if x == NOTHING else x + start for x in combined(dims, names, lengths, at)]
        start += math.prod(whole(dim, names) for dim in dims)
    return held


def local_shape(dims: tuple[Node, ...], names, lengths, at) -> tuple[int, ...]:
    return tuple(len(positions(dim, names, lengths, at)) for dim in dims)


def places(lengths: Mapping[str, int]) -> list[dict[str, int]]:
    return [dict(zip(lengths, at, strict=True)) for at in product(*map(range, lengths.values()))]


@dataclass
class Made:
    """Grows a random layout that is right: even cuts divide, lists sum up, axes are used once."""

    integer: Integer
    lengths: dict[str, int]
    names: dict[str, int] = field(default_factory=dict)
    pads: bool = True
    elements: int = 400

    def dims(self, count: int) -> tuple[Node, ...]:
        made: list[Node] = []
        left = list(self.lengths)
        for _ in range(count):
            dim = self.dim(left, 2)
            if math.prod(whole(d, self.names) for d in (*made, dim)) > self.elements:
                dim = self.size(3)
            made.append(dim)
            left = [axis for axis in left if axis not in axes_in(dim)]
        return tuple(made)

    def dim(self, axes: list[str], depth: int) -> Node:
        """Return a dim that may be cut by these axes."""
        kind = self.integer(0, 9 if depth else 3)
        if kind < 4:
            node: Node = self.size(8)
        elif kind < 6:
            factors: list[Node] = []
            left = axes
            for _ in range(self.integer(2, 3)):
                factor = self.dim(left, depth - 1) if self.integer(0, 1) else self.size(3)
                factors += factor.factors if isinstance(factor, Product) else (factor,)
                left = [axis for axis in left if axis not in axes_in(factor)]
            node = Product(tuple(factors))
        elif kind < 8 or not self.pads:
            parts = [Part("abc"[i], self.dim(axes, depth - 1)) for i in range(self.integer(1, 3))]
            node = Parts(tuple(parts))
        else:
            node = Pad(self.dim(axes, depth - 1), self.count(self.integer(1, 5)))
        left = [axis for axis in axes if axis not in axes_in(node)]
        while left and self.integer(0, 2) < 2:
            node = self.split(node, left.pop(self.integer(0, len(left) - 1)))
        return node

    def size(self, most: int) -> Size:
        number = self.integer(0 if most > 3 and not self.integer(0, 9) else 1, most)
        return Size(number) if self.integer(0, 1) else Size(self.name(number))

    def name(self, number: int) -> str:
        known = [name for name, value in self.names.items() if value == number]
        if known and self.integer(0, 1):
            return known[0]
        name = f"n{len(self.names)}"
        self.names[name] = number
        return name

    def count(self, number: int) -> Count:
        match self.integer(0, 3):
            case 0 if number % 2 == 0:
                return (2, number // 2)
            case 1:
                return (self.name(number),)
            case 2 if number in self.lengths.values():
                return (next(axis for axis, length in self.lengths.items() if length == number),)
        return (number,)

    def split(self, of: Node, axis: str) -> Split:
        length = self.lengths[axis]
        names = {**self.names, **self.lengths}
        sizes = {len(positions(of, names, self.lengths, at)) for at in places(self.lengths)}
        unit = self.integer(1, 4) if self.integer(0, 3) == 0 else None
        step = unit or 1
        wanted = self.integer(0, 3)
        if wanted == 0 and len(sizes) == 1:
            size = sizes.pop()
            ends = sorted(min(self.integer(0, size // step + 1) * step, size) for _ in range(length - 1))
            listed = [high - low for low, high in zip([0, *ends], [*ends, size], strict=True)]
            return Split(of, axis, "/", self.unit(unit), tuple(map(self.count, listed)))
        if wanted == 1 and all(size % (length * step) == 0 for size in sizes):
            return Split(of, axis, "/", self.unit(unit))
        return Split(of, axis, "/~" if wanted == 2 else "/=", self.unit(unit))

    def unit(self, unit: int | None) -> Count | None:
        return None if unit is None else self.count(unit)

    def flat(self) -> Node:
        members = tuple(Member(f"t{i}", self.member(self.integer(0, 2))) for i in range(self.integer(1, 3)))
        node: Node = Flat(members, self.count(self.integer(2, 4)) if self.pads and self.integer(0, 1) else None)
        left = [axis for axis in self.lengths if axis not in axes_in(node)]
        while left and self.integer(0, 3):
            node = self.split(node, left.pop(self.integer(0, len(left) - 1)))
        return node

    def member(self, count: int) -> tuple[Node, ...]:
        made: list[Node] = []
        left = list(self.lengths)[: self.integer(0, len(self.lengths))]
        for _ in range(count):
            dim = self.dim(left, 1)
            left = [axis for axis in left if axis not in axes_in(dim)]
            made.append(dim)
        return tuple(made) if math.prod(whole(d, self.names) for d in made) < 200 else ()


def axes_in(node: Node) -> set[str]:
    match node:
        case Size():
            return set()
        case Product(factors):
            return set().union(*map(axes_in, factors))
        case Parts(parts):
            return set().union(*(axes_in(part.of) for part in parts))
        case Pad(of):
            return axes_in(of)
        case Split(of, axis):
            return {axis, *axes_in(of)}
        case Flat(members):
            return set().union(*(axes_in(dim) for member in members for dim in member.dims))
