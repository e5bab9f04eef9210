"""JAX PartitionSpecs: per dim None, an axis, or a tuple of axes, the major one first; parts are always even.

jax is not imported: a PartitionSpec is a sequence (jax/_src/partition_spec.py:PartitionSpec), so plain tuples are
accepted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from xrank.dialects.cuts import chain_cuts, even_axes_of
from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, free_size_names

SpecEntry: TypeAlias = str | tuple[str, ...] | None
"""The entry of one dim in a PartitionSpec."""


def from_partition_spec(spec: Sequence[Any], mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout of a PartitionSpec on a mesh.

    The first axis of a tuple cuts first, the next axis cuts each piece again (jax/_src/named_sharding.py: the first
    axis of a tuple is the major one), as in the notation. ``unreduced`` axes hold addends: they become "sum" clauses.

    Args:
        spec: a ``PartitionSpec``, or a tuple of the same entries.
        mesh: the mesh of the sharding; axes that the spec does not name hold replicas.
        ndim: the tensor's number of dims; dims after the spec's end are whole. None: the spec's length.

    Raises:
        LayoutError: the spec has more entries than the tensor dims, an entry leaves the dim to the compiler
            (``UNCONSTRAINED``) or is not an entry, axes are ``reduced`` (a property of gradients), an axis is unknown
            or occurs twice.

    Example:
        >>> str(from_partition_spec((None, ("dp", "tp")), DeviceMesh((2, 2), ("dp", "tp"))))
        '[d0, d1/dp/tp]'
    """
    if isinstance(spec, str):
        raise LayoutError(f"the PartitionSpec {spec!r} is one text", want="a tuple, such as (None, 'model')")
    reduced = getattr(spec, "reduced", None)
    if reduced:
        raise LayoutError(
            f"a PartitionSpec has gradients unreduced along {sorted(reduced)}, which a layout cannot express",
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
    dims = tuple(chain_cuts(name, axes, "/") for name, axes in zip(names, cuts, strict=True))
    # A set has no order, so use the mesh's; axes that the mesh lacks come last and are refused.
    sums = sorted(unreduced, key=(*mesh.axis_names, *sorted(unreduced)).index)
    return TensorLayout.from_tree(LayoutTree(dims, sums=tuple(sums)), mesh)


def to_partition_spec(
    layout: TensorLayout, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> tuple[SpecEntry, ...]:
    """Return a layout as the entries of a PartitionSpec, one per dim: ``PartitionSpec(*entries)``.

    Args:
        layout: a layout whose dims are only cut by axes. Entries cannot express sums, so a layout with sums is
            refused: its PartitionSpec takes the entries of its dims, and ``unreduced``.
        mesh: the mesh, if the layout has none; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that PartitionSpecs cannot express; the error names it.

    Example:
        >>> to_partition_spec(TensorLayout.parse("[h, f/dp/tp]"))
        (None, ('dp', 'tp'))
    """
    if layout.tree.sums:
        raise LayoutError(
            f"the entries of a PartitionSpec cannot express the sums of the layout {layout}",
            got=" ".join(f"sum({axis})" for axis in layout.tree.sums),
            want="a layout without sums",
            next_step="PartitionSpec(*entries, unreduced={...}) has them: take the entries of "
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
        f"a layout cannot express an entry of the PartitionSpec {entries!r}",
        got=repr(entry),
        want="None, an axis, or a tuple of axes",
        next_step="take the spec of the array's own sharding, where the compiler has chosen"
        if "UNCONSTRAINED" in repr(entry).upper()
        else None,
    )
