"""Keras terms: per dim one axis or None, and meshes of device strings (keras/src/distribution/distribution_lib.py).

Nothing of Keras is imported: its layouts and meshes are known by their attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xrank.dialects.cuts import even_axes_of
from xrank.errors import LayoutError
from xrank.layout.mesh import DeviceMesh
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["describe_keras_mesh", "from_keras_axes", "to_keras_axes"]


def describe_keras_mesh(device_mesh: Any) -> DeviceMesh:
    """Return a Keras ``DeviceMesh`` as xrank's; the rank of the device ``"gpu:3"`` is 3.

    Keras numbers devices over all processes (distribution_lib.py:list_devices), as ranks are numbered with one device
    a process.

    Raises:
        LayoutError: as `DeviceMesh`; also for devices that are no such texts.
    """
    return DeviceMesh(device_mesh.shape, device_mesh.axis_names, device_mesh.devices)


def from_keras_axes(axes: Any, mesh: DeviceMesh, ndim: int | None = None) -> TensorLayout:
    """Return the layout that Keras' axes say on a mesh.

    Args:
        axes: per dim an axis or None, or a Keras ``TensorLayout``, whose ``axes`` are taken.
        mesh: the mesh; axes that are not named hold replicas.
        ndim: the tensor's number of dims; dims past the last entry are whole, as in Keras. As many as axes when None.

    Raises:
        LayoutError: there are more axes than dims, a dim has several axes (Keras refuses them too, with a mesh), an
            axis is unknown or there twice.
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
    """Return a layout as the axes of a Keras ``TensorLayout``, one entry a dim.

    Args:
        layout: a layout whose dims are cut by one axis each, or by none.
        mesh: the mesh, where the layout has none of its own; needed with a shape.
        shape: the tensor's global shape. It shows that ceil chunks ("/~") are even; without it they are refused.

    Raises:
        LayoutError: a part that Keras cannot say; the message names it.
    """
    every = even_axes_of(layout, "Keras' axes", mesh, shape)
    for i, axes in enumerate(every):
        if len(axes) > 1:
            raise LayoutError(
                f"Keras' axes cannot say dim {i} of the layout {layout}: they have one axis a dim",
                got=str(list(axes)),
                want="one axis",
                next_step="give the mesh one axis of that length in place of the several",
            )
    return tuple(axes[0] if axes else None for axes in every)
