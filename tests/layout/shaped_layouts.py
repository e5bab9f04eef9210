"""Random layouts of the whole notation for a tensor of a given shape, so that two of them can be of one tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tests.layout.plain_meaning import Integer, Made, axes_in
from xrank.layout import DeviceMesh, TensorLayout
from xrank.layout.local_part import local_part
from xrank.layout.nests import size as num_pairs
from xrank.layout.notation import LayoutTree, Node, Pad, Part, Parts, Product, Size, Where

GRIDS = ((4,), (2, 2), (2, 3), (2, 2, 2), (3,), (4, 2), (1, 2, 3), (5,), (2,), (1,))

__all__ = ["Shaped", "is_held_once", "shaped_case"]


@dataclass
class Shaped(Made):
    """Grows dims of given sizes: products of divisors, parts that sum up, pads, cuts of all kinds on any of them."""

    def of_size(self, size: int, axes: list[str], depth: int = 2) -> Node:
        """Return a dim of this size that may be cut by these axes."""
        kind = self.integer(0, 9) if depth and size > 1 else 0
        if kind < 4:
            node: Node = Size(self.name(size)) if self.integer(0, 1) else Size(size)
        elif kind < 6:
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            major = divisors[self.integer(0, len(divisors) - 1)]
            first = self.of_size(major, axes, depth - 1)
            second = self.of_size(size // major, [axis for axis in axes if axis not in axes_in(first)], depth - 1)
            factors = [
                factor for one in (first, second) for factor in (one.factors if isinstance(one, Product) else (one,))
            ]
            node = Product(tuple(factors))
        elif kind < 8:
            at = self.integer(1, size - 1)
            parts = (self.of_size(at, axes, depth - 1), self.of_size(size - at, axes, depth - 1))
            names = ("a", "b") if self.integer(0, 1) else ("", "")  # without names a sum
            node = Parts((Part(names[0], parts[0]), Part(names[1], parts[1])))
        else:
            node = Pad(self.of_size(size, axes, depth - 1), self.count(self.integer(1, 5)))
        left = [axis for axis in axes if axis not in axes_in(node)]
        while left and self.integer(0, 2) < 2:
            node = self.split(node, left.pop(self.integer(0, len(left) - 1)))
        return node

    def layout(self, shape: tuple[int, ...]) -> LayoutTree:
        """Return a layout of this shape; ranks along an axis that cuts nothing may not have the tensor."""
        left, dims = list(self.lengths), []
        for length in shape:
            dims.append(self.of_size(length, left))
            left = [axis for axis in left if axis not in axes_in(dims[-1])]
        where = []
        for axis in left:
            if self.integer(0, 2) == 0:
                first = self.integer(0, self.lengths[axis] - 1)
                last = self.integer(first, self.lengths[axis] - 1)
                is_last = first == last == self.lengths[axis] - 1
                where.append(Where(axis, None, None) if is_last else Where(axis, first, last))
        return LayoutTree(tuple(dims), where=tuple(where))


def shaped_case(
    integer: Integer, shape: tuple[int, ...], axis: str, mesh: DeviceMesh | None = None
) -> tuple[DeviceMesh, TensorLayout]:
    """Return a mesh of one to three axes, its ranks in any order, and a layout with numbers for all of its sizes."""
    if mesh is None:
        grid = GRIDS[integer(0, len(GRIDS) - 1)]
        left, ranks = list(range(math.prod(grid))), []
        while left:
            ranks.append(left.pop(integer(0, len(left) - 1)))
        mesh = DeviceMesh(grid, [f"{axis}{i}" for i in range(len(grid))], ranks)
    made = Shaped(integer, dict(zip(mesh.axis_names, mesh.shape, strict=True)))
    tree = made.layout(shape)
    return mesh, TensorLayout.from_tree(tree, mesh).with_sizes(made.names)


def is_held_once(mesh: DeviceMesh, layout: TensorLayout, shape: tuple[int, ...]) -> bool:
    """Say whether ranks hold the same pieces or pieces apart: parts cut by other axes each may overlap partly."""
    parts = [local_part(layout, mesh, mesh.coordinate(rank), shape) for rank in mesh.ranks]
    pieces = {
        (nest.y, tuple((n, ys) for n, _, ys in nest.loops)): num_pairs(nest) for p in parts if p for nest in p.nests
    }
    return sum(pieces.values()) == math.prod(shape)
