"""Groups: the devices of one collective, given by mesh axes or as a list."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import SupportsIndex

from xrank.errors import UsageError
from xrank.layout.mesh import DeviceMesh


def resolve_axes(mesh: DeviceMesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return axis names as a tuple; None means all axes of the mesh.

    Raises:
        LayoutError: the mesh lacks an axis, or an axis occurs twice.
        UsageError: the value is neither a name nor several names.
    """
    if axes is None:
        return mesh.axis_names
    if not isinstance(axes, Iterable):
        raise UsageError(
            f"axes must be names, not {axes!r}", got=repr(axes), want="the name of an axis, or several names"
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh.check_axes(names)
    return names


def group_of(
    mesh: DeviceMesh, device: int, axes: str | Sequence[str] | None = None, group: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the group in which a device calls a collective, in the group's order.

    Args:
        mesh: the mesh of all devices.
        device: the caller.
        axes: mesh axes along which the members differ, in any order; members have mesh order.
        group: the members themselves; all members must pass the same order.

    Raises:
        LayoutError: the mesh lacks an axis, or an axis occurs twice.
        UsageError: both axes and group are given; or the group lacks the caller, contains a device twice, or contains
            one that is not in the mesh.
    """
    if group is None:
        # Cached for all devices: `DeviceMesh.groups` goes over the whole mesh, and every collective asks.
        return _groups(mesh, resolve_axes(mesh, axes))[device]
    if not isinstance(group, Iterable):
        raise UsageError(
            f"device {device} calls a collective over no group", rank=device, got=repr(group), want="several devices"
        )
    members = tuple(group)

    def refusal(problem: str, want: str, got: str | None = None) -> UsageError:
        return UsageError(
            f"device {device} calls a collective over the group {list(members)}{problem}",
            rank=device,
            got=got,
            want=want,
            next_step="give the same list of distinct devices on each of them, and call on these alone",
        )

    if axes is not None:
        raise refusal(" and over axes", "either", f"axes={axes!r}")
    for member in members:
        if not isinstance(member, SupportsIndex) or member not in mesh:
            first = f"{list(mesh.ranks[:16])}{' ...' if mesh.size > 16 else ''}"
            raise refusal(f", but the mesh {mesh.grid!r} has no device {member!r}", f"devices of {first}", repr(member))
        if members.count(member) > 1:
            raise refusal(f", which contains {member} twice", "each once")
    if device not in members:
        raise refusal(", which lacks the device itself", f"{device} among them")
    return members


@lru_cache(maxsize=256)
def _groups(mesh: DeviceMesh, axes: tuple[str, ...]) -> dict[int, tuple[int, ...]]:
    """Return each device's group."""
    return {device: group for group in mesh.groups(*axes) for device in group}
