"""Arguments that only calls about live models have, checked before any tensor is read: group, layouts, mesh."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from xrank.errors import UsageError
from xrank.layout import DeviceMesh, LayoutMap, MeshViews
from xrank.layout.terms.tensors import describe_mesh
from xrank.recipes.options import wrong_value
from xrank.storage.entries import plain_config


def _wrong_kind(name: str, value: object, want: str) -> UsageError:
    return wrong_value(name, value, want.partition(";")[0], want, got=f"a {type(value).__name__}")


def check_meeting(group: Any, timeout_seconds: float) -> None:
    """Refuse a group or a timeout with which ranks cannot meet."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs are incomplete
    if group is not None and distributed.is_available() and not isinstance(group, int | distributed.ProcessGroup):
        raise _wrong_kind("group", group, "a process group of torch's, or None for all ranks")
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float):
        raise _wrong_kind("timeout_seconds", timeout_seconds, "a number of seconds")


def check_types(layouts: Any, mesh: Any, config_overrides: Any = None) -> None:
    """Refuse arguments of the wrong types."""
    if layouts is not None and not isinstance(layouts, LayoutMap):
        raise _wrong_kind("layouts", layouts, "a LayoutMap; LayoutMap.read makes one of a file")
    is_torchs = hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh")  # this test needs no import of torch
    if not (mesh is None or is_torchs or isinstance(mesh, DeviceMesh | MeshViews)):
        raise _wrong_kind("mesh", mesh, "a DeviceMesh of xrank's or torch's")
    if config_overrides is not None:
        if not isinstance(config_overrides, Mapping):
            raise _wrong_kind("config_overrides", config_overrides, "a mapping")
        plain_config(config_overrides, "config_overrides")


def live_layouts(layouts: LayoutMap | str | os.PathLike[str] | None, mesh: Any) -> LayoutMap | None:
    """Return the given layouts; those without a mesh get the given mesh."""
    given = layouts if layouts is None or isinstance(layouts, LayoutMap) else LayoutMap.read(layouts)
    if given is None or mesh is None or given.device_mesh is not None:
        return given
    try:
        found = mesh if isinstance(mesh, MeshViews | DeviceMesh) else describe_mesh(mesh)
    except AttributeError:
        kind = type(mesh).__name__
        raise UsageError(f"mesh= takes no {kind}", got=kind, want="xrank's or torch's DeviceMesh") from None
    views = found if isinstance(found, MeshViews) else MeshViews(found)
    on_mesh = LayoutMap(views.main)
    on_mesh.views.update(views.others)
    for name in ("views", "sizes", "aliases", "companions"):
        getattr(on_mesh, name).update(getattr(given, name))
    on_mesh.update(given.items())
    return on_mesh
