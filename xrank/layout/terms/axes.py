"""The terms of JAX and Keras: mesh axes or None per dim, and their meshes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.notation import LayoutTree
from xrank.layout.tensor_layout import TensorLayout, free_size_names
from xrank.layout.terms.tensors import beyond_dialect, chain_cuts, even_axes_of

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
        what = f"a PartitionSpec has gradients unreduced along {sorted(reduced)}, which a layout cannot express"
        raise LayoutError(what, got=repr(spec), want="axes that cut dims or hold addends, and no others")
    unreduced = getattr(spec, "unreduced", None) or ()
    entries = tuple(spec)
    count = len(entries) if ndim is None else ndim
    if len(entries) > count:
        what = f"the PartitionSpec {entries!r} has more entries than the tensor has dims"
        raise LayoutError(what, got=f"{len(entries)} entries", want=f"at most {count}")
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
        got = " ".join(f"sum({axis})" for axis in layout.tree.sums)
        next_step = "PartitionSpec(*entries, unreduced={...}) has them: take the entries of "
        next_step += "TensorLayout.from_dims(layout.dims), and add layout.tree.sums"
        what = f"the sums of the layout {layout}"
        raise beyond_dialect("the entries of a PartitionSpec", what, got, "a layout without sums", next_step)
    axes = even_axes_of(layout, "PartitionSpecs", mesh, shape)
    return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in axes)


def _axes_of(entry: Any, entries: tuple[Any, ...]) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, tuple | list) and all(isinstance(axis, str) for axis in entry):
        return tuple(entry)
    is_free = "UNCONSTRAINED" in repr(entry).upper()
    next_step = "take the spec of the array's own sharding, where the compiler has chosen" if is_free else None
    what, want = f"an entry of the PartitionSpec {entries!r}", "None, an axis, or a tuple of axes"
    raise beyond_dialect("a layout", what, repr(entry), want, next_step)


def describe_keras_mesh(device_mesh: Any) -> DeviceMesh:
    """Convert a Keras ``DeviceMesh``; the rank of the device ``"gpu:3"`` is 3.

    Keras numbers devices over all processes (distribution_lib.py:list_devices), which equals the ranks if each process
    has one device.

    Raises:
        LayoutError: as `DeviceMesh`, and for devices that are not such texts.

    Example:
        >>> from types import SimpleNamespace
        >>> describe_keras_mesh(SimpleNamespace(shape=(2,), axis_names=["model"], devices=["cpu:0", "cpu:1"]))
        <DeviceMesh shape=(2,), axis_names=('model',)>
    """
    return DeviceMesh(device_mesh.shape, device_mesh.axis_names, device_mesh.devices)


def from_keras_axes(axes: Any, mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout of Keras' axes on a mesh.

    Args:
        axes: per dim an axis or None, or a Keras ``TensorLayout`` with ``axes``.
        mesh: the mesh; axes that are not named hold replicas.
        ndim: the tensor's number of dims; dims after the last entry are whole, as in Keras. None: the number of axes.

    Raises:
        LayoutError: there are more axes than dims, a dim has several axes (Keras refuses them too, with a mesh), an
            axis is unknown or occurs twice.

    Example:
        >>> str(from_keras_axes((None, "model"), DeviceMesh((2, 2), ("batch", "model"))))
        '[d0, d1/model]'
    """
    entries = getattr(axes, "axes", axes)
    if isinstance(entries, str):
        raise LayoutError(f"the axes {entries!r} are one text", want="one entry a dim, such as (None, 'model')")
    entries = tuple(entries)
    count = len(entries) if ndim is None else ndim
    if len(entries) > count:
        what = f"the axes {entries!r} are more than the tensor's dims"
        raise LayoutError(what, got=f"{len(entries)} axes", want=f"at most {count}")
    return TensorLayout(entries + (None,) * (count - len(entries)), mesh)


def to_keras_axes(
    layout: TensorLayout, mesh: DeviceMesh | None = None, shape: Sequence[int] | None = None
) -> tuple[str | None, ...]:
    """Return a layout as the axes of a Keras ``TensorLayout``, one entry per dim.

    Args:
        layout: a layout whose dims are cut by at most one axis each.
        mesh: the mesh, if the layout has none; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that Keras cannot express; the error names it.

    Example:
        >>> to_keras_axes(TensorLayout.parse("[h, f/model]"))
        (None, 'model')
    """
    every = even_axes_of(layout, "Keras' axes", mesh, shape)
    for i, axes in enumerate(every):
        if len(axes) > 1:
            what, next_step = "they have one axis per dim", "replace these axes of the mesh by one of that length"
            what = f"dim {i} of the layout {layout}: {what}"
            raise beyond_dialect("Keras' axes", what, str(list(axes)), "one axis", next_step)
    return tuple(axes[0] if axes else None for axes in every)
