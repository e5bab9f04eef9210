"""The layouts that a caller gives for the plain tensors of a live model."""

from __future__ import annotations

import os
from typing import Any

from xrank.dialects.placements import describe_mesh
from xrank.errors import UsageError
from xrank.layout import DeviceMesh, LayoutMap, MeshViews


def live_layouts(layouts: LayoutMap | str | os.PathLike[str] | None, mesh: Any) -> LayoutMap | None:
    """Return the given layouts; those without a mesh get the given mesh.

    Args:
        layouts: a map, or a layout file.
        mesh: xrank's mesh, with or without views, or torch's; None: the layouts have their own.

    Raises:
        LayoutError, UsageError: as for `LayoutMap.read`, or a layout does not fit the mesh.
    """
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else LayoutMap.read(layouts)
    if given is None or mesh is None or given.device_mesh is not None:
        return given
    views = mesh if isinstance(mesh, MeshViews) else MeshViews(_describe(mesh))
    on_mesh = LayoutMap(views.main)
    on_mesh.views.update(views.others)
    for name in ("views", "sizes", "aliases", "companions"):
        getattr(on_mesh, name).update(getattr(given, name))
    on_mesh.update(given.items())
    return on_mesh


def _describe(mesh: Any) -> DeviceMesh:
    try:
        return mesh if isinstance(mesh, DeviceMesh) else describe_mesh(mesh)
    except AttributeError:
        raise UsageError(
            f"mesh= takes no {type(mesh).__name__}", got=type(mesh).__name__, want="xrank's or torch's DeviceMesh"
        ) from None
