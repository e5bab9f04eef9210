"""Keras terms: one axis or None per dim, and meshes of device strings (keras/src/distribution/distribution_lib.py).

Keras is not imported: its layouts and meshes are read by their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrank.dialects.cuts import even_axes_of
from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout


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
        raise LayoutError(
            f"the axes {entries!r} are more than the tensor's dims", got=f"{len(entries)} axes", want=f"at most {count}"
        )
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
            raise LayoutError(
                f"Keras' axes cannot express dim {i} of the layout {layout}: they have one axis per dim",
                got=str(list(axes)),
                want="one axis",
                next_step="replace these axes of the mesh by one of that length",
            )
    return tuple(axes[0] if axes else None for axes in every)
