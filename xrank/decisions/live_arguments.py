"""Checks of the arguments of live conversions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xrank.errors import UsageError, option
from xrank.layout import DeviceMesh, LayoutMap, MeshViews
from xrank.words import repr_text
from xrank.workspace.states import plain_config


def check_meeting(group: Any, timeout_seconds: float) -> None:
    """Refuse a group or a timeout with which ranks cannot meet.

    Raises:
        UsageError: an argument is refused; the error names it.
    """
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs are incomplete
    if group is not None and distributed.is_available() and not isinstance(group, int | distributed.ProcessGroup):
        raise _wrong("group", group, "a process group of torch's, or None for all ranks")
    if isinstance(timeout_seconds, bool) or not isinstance(timeout_seconds, int | float):
        raise _wrong("timeout_seconds", timeout_seconds, "a number of seconds")


def check_types(layouts: Any, mesh: Any, config_overrides: Any = None) -> None:
    """Refuse arguments of the wrong types.

    Raises:
        UsageError: an argument is refused; the error names it.
    """
    if layouts is not None and not isinstance(layouts, LayoutMap):
        raise _wrong("layouts", layouts, "a LayoutMap; LayoutMap.read makes one of a file")
    is_torchs = hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh")  # this test needs no import of torch
    if not (mesh is None or is_torchs or isinstance(mesh, DeviceMesh | MeshViews)):
        raise _wrong("mesh", mesh, "a DeviceMesh of xrank's or torch's")
    if config_overrides is not None:
        if not isinstance(config_overrides, Mapping):
            raise _wrong("config_overrides", config_overrides, "a mapping")
        plain_config(config_overrides, "config_overrides")


def _wrong(name: str, value: object, want: str) -> UsageError:
    return UsageError(
        f"{option(name)} must be {want.partition(';')[0]}; got a {type(value).__name__}",
        got=repr_text(value, 100),
        want=want,
        next_step="give such a value",
    )
