"""Chains of cuts: the layouts that other systems can say, one size a dim and axes that cut it one after another.

The notation says more than any of its dialects. Everything of a layout that is no such chain is refused here by its
own text, whatever the notation learns to say: a node, a kind of split, a clause that this module does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree, Node, Parts, Product, Size, Split, SplitKind, render, render_dim
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["Cuts", "chained", "checked_mesh", "cuts_of", "even_axes_of", "split_evenly"]


@dataclass(frozen=True, slots=True)
class Cuts:
    """One dim: its size, and the axes that cut it evenly ("/") or by ceil chunks ("/~"), the first cut first."""

    size: int | str
    """Of one piece, if there are several."""
    splits: tuple[tuple[str, SplitKind], ...]
    pieces: int = 1
    """Equal pieces that the dim is made of end to end, each cut by itself, as packed gate and up are."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the dim, in the order of cutting."""
        return tuple(axis for axis, _ in self.splits)


def chained(size: int | str, axes: Sequence[str], kind: SplitKind) -> Node:
    """Return the dim that is cut by these axes, one after another, all in one way."""
    node: Node = Size(size)
    for axis in axes:
        node = Split(node, axis, kind)
    return node


def cuts_of(
    layout: TensorLayout, dialect: str, *, packed: bool = False, where: bool = False, sums: bool = False
) -> tuple[Cuts, ...]:
    """Return a layout as one chain of cuts a dim.

    Args:
        layout: any layout.
        dialect: who cannot say the rest, in the plural, for the message.
        packed: whether a dim may be several equal pieces: ``2 f/tp``, ``<gate: f/tp | up: f/tp>``.
        where: whether the layout may have a "where", which the caller says in its own way.
        sums: whether it may have "sum" clauses, which the caller says.

    Raises:
        LayoutError: the layout holds something else; the message names it.
    """
    tree = layout.tree
    beyond = _clauses(LayoutTree((), tree.view, () if where else tree.where, () if sums else tree.sums))
    if beyond:
        raise LayoutError(
            f"{dialect} cannot say {beyond!r} of the layout {layout}",
            got=beyond,
            want="a layout without it",
        )
    passed = _clauses(LayoutTree((), None, tree.where, tree.sums))
    said = "[" + ", ".join(render_dim(dim) for dim in layout.dims) + "]" + (passed and f" {passed}")
    if str(layout) != said:
        raise LayoutError(
            f"{dialect} cannot say the layout {layout}: it is more than its dims",
            got=str(layout),
            want=f"dims alone, such as {said}",
        )
    every: list[Cuts] = []
    for i, dim in enumerate(layout.dims):
        message = f"{dialect} cannot say dim {i} of the layout {layout}"
        pieces, piece = _pieces_of(dim) if packed else (1, dim)
        every.append(replace(_cuts_of_dim(piece, message, dialect), pieces=pieces))
    return tuple(every)


def _clauses(tree: LayoutTree) -> str:
    return render(tree).removeprefix("[]").strip()


def _pieces_of(dim: Node) -> tuple[int, Node]:
    """Return how many equal pieces a dim is, and one of them; (1, the dim) for any other dim."""
    match dim:
        case Product((Size(int(pieces)), piece)) if pieces > 0:
            return pieces, piece
        # Parts of one text have one size: a name is bound once for the whole layout.
        case Parts(parts) if len({part.of for part in parts}) == 1:
            return len(parts), parts[0].of
    return 1, dim


def _cuts_of_dim(dim: Node, message: str, dialect: str) -> Cuts:
    node: Node = dim
    splits: list[tuple[str, SplitKind]] = []
    while isinstance(node, Split) and isinstance(node.of, Split | Size):
        before = render_dim(node.of)
        # By the text as well: what a split of a later notation may say besides must not be lost.
        if node.kind not in ("/", "/~") or render_dim(node) != f"{before}{node.kind}{node.axis}":
            raise LayoutError(
                f"{message}: {dialect} have no such split",
                got=render_dim(node).removeprefix(before),
                want='"/", an even split, or "/~", ceil chunks',
            )
        splits.append((node.axis, node.kind))
        node = node.of
    if not isinstance(node, Size):
        raise LayoutError(
            f"{message}: {render_dim(node)} is not one size that axes cut",
            got=f"{type(node).__name__} {render_dim(node)}",
            want="one size, cut by axes",
        )
    return Cuts(node.value, tuple(reversed(splits)))


def checked_mesh(layout: TensorLayout, mesh: DeviceMesh | None) -> DeviceMesh:
    """Return the mesh of a layout: its own, or the one given; both only if they are equal."""
    if mesh is None and layout.device_mesh is None:
        raise LayoutError(f"the layout {layout} has no mesh", want="a layout with a mesh, or a mesh besides")
    if mesh is not None:
        layout.with_mesh(mesh)  # refuses another mesh, and axes that the mesh has not
        return mesh
    assert layout.device_mesh is not None
    return layout.device_mesh


def split_evenly(cuts: Cuts, size: int, mesh: DeviceMesh) -> bool:
    """Say whether each cut of a dim of that size leaves equal parts to all ranks."""
    return size % (cuts.pieces * prod(mesh.axis_length(axis) for axis in cuts.axes)) == 0


def even_axes_of(
    layout: TensorLayout, dialect: str, mesh: DeviceMesh | None, shape: Sequence[int] | None
) -> tuple[tuple[str, ...], ...]:
    """Return per dim the axes that cut it evenly, for dialects that cannot say uneven parts.

    A dim cut by ceil chunks is even only at some sizes, so it needs the tensor's shape, and a mesh.

    Raises:
        LayoutError: a dim is uneven or may be, or as `cuts_of`.
    """
    every = cuts_of(layout, dialect)
    if shape is not None and len(shape) != len(every):
        raise LayoutError(f"the layout {layout} does not fit the shape {tuple(shape)}", want=f"{len(every)} dims")
    for i, cuts in enumerate(every):
        if shape is not None and cuts.splits:
            lengths = checked_mesh(layout, mesh)
            if not split_evenly(cuts, shape[i], lengths):
                raise LayoutError(
                    f"{dialect} cannot say dim {i} of the layout {layout}: {dialect} cut evenly only",
                    got=f"{shape[i]} positions over {prod(lengths.axis_length(axis) for axis in cuts.axes)} parts",
                    want="a size that divides",
                )
        elif any(kind == "/~" for _, kind in cuts.splits):
            raise LayoutError(
                f"{dialect} cannot say dim {i} of the layout {layout}: {dialect} cut evenly only",
                got=render_dim(layout.dims[i]),
                want='even splits, "/"',
                next_step="give the tensor's shape besides: where it divides, ceil chunks are even",
            )
    return tuple(cuts.axes for cuts in every)
