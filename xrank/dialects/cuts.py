"""Chains of cuts, the layouts that other systems can express: one size per dim, cut by one axis after another.

The notation is richer than its dialects. Any part of a layout that is not such a chain is refused: the check compares
texts, so it also refuses nodes, kinds of split and clauses that are added to the notation later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Node, Parts, Product, Size, Split, SplitKind, render, render_dim
from xrank.layout.tensor_layout import TensorLayout


@dataclass(frozen=True, slots=True)
class Cuts:
    """One dim: its size, and the axes that cut it, the first cut first: evenly ("/") or into ceil chunks ("/~")."""

    size: int | str
    """The size of one piece."""
    splits: tuple[tuple[str, SplitKind], ...]
    pieces: int = 1
    """Number of equal pieces of the dim, end to end, each cut by itself, such as packed gate and up."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the dim, in the order of the cuts."""
        return tuple(axis for axis, _ in self.splits)


def chain_cuts(size: int | str, axes: Sequence[str], kind: SplitKind) -> Node:
    """Return a dim that these axes cut one after another, with the same kind of split."""
    node: Node = Size(size)
    for axis in axes:
        node = Split(node, axis, kind)
    return node


def cuts_of(
    layout: TensorLayout, dialect: str, *, packed: bool = False, where: bool = False, sums: bool = False
) -> tuple[Cuts, ...]:
    """Return a layout as one chain of cuts per dim.

    Args:
        layout: any layout.
        dialect: the name of the dialect in the plural, for errors.
        packed: whether a dim may have several equal pieces: ``2 f/tp``, ``<gate: f/tp | up: f/tp>``.
        where: whether the layout may have a "where" clause, which the caller converts.
        sums: whether it may have "sum" clauses, which the caller converts.

    Raises:
        LayoutError: the layout holds something else; the error names it.
    """
    tree = layout.tree
    beyond = _clauses(LayoutTree((), tree.view, () if where else tree.where, () if sums else tree.sums))
    if beyond:
        raise LayoutError(
            f"{dialect} cannot express {beyond!r} of the layout {layout}",
            got=beyond,
            want="a layout without it",
        )
    passed = _clauses(LayoutTree((), None, tree.where, tree.sums))
    text = "[" + ", ".join(render_dim(dim) for dim in layout.dims) + "]" + (passed and f" {passed}")
    if str(layout) != text:
        raise LayoutError(
            f"{dialect} cannot express the layout {layout}: it is more than its dims",
            got=str(layout),
            want=f"dims alone, such as {text}",
        )
    every: list[Cuts] = []
    for i, dim in enumerate(layout.dims):
        pieces, piece = _pieces_of(dim) if packed else (1, dim)
        every.append(replace(_cuts_of_dim(piece, i, layout, dialect), pieces=pieces))
    return tuple(every)


def _clauses(tree: LayoutTree) -> str:
    return render(tree).removeprefix("[]").strip()


def _pieces_of(dim: Node) -> tuple[int, Node]:
    """Return the number of equal pieces of a dim, and one of them; (1, the dim) for a dim without pieces."""
    match dim:
        case Product((Size(int(pieces)), piece)) if pieces > 0:
            return pieces, piece
        # Parts with equal texts have equal sizes: a name has one value in the whole layout.
        case Parts(parts) if len({part.of for part in parts}) == 1:
            return len(parts), parts[0].of
    return 1, dim


def _cuts_of_dim(dim: Node, number: int, layout: TensorLayout, dialect: str) -> Cuts:
    node: Node = dim
    splits: list[tuple[str, SplitKind]] = []
    while isinstance(node, Split) and isinstance(node.of, Split | Size):
        before = render_dim(node.of)
        # Compare the text, too: a later notation may give splits more fields, which must not be lost.
        if node.kind not in ("/", "/~") or render_dim(node) != f"{before}{node.kind}{node.axis}":
            raise LayoutError(
                f"{dialect} cannot express dim {number} of the layout {layout}: {dialect} have no such split",
                got=render_dim(node).removeprefix(before),
                want='"/", an even split, or "/~", ceil chunks',
            )
        splits.append((node.axis, node.kind))
        node = node.of
    if not isinstance(node, Size):
        raise LayoutError(
            f"{dialect} cannot express dim {number} of the layout {layout}: {render_dim(node)} is not one size "
            "that axes cut",
            got=f"{type(node).__name__} {render_dim(node)}",
            want="one size, cut by axes",
        )
    return Cuts(node.value, tuple(reversed(splits)))


def resolve_mesh(layout: TensorLayout, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of a layout: its own or the given one, which must be equal if both exist."""
    if mesh is None and layout.device_mesh is None:
        raise LayoutError(f"the layout {layout} has no mesh", want="a layout with a mesh, or a mesh besides")
    if mesh is not None:
        layout.with_mesh(mesh)  # raises for another mesh, and for axes that the mesh lacks
        return mesh
    assert layout.device_mesh is not None
    return layout.device_mesh


def is_even_split(cuts: Cuts, size: int, mesh: DeviceMesh) -> bool:
    """Return whether the cuts give all ranks equal parts of a dim of that size."""
    return size % (cuts.pieces * prod(mesh.axis_length(axis) for axis in cuts.axes)) == 0


def even_axes_of(
    layout: TensorLayout, dialect: str, mesh: DeviceMesh | None, shape: Sequence[int] | None
) -> tuple[tuple[str, ...], ...]:
    """Return per dim the axes that cut it evenly, for dialects without uneven parts.

    Ceil chunks are even only for some sizes, so a dim cut so needs the tensor's shape and a mesh.

    Raises:
        LayoutError: a dim is or may be uneven; or as `cuts_of`.
    """
    every = cuts_of(layout, dialect)
    if shape is not None and len(shape) != len(every):
        raise LayoutError(f"the layout {layout} does not fit the shape {tuple(shape)}", want=f"{len(every)} dims")
    for i, cuts in enumerate(every):
        if shape is not None and cuts.splits:
            lengths = resolve_mesh(layout, mesh)
            if not is_even_split(cuts, shape[i], lengths):
                raise LayoutError(
                    f"{dialect} cannot express dim {i} of the layout {layout}: {dialect} cut evenly only",
                    got=f"{shape[i]} positions over {prod(lengths.axis_length(axis) for axis in cuts.axes)} parts",
                    want="a size that divides",
                )
        elif any(kind == "/~" for _, kind in cuts.splits):
            raise LayoutError(
                f"{dialect} cannot express dim {i} of the layout {layout}: {dialect} cut evenly only",
                got=render_dim(layout.dims[i]),
                want='even splits, "/"',
                next_step="also give the tensor's shape: where it divides, ceil chunks are even",
            )
    return tuple(cuts.axes for cuts in every)
