"""Tensor layouts: the cuts of a tensor's dims over the axes of a mesh. The class is Keras', the notation is xrank's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from xrank.errors import LayoutError
from xrank.layout.mesh import NAME_RULE, DeviceMesh, is_name
from xrank.layout.notation import (
    Flat,
    LayoutTree,
    Node,
    Pad,
    Parts,
    Size,
    Split,
    axes_of,
    children,
    parse,
    render,
    size_names_of,
    walk,
    with_sizes,
)


def check_sound(tree: LayoutTree, lengths: Mapping[str, int] | None, also_cut: Iterable[Node] = ()) -> None:
    """Refuse a layout with two possible meanings, or one that does not fit its mesh, with LayoutError.

    `lengths` has the axes that it may use; None without a mesh. `also_cut` has further dims, in the tensor's name.
    """
    text = render(tree)
    dims = (*also_cut, *tree.dims)
    cutting = [axis for dim in dims for axis in axes_of(dim)]
    others = [*(where.axis for where in tree.where), *tree.sums]
    if lengths is not None:
        unknown = [axis for axis in (*cutting, *others) if axis not in lengths]
        if unknown:
            what = f"Invalid axis names for Layout. Valid axis names: {list(lengths)}, "
            what += f"Got {[*cutting, *others]} in {text}"
            raise LayoutError(what, got=str(unknown), want=f"one of the mesh's axes {list(lengths)}")
    twice = _find_repeated(cutting) or next(filter(None, map(_cut_twice, dims)), None)
    if twice is not None:
        raise LayoutError(f"the layout {text} is cut twice by {twice!r}", got=text, want="each axis once")
    twice = _find_repeated([*others, *cutting])
    if twice is not None:
        what = f"the axis {twice!r} has two roles in the layout {text}"
        raise LayoutError(what, got=text, want='each axis in a cut, "where" or "sum"')
    sizes = {name for dim in dims for name in size_names_of(dim)}
    both = sorted(sizes & {*cutting, *others, *(lengths or ())})
    if both:
        what = f"{both[0]!r} is both a size and an axis in the layout {text}"
        raise LayoutError(what, got=text, want="another name for the size")
    for where in tree.where:
        length = None if lengths is None else lengths[where.axis]
        if length is not None and where.last is not None and where.last >= length:
            what = f"the layout {text} names an index that the axis {where.axis!r} does not have"
            raise LayoutError(what, got=f"{where.axis}={where.last}", want=f"0 to {length - 1}")


def _cut_twice(node: Node) -> str | None:
    """Return an axis that cuts a dim twice; different parts, or members of a flat, may share an axis."""
    if isinstance(node, Split) and node.axis in axes_of(node.of):
        return node.axis
    match node:
        case Parts():
            apart: Iterable[tuple[Node, ...]] = ()
        case Flat(members):
            apart = (member.dims for member in members)
        case _:
            apart = (children(node),)
    repeated = (_find_repeated([axis for dim in dims for axis in axes_of(dim)]) for dims in apart)
    return next(filter(None, (*repeated, *map(_cut_twice, children(node)))), None)


def _find_repeated(names: list[str]) -> str | None:
    return next((name for i, name in enumerate(names) if name in names[:i]), None)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TensorLayout:
    """How the dims of a tensor are split over the axes of a mesh.

    Args:
        axes: per dim an axis that splits the dim evenly, or None, as in Keras; the letters of a string are axes. The
            sizes are named d0, d1, ...
        device_mesh: the mesh of these axes; `with_mesh` can attach it later.

    Raises:
        LayoutError: an axis splits twice, is not in the mesh, or has the name of a size.

    Example:
        >>> str(TensorLayout((None, "tp")))
        '[d0, d1/tp]'
        >>> TensorLayout.parse("[f/tp/~dp, h]").axes
        (('tp', 'dp'), ())
    """

    tree: LayoutTree
    """The layout in the notation."""
    device_mesh: DeviceMesh | None
    view_mesh: DeviceMesh | None
    """The view of the mesh that the layout names, if both are known; its axes are available in addition."""
    dims: tuple[Node, ...] = field(compare=False)
    """One node per dim."""
    cut_axes: tuple[tuple[str, ...], ...] = field(compare=False)
    """Per dim the axes that split it, in the order of the splits; empty for a whole dim."""

    def __init__(self, axes: Sequence[str | None], device_mesh: DeviceMesh | None = None) -> None:
        entries = tuple(axes)
        for entry in entries:
            if entry is not None and not is_name(entry):
                what = f"Invalid axis names for Layout. Got {entries!r}"
                want = f"per dim None or one axis: {NAME_RULE}"
                next_step = "use TensorLayout.parse for a layout's text, such as a dim cut by several axes"
                raise LayoutError(what, got=repr(entry), want=want, next_step=next_step)
        taken = [entry for entry in entries if entry is not None]
        names = free_size_names(len(entries), (*taken, *(device_mesh.axis_names if device_mesh else ())))
        dims = tuple(
            Size(name) if entry is None else Split(Size(name), entry, "/")
            for name, entry in zip(names, entries, strict=True)
        )
        self._fill(LayoutTree(dims), device_mesh, None)

    @classmethod
    def from_dims(cls, dims: Iterable[Node], device_mesh: DeviceMesh | None = None) -> TensorLayout:
        """Return the layout of these dims; LayoutError if it contradicts itself, or no text has these dims."""
        return cls.from_tree(LayoutTree(tuple(dims)), device_mesh)

    @classmethod
    def from_tree(
        cls, tree: LayoutTree, device_mesh: DeviceMesh | None = None, view_mesh: DeviceMesh | None = None
    ) -> TensorLayout:
        """Return the layout of a whole tree; as `from_dims`."""
        text = None
        try:
            text = render(tree)
            # A layout travels between ranks and in files as text, so its tree must be the one that the text gives.
            if parse(text) == tree:
                return cls._make(tree, device_mesh, view_mesh)
        except RecursionError:
            pass
        raise LayoutError(f"these dims cannot be written as a layout's text: {str(text)[:200]!r}", got=repr(text)[:200])

    @classmethod
    def parse(
        cls, text: str, device_mesh: DeviceMesh | None = None, views: Mapping[str, DeviceMesh] | None = None
    ) -> TensorLayout:
        """Parse a layout's text, such as ``"[f/tp/~dp, h]"``; attach the mesh and its views, if given."""
        layout = _parse(text) if isinstance(text, str) else cls._make(parse(text), None, None)
        return layout if device_mesh is None else layout.with_mesh(device_mesh, views)

    @classmethod
    def _make(cls, tree: LayoutTree, device_mesh: DeviceMesh | None, view_mesh: DeviceMesh | None) -> TensorLayout:
        layout = object.__new__(cls)
        layout._fill(tree, device_mesh, view_mesh)
        return layout

    def with_mesh(self, device_mesh: DeviceMesh, views: Mapping[str, DeviceMesh] | None = None) -> TensorLayout:
        """Attach a mesh; as in Keras, a layout with a different mesh is refused.

        Args:
            device_mesh: the mesh.
            views: its views by name, including the one that the layout names.
        """
        if self.device_mesh == device_mesh:
            return self
        if self.device_mesh is not None:
            what = f"Existing value is {self.device_mesh.grid!r}, the new one {device_mesh.grid!r}"
            raise LayoutError(f"Cannot override device mesh value. {what}")
        view_mesh = None
        if self.tree.view is not None:
            view_mesh = (views or {}).get(self.tree.view)
            if view_mesh is None:
                what = f"the mesh has no view {self.tree.view!r}, which the layout {self} names"
                got = f"views {sorted(views or {})}"
                next_step = "name a view of the mesh, or leave the clause out to use the mesh itself"
                raise LayoutError(what, got=got, want=repr(self.tree.view), next_step=next_step)
            if set(view_mesh.ranks) != set(device_mesh.ranks):
                what = f"the view {self.tree.view!r} does not have the ranks of the mesh {device_mesh.grid!r}"
                got = f"{view_mesh.size} ranks, {view_mesh.grid}"
                raise LayoutError(what, got=got, want=f"the same {device_mesh.size} ranks")
        return self._make(self.tree, device_mesh, view_mesh)

    @property
    def axes(self) -> tuple[Any, ...]:
        """Per dim the axes that split it, in the order of the splits; empty for a whole dim."""
        return self.cut_axes

    @property
    def has_pads(self) -> bool:
        """Whether a rank's part may contain padding."""
        return any(isinstance(node, Pad | Flat) for dim in self.dims for node in walk(dim))

    def with_sizes(self, sizes: Mapping[str, int]) -> TensorLayout:
        """Return this layout with these names replaced by numbers, so its text needs no further sizes."""
        return self._make(with_sizes(self.tree, sizes), self.device_mesh, self.view_mesh)

    def __str__(self) -> str:
        return render(self.tree)

    def __repr__(self) -> str:
        mesh = "" if self.device_mesh is None else f", mesh {self.device_mesh.grid!r}"
        return f"<TensorLayout {self}{mesh}>"

    def _fill(self, tree: LayoutTree, device_mesh: DeviceMesh | None, view_mesh: DeviceMesh | None) -> None:
        check_sound(tree, None if device_mesh is None else axis_lengths(device_mesh, view_mesh))
        values = (tree, device_mesh, view_mesh, tree.dims, tuple(axes_of(dim) for dim in tree.dims))
        for name, value in zip(TensorLayout.__slots__, values, strict=True):
            object.__setattr__(self, name, value)


# A model has only a few different layouts.
_parse = lru_cache(maxsize=4096)(lambda text: TensorLayout._make(parse(text), None, None))


def flat_of(layout: TensorLayout) -> Flat | None:
    """Return the flat node of a layout; None for the layout of one tensor."""
    node = layout.dims[0] if len(layout.dims) == 1 else None
    while isinstance(node, Split):
        node = node.of
    return node if isinstance(node, Flat) else None


def axis_lengths(mesh: DeviceMesh, view: DeviceMesh | None = None) -> dict[str, int]:
    """Return the axes that a layout may use, with their lengths: those of the mesh, and those of its view."""
    lengths = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    # For a name in both, the view's axis counts, because the layout names the view.
    return lengths if view is None else {**lengths, **dict(zip(view.axis_names, view.shape, strict=True))}


def free_size_names(count: int, taken: Iterable[str]) -> tuple[str, ...]:
    """Return the names d0, d1, ... for sizes; with more leading d's if an axis has such a name."""
    axes = frozenset(taken)
    prefix = "d"
    while any(f"{prefix}{i}" in axes for i in range(count)):
        prefix += "d"
    return tuple(f"{prefix}{i}" for i in range(count))
