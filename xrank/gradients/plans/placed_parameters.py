"""DTensor placements of a parameter: axes that cut it, and axes along which its values are addends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrank.dialects.placements import describe_mesh
from xrank.errors import LayoutError
from xrank.gradients.mesh_places import AXIS_ALIASES, MeshPlace, ranks_along
from xrank.layout import DeviceMesh


@dataclass(frozen=True, slots=True)
class ParameterCuts:
    """Axes of a parameter's placements; empty for a plain tensor."""

    sharded: tuple[str, ...] = ()
    """Axes along which ranks hold different parts."""
    partial: tuple[str, ...] = ()
    """Axes along which values are addends, and so are gradients."""
    is_known: bool = False
    """Whether placements along tp or etp exist: a plain copy there is then certain."""
    axes: tuple[tuple[str, ...], ...] = ()
    """Axes of the plan that each placement is along: several where the parameter's mesh has merged them."""


def local_of(parameter: Any) -> Any:
    """Return this rank's part of a parameter: the local tensor of a DTensor, else the parameter itself."""
    # Not to_local(): it returns another object, whose .data can't be moved into a buffer for the parameter.
    return parameter._local_tensor if _is_placed(parameter) else parameter


def cuts_of(name: str, parameter: Any, place: MeshPlace) -> ParameterCuts:
    """Return the axes that cut a parameter.

    Raises:
        LayoutError: its mesh has an axis longer than 1 that the plan's meshes do not have, or other ranks along an
            axis; or its values are addends along another axis than tp.
    """
    if not _is_placed(parameter):
        return ParameterCuts()
    mesh = describe_mesh(parameter.device_mesh)
    sharded: list[str] = []
    partial: list[str] = []
    along = tuple(_find_axes(name, mesh, axis, place) for axis in mesh.axis_names)
    for axis, placement, axes in zip(mesh.axis_names, parameter.placements, along, strict=True):
        if placement.is_partial():
            if any(one not in ("tp", "etp") for one in axes):
                raise LayoutError(
                    f"{name}: its values are addends along {axis!r}, along which parameters are copies or cut",
                    tensor=name,
                    rank=place.rank,
                    got=repr(placement),
                    want="Replicate or Shard",
                )
            partial += axes
        elif not placement.is_replicate():
            sharded += axes
    is_known = any(axis in ("tp", "etp") for axes in along for axis in axes)
    return ParameterCuts(tuple(sharded), tuple(partial), is_known, along)


def _is_placed(parameter: Any) -> bool:
    return hasattr(parameter, "placements") and hasattr(parameter, "device_mesh")


def _find_axes(name: str, mesh: DeviceMesh, axis: str, place: MeshPlace) -> tuple[str, ...]:
    """Return the axes of the plan's mesh that have the ranks of an axis of a parameter's mesh.

    The ranks decide, because torch's meshes have names of their own, none at all, or one name for several axes
    (``_flatten``). An axis that has a name of the plan must have its ranks too.
    """
    if mesh.axis_length(axis) == 1:
        return ()
    plans = [known for known in (place.dense, place.expert) if known is not None]
    named = [known for known in plans if axis in known.axis_names]
    if place.rank not in mesh:
        # This rank holds no part of the parameter, and has no ranks to compare.
        alias = AXIS_ALIASES.get(axis, axis)
        return (axis,) if named else (alias,) if any(alias in known.axis_names for known in plans) else ()
    along = {*ranks_along(mesh, place.rank, [axis])}
    for known in named or plans:
        longer = [one for one in known.axis_names if known.axis_length(one) > 1]
        inside = [one for one in longer if along.issuperset(ranks_along(known, place.rank, [one]))]
        axes = (axis,) if named else tuple(inside)
        if {*ranks_along(known, place.rank, axes)} == along:
            return axes
    if named:
        raise LayoutError(
            f"{name}: its mesh has other ranks along {axis!r} than the plan's",
            tensor=name,
            rank=place.rank,
            got=f"ranks {sorted(along)}",
            want=f"ranks {list(ranks_along(named[0], place.rank, [axis]))}",
            next_step="make both meshes of the same ranks in the same order",
        )
    raise LayoutError(
        f"{name}: its placements are along {axis!r}, and no axes of the plan's mesh have the same ranks",
        tensor=name,
        rank=place.rank,
        got=f"the mesh {mesh.grid!r}, ranks {sorted(along)}",
        want=f"ranks along axes of {' or of '.join(repr(known.grid) for known in plans)}",
        next_step="make the plan with the mesh of the parameters",
    )
