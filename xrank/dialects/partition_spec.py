"""JAX PartitionSpecs: per dim None, an axis, or a tuple of axes with the major one first; parts are always even.

Nothing of jax is imported: a PartitionSpec is read as the sequence that it is (jax/_src/partition_spec.py:
PartitionSpec), so plain tuples do as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from xrank.dialects.cuts import chained, even_axes_of
from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, free_size_names

__all__ = ["SpecEntry", "from_partition_spec", "to_partition_spec"]

SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""What a PartitionSpec says of one dim."""


def from_partition_spec(spec: Sequence[Any], mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout that a PartitionSpec says on a mesh.

    A tuple of axes cuts by its first one first, each piece again by the next (jax/_src/named_sharding.py: the first
    axis of a tuple is the major one), which is the notation's order too. Axes that it calls ``unreduced`` hold addends:
    a "sum" clause.

    Args:
        spec: a ``PartitionSpec``, or a tuple of the same entries.
        mesh: the mesh of the sharding; axes that the spec does not name hold replicas.
        ndim: the tensor's number of dims; dims past the spec's end are whole. The spec's length when None.

    Raises:
        LayoutError: the spec has more entries than the tensor dims, an entry leaves the dim to the compiler
            (``UNCONSTRAINED``) or is none at all, axes are ``reduced`` (which says how gradients lie), an axis is
            unknown or there twice.
    """
    if isinstance(spec, str):
        raise LayoutError(f"the PartitionSpec {spec!r} is one text", want="a tuple, such as (None, 'model')")
    reduced = getattr(spec, "reduced", None)
    if reduced:
        raise LayoutError(
            f"a PartitionSpec says that gradients are unreduced along {sorted(reduced)}, which a layout cannot",
            got=repr(spec),
            want="axes that cut dims or hold addends, and no others",
        )
    unreduced = getattr(spec, "unreduced", None) or ()
    entries = tuple(spec)
    count = len(entries) if ndim is None else ndim
    if len(entries) > count:
        raise LayoutError(
            f"the PartitionSpec {entries!r} has more entries than the tensor has dims",
            got=f"{len(entries)} entries",
            want=f"at most {count}",
        )
    cuts = [_axes_of(entry, entries) for entry in entries] + [()] * (count - len(entries))
    names = free_size_names(count, mesh.axis_names)
    dims = tuple(chained(name, axes, "/") for name, axes in zip(names, cuts, strict=True))
    # A set of axes, so in the mesh's order; one that the mesh has not is named last, and refused.
    sums = sorted(unreduced, key=(*mesh.axis_names, *sorted(unreduced)).index)
    return TensorLayout.from_tree(LayoutTree(dims, sums=tuple(sums)), mesh)


def to_partition_spec(
    layout: TensorLayout, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> tuple[SpecEntry, ...]:
    """Return a layout as the entries of a PartitionSpec, one a dim: ``PartitionSpec(*entries)``.

    Args:
        layout: a layout whose dims are cut by axes and nothing else. Entries alone say no sums, so a layout with sums
            is refused; those of its dims alone and ``unreduced`` make its PartitionSpec.
        mesh: the mesh, where the layout has none of its own; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that no PartitionSpec says; the message names it.
    """
    if layout.tree.sums:
        raise LayoutError(
            f"the entries of a PartitionSpec cannot say the sums of the layout {layout}",
            got=" ".join(f"sum({axis})" for axis in layout.tree.sums),
            want="a layout without sums",
            next_step="PartitionSpec(*entries, unreduced={...}) says them: ask for the entries of "
            "TensorLayout.from_dims(layout.dims), and add layout.tree.sums",
        )
    axes = even_axes_of(layout, "PartitionSpecs", mesh, shape)
    return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes)


def _axes_of(entry: Any, entries: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the axes of one entry, major first."""
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    raise LayoutError(
        f"an entry of the PartitionSpec {entries!r} is none that a layout can say",
        got=repr(entry),
        want="None, an axis, or a tuple of axes",
        next_step="take the spec of the array's own sharding, where the compiler has chosen"
        if "UNCONSTRAINED" in repr(entry).upper()
        else None,
    )
