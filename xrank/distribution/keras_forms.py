"""Meshes, layouts and maps in the form of Keras: attributes read as they were given, and a layout gets its mesh later.

They are kinds of `xrank.layout`'s own classes, so every function of xrank takes them. Those are frozen; here, as in
keras/src/distribution/distribution_lib.py, a layout without a mesh takes one once, and a map stores the layout that was
put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xrank import layout as frozen
from xrank.errors import LayoutError


class DeviceMesh(frozen.DeviceMesh):
    """A grid of devices, as `keras.distribution.DeviceMesh`. Each device is a rank.

    Args:
        shape: the length of each axis.
        axis_names: the names of the axes, outermost first; `axis_names` of the mesh is the same object.
        devices: ranks, or texts as of `list_devices`, row-major; None: ranks from 0.

    Raises:
        LayoutError: the arguments do not fit each other, or an axis or a rank occurs twice.

    Example:
        >>> mesh = DeviceMesh((2, 2), ["batch", "model"], ["cpu:0", "cpu:1", "cpu:2", "cpu:3"])
        >>> mesh.axis_names, mesh.devices.shape
        (['batch', 'model'], (2, 2))
    """

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str], devices: Any = None) -> None:
        super().__init__(shape, axis_names, devices)
        if isinstance(axis_names, list):
            object.__setattr__(self, "axis_names", axis_names)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, frozen.DeviceMesh) and _facts_of(self) == _facts_of(other)

    def __hash__(self) -> int:
        return hash(_facts_of(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return (DeviceMesh, (self.shape, self.axis_names, self._devices_of()))

    @property
    def backend_mesh(self) -> Any:
        """The torch mesh over the process group; None without a group. All ranks read it together at first."""
        from xrank.distribution.devices import live_mesh

        return live_mesh(self)


def _facts_of(mesh: frozen.DeviceMesh) -> tuple[Any, ...]:
    return mesh.shape, tuple(mesh.axis_names), mesh.ranks


class TensorLayout(frozen.TensorLayout):
    """How a tensor's dims are split, like `keras.distribution.TensorLayout`.

    Args:
        axes: per dim the axis that splits it, or None.
        device_mesh: the mesh; it may be set later, once.

    Raises:
        LayoutError: an axis splits twice, or is not in the mesh.

    Example:
        >>> layout = TensorLayout(("batch", None))
        >>> layout.device_mesh = DeviceMesh((2, 2), ("batch", "model"))
        >>> layout.axes
        ('batch', None)
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "device_mesh":
            super().__setattr__(name, value)
        elif self.device_mesh is not None:
            raise LayoutError(
                f"Cannot override device mesh value. Existing value is {self.device_mesh}", got=repr(value)
            )
        else:
            self._fill(self.tree, value, None)

    __hash__ = frozen.TensorLayout.__hash__

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, frozen.TensorLayout):
            return NotImplemented
        return (self.tree, self.device_mesh, self.view_mesh) == (other.tree, other.device_mesh, other.view_mesh)

    @classmethod
    def parse(
        cls,
        text: str,
        device_mesh: frozen.DeviceMesh | None = None,
        views: Mapping[str, frozen.DeviceMesh] | None = None,
    ) -> TensorLayout:
        """Parse a layout's text, such as ``"[f/tp/~dp, h]"``; attach the mesh and its views, if given."""
        return in_keras_form(frozen.TensorLayout.parse(text, device_mesh, views))

    def with_mesh(
        self, device_mesh: frozen.DeviceMesh, views: Mapping[str, frozen.DeviceMesh] | None = None
    ) -> TensorLayout:
        """Attach a mesh to this layout in place, as Keras does when a map stores the layout."""
        if self.device_mesh is None:
            made = frozen.TensorLayout.with_mesh(self, device_mesh, views)
            self._fill(made.tree, device_mesh, made.view_mesh)
            return self
        frozen.TensorLayout.with_mesh(self, device_mesh, views)  # refuses another mesh
        return self

    @property
    def backend_layout(self) -> Any:
        """The torch mesh and the placements of a tensor of these dims; None without a process group."""
        from xrank.distribution.devices import live_mesh
        from xrank.layout.terms.tensors import to_placements

        if self.device_mesh is None:
            raise LayoutError("Cannot create sharding when device mesh is not set for TensorLayout.", got=repr(self))
        torch_mesh = live_mesh(self.device_mesh)
        return None if torch_mesh is None else (torch_mesh, to_placements(self, self.device_mesh))

    @property
    def axes(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """Per dim the axis that splits it, or None; if several axes split it, all of them in order."""
        return tuple((axes[0] if len(axes) == 1 else axes) if axes else None for axes in self.cut_axes)


def in_keras_form(layout: frozen.TensorLayout) -> TensorLayout:
    """Return an equal layout in the form of Keras; one that has it is returned."""
    if isinstance(layout, TensorLayout):
        return layout
    made = object.__new__(TensorLayout)
    made._fill(layout.tree, layout.device_mesh, layout.view_mesh)
    return made


class LayoutMap(frozen.LayoutMap):
    """A map from patterns of names to layouts, like `keras.distribution.LayoutMap`. It returns the stored layouts.

    Args:
        device_mesh: the mesh, which layouts without a mesh get when they are stored.

    Example:
        >>> layout_map = LayoutMap(DeviceMesh((2, 2), ("batch", "model")))
        >>> layout_map["dense.*weight"] = ("model", None)
        >>> layout_map["dense_1.weight"].axes
        ('model', None)
    """

    def __setitem__(self, key: str, layout: Any) -> None:
        if isinstance(layout, tuple):
            layout = TensorLayout(layout)
        elif isinstance(layout, frozen.TensorLayout):
            layout = in_keras_form(layout)
        super().__setitem__(key, layout)
        self._layouts[key] = in_keras_form(self._layouts[key])
