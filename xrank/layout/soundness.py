"""Refuse contradictory layouts: an axis in two roles, a name with two meanings, an axis that the mesh lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from xrank.errors import LayoutError
from xrank.layout.notation import (
    Flat,
    LayoutTree,
    Node,
    Parts,
    Split,
    axes_of,
    children,
    render,
    size_names_of,
)


def check_sound(tree: LayoutTree, lengths: Mapping[str, int] | None, also_cut: Iterable[Node] = ()) -> None:
    """Refuse a layout with two possible meanings, or one that does not fit its mesh.

    Args:
        tree: the layout.
        lengths: the axes that it may use, with their lengths; None without a mesh.
        also_cut: further dims, in the tensor's name.

    Raises:
        LayoutError: an axis is used twice, is not in the mesh, or has the name of a size.
    """
    text = render(tree)
    dims = (*also_cut, *tree.dims)
    cutting = [axis for dim in dims for axis in axes_of(dim)]
    others = [*(where.axis for where in tree.where), *tree.sums]
    if lengths is not None:
        unknown = [axis for axis in (*cutting, *others) if axis not in lengths]
        if unknown:
            raise LayoutError(
                "Invalid axis names for Layout. "
                f"Valid axis names: {list(lengths)}, Got {[*cutting, *others]} in {text}",
                got=str(unknown),
                want=f"one of the mesh's axes {list(lengths)}",
            )
    twice = _find_repeated(cutting) or next(filter(None, map(_cut_twice, dims)), None)
    if twice is not None:
        raise LayoutError(f"the layout {text} is cut twice by {twice!r}", got=text, want="each axis once")
    twice = _find_repeated([*others, *cutting])
    if twice is not None:
        raise LayoutError(
            f"the axis {twice!r} has two roles in the layout {text}",
            got=text,
            want='each axis in a cut, "where" or "sum"',
        )
    sizes = {name for dim in dims for name in size_names_of(dim)}
    both = sorted(sizes & {*cutting, *others, *(lengths or ())})
    if both:
        raise LayoutError(
            f"{both[0]!r} is both a size and an axis in the layout {text}", got=text, want="another name for the size"
        )
    for where in tree.where:
        length = None if lengths is None else lengths[where.axis]
        if length is not None and where.last is not None and where.last >= length:
            raise LayoutError(
                f"the layout {text} names a place that the axis {where.axis!r} does not have",
                got=f"{where.axis}={where.last}",
                want=f"0 to {length - 1}",
            )


def _cut_twice(node: Node) -> str | None:
    """Return an axis that cuts a dim twice; different parts, or members of a flat, may share an axis."""
    if isinstance(node, Split) and node.axis in axes_of(node.of):
        return node.axis
    below = children(node)
    if not isinstance(node, Parts | Flat):
        twice = _find_repeated([axis for child in below for axis in axes_of(child)])
        if twice is not None:
            return twice
    if isinstance(node, Flat):
        for member in node.members:
            twice = _find_repeated([axis for dim in member.dims for axis in axes_of(dim)])
            if twice is not None:
                return twice
    return next(filter(None, map(_cut_twice, below)), None)


def _find_repeated(names: list[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
