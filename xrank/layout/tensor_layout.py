"""Tensor layouts: how one tensor's dims are cut over the axes of a mesh. The class is Keras', the text is ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from xrank.errors import LayoutError
from xrank.layout.mesh import NAME_RULE, DeviceMesh, is_name
from xrank.layout.notation import Node, Size, Split, axes_of, parse, render, size_names_of

__all__ = ["TensorLayout", "free_size_names"]


@dataclass(frozen=True, slots=True, init=False, repr=False)
class TensorLayout:
    """The cuts of every dim of one tensor, and the mesh when it is known.

    Args:
        axes: per dim an axis, which cuts the dim evenly, or None, as Keras has it. The sizes are named d0, d1, ...
        device_mesh: the mesh whose axes these are; may be attached later by `with_mesh`.

    Raises:
        LayoutError: an axis cuts twice, is no axis of the mesh, or has the name of a size.
    """

    dims: tuple[Node, ...]
    device_mesh: DeviceMesh | None

    def __init__(self, axes: Sequence[str | None], device_mesh: DeviceMesh | None = None) -> None:
        if isinstance(axes, str):
            # Keras would take it letter by letter; a layout's text given here by mistake must not pass.
            raise LayoutError(
                f"the axes {axes[:80]!r} are one text",
                got=repr(axes[:80]),
                want="one entry a dim, such as (None, 'model')",
                next_step="use TensorLayout.parse for a layout's text",
            )
        entries = tuple(axes)
        for entry in entries:
            if entry is not None and not is_name(entry):
                raise LayoutError(
                    f"Invalid axis names for Layout. Got {entries!r}",
                    got=repr(entry),
                    want=f"per dim None or one axis: {NAME_RULE}",
                    next_step="use TensorLayout.parse for a dim cut by several axes",
                )
        taken = [entry for entry in entries if entry is not None]
        names = free_size_names(len(entries), (*taken, *(device_mesh.axis_names if device_mesh else ())))
        dims = tuple(
            Size(name) if entry is None else Split(Size(name), entry, "/")
            for name, entry in zip(names, entries, strict=True)
        )
        self._fill(dims, device_mesh)

    @classmethod
    def from_dims(cls, dims: Iterable[Node], device_mesh: DeviceMesh | None = None) -> TensorLayout:
        """Return the layout of these dims, checked as any other.

        Raises:
            LayoutError: also if no text says these dims, which trees made by hand can be.
        """
        trees = tuple(dims)
        text = render(trees)
        if parse(text) != trees:
            raise LayoutError(f"no layout's text says these dims: {text[:200]!r}", got=repr(trees)[:200])
        return cls._of(trees, device_mesh)

    @classmethod
    def _of(cls, dims: tuple[Node, ...], device_mesh: DeviceMesh | None) -> TensorLayout:
        layout = object.__new__(cls)
        layout._fill(dims, device_mesh)
        return layout

    @classmethod
    def parse(cls, text: str, device_mesh: DeviceMesh | None = None) -> TensorLayout:
        """Read a layout's text, such as ``"[f/tp/~dp, h]"``."""
        return cls._of(parse(text), device_mesh)

    def with_mesh(self, device_mesh: DeviceMesh) -> TensorLayout:
        """Return this layout on a mesh; one that has another mesh already is refused, as Keras does."""
        if self.device_mesh == device_mesh:
            return self
        if self.device_mesh is not None:
            raise LayoutError(
                "Cannot override device mesh value. Existing value is "
                f"{self.device_mesh.grid!r}, the new one {device_mesh.grid!r}"
            )
        return self._of(self.dims, device_mesh)

    @property
    def axes(self) -> tuple[tuple[str, ...], ...]:
        """Per dim the axes that cut it, in the order of cutting; none for a dim that every rank holds whole."""
        return tuple(axes_of(dim) for dim in self.dims)

    def __str__(self) -> str:
        return render(self.dims)

    def __repr__(self) -> str:
        mesh = "" if self.device_mesh is None else f", mesh {self.device_mesh.grid!r}"
        return f"<TensorLayout {self}{mesh}>"

    def _fill(self, dims: tuple[Node, ...], device_mesh: DeviceMesh | None) -> None:
        _check(dims, device_mesh)
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "device_mesh", device_mesh)


def free_size_names(count: int, taken: Iterable[str]) -> tuple[str, ...]:
    """Return the names d0, d1, ... for sizes; with more d's in front where an axis is called so."""
    axes = frozenset(taken)
    prefix = "d"
    while any(f"{prefix}{i}" in axes for i in range(count)):
        prefix += "d"
    return tuple(f"{prefix}{i}" for i in range(count))


def _check(dims: tuple[Node, ...], device_mesh: DeviceMesh | None) -> None:
    """Refuse a layout that could be read in two ways, or that the mesh cannot have."""
    text = render(dims)
    used = [axis for dim in dims for axis in axes_of(dim)]
    if device_mesh is not None:
        unknown = [axis for axis in used if axis not in device_mesh.axis_names]
        if unknown:
            raise LayoutError(
                "Invalid axis names for Layout. "
                f"Valid axis names: {list(device_mesh.axis_names)}, Got {used} in {text}",
                got=str(unknown),
                want=f"axes of the mesh {device_mesh.grid!r}",
            )
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise LayoutError(f"the layout {text} is cut twice by {twice[0]!r}", got=text, want="each axis once")
    sizes = {name for dim in dims for name in size_names_of(dim)}
    both = sorted(sizes & {*used, *(device_mesh.axis_names if device_mesh else ())})
    if both:
        raise LayoutError(
            f"{both[0]!r} is both a size and an axis in the layout {text}",
            got=text,
            want="another name for the size",
        )
