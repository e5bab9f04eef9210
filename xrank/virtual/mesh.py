"""Meshes given by their lengths alone, and the groups of devices that call a collective."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from numbers import Integral
from typing import SupportsIndex, TypeAlias

from xrank.errors import LayoutError, UsageError
from xrank.layout.mesh import DeviceMesh

AXES = ("x", "y", "z", "w")
"""Axis names of a mesh given by lengths, outermost first."""


@dataclass(frozen=True, slots=True, init=False)
class MeshIndex:
    """A place in a mesh: ``MeshIndex(1, 3)``, ``x`` 1 and ``y`` 3."""

    places: tuple[int, ...]

    def __init__(self, *places: int) -> None:
        object.__setattr__(self, "places", places)

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    @property
    def x(self) -> int:
        """The place along the first axis."""
        return self.places[0]

    @property
    def y(self) -> int:
        """The place along the second axis; 0 if the mesh has no such axis (as for `z` and `w`)."""
        return self._get_place(1)

    @property
    def z(self) -> int:
        """The place along the third axis."""
        return self._get_place(2)

    @property
    def w(self) -> int:
        """The place along the fourth axis."""
        return self._get_place(3)

    def _get_place(self, number: int) -> int:
        return self.places[number] if number < len(self.places) else 0


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """A grid of one to four axes, x outermost: ``Mesh(2, 4)`` has eight devices; y varies fastest.

    Iteration yields every `MeshIndex` in device order.

    Raises:
        UsageError: the number of axes is not 1 to 4.
        LayoutError: a length is not an integer of at least 1.

    >>> Mesh(2, 4).flat(MeshIndex(1, 3))
    7
    """

    lengths: tuple[int, ...]

    def __init__(self, *lengths: int) -> None:
        if not 1 <= len(lengths) <= len(AXES):
            raise UsageError(
                f"a mesh given by lengths has 1 to {len(AXES)} axes",
                got=f"{len(lengths)} lengths",
                want=f"lengths of {', '.join(AXES)}",
                next_step="give a DeviceMesh, which names its axes: DeviceMesh(shape, axis_names)",
            )
        object.__setattr__(self, "lengths", DeviceMesh(lengths, AXES[: len(lengths)]).shape)

    def __len__(self) -> int:
        return prod(self.lengths)

    def __iter__(self) -> Iterator[MeshIndex]:
        return (MeshIndex(*places) for places in product(*map(range, self.lengths)))

    def flat(self, index: MeshIndex) -> int:
        """Return the number of the device at a place.

        Raises:
            LayoutError: the mesh has no such place.
        """
        if len(index.places) != len(self.lengths):
            raise LayoutError(
                f"{index!r} is not a place in {self!r}",
                got=f"{len(index.places)} numbers",
                want=f"{len(self.lengths)}, one for each axis",
                next_step="give one number for each axis of the mesh",
            )
        return self.device_mesh.rank_at(dict(zip(AXES, index.places, strict=False)))

    def index(self, device: int) -> MeshIndex:
        """Return the place of a device."""
        return MeshIndex(*self.device_mesh.coordinate(device).values())

    @property
    def x_dim(self) -> int:
        """The length of the first axis."""
        return self.lengths[0]

    @property
    def y_dim(self) -> int:
        """The length of the second axis; 1 if the mesh has one axis."""
        return self.lengths[1] if len(self.lengths) > 1 else 1

    @property
    def device_mesh(self) -> DeviceMesh:
        """The same mesh with axis names."""
        return DeviceMesh(self.lengths, AXES[: len(self.lengths)])


MeshLike: TypeAlias = DeviceMesh | Mesh | Sequence[int] | int


def as_device_mesh(mesh: MeshLike) -> DeviceMesh:
    """Convert a mesh to one with axis names; the axes of lengths alone are ``x, y, z, w``."""
    if isinstance(mesh, DeviceMesh):
        return mesh
    if isinstance(mesh, Mesh):
        return mesh.device_mesh
    given: object = mesh
    if isinstance(given, str) or not isinstance(given, Sequence | Integral):
        raise UsageError(
            f"{mesh!r} is not a mesh",
            got=type(mesh).__qualname__,
            want="a number of devices, a tuple of lengths, or a DeviceMesh",
            next_step="name the axes so: DeviceMesh((2, 4), ('dp', 'tp'))",
        )
    return Mesh(*(mesh if isinstance(mesh, Sequence) else (mesh,))).device_mesh


def resolve_axes(mesh: DeviceMesh, axes: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return axis names as a tuple; None means all axes of the mesh."""
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
