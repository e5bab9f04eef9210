"""DTensor placements of a parameter: axes that cut it, and axes along which its values are addends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xrank.dialects.placements import describe_mesh
from xrank.errors import LayoutError
from xrank.gradients.plans.mesh_places import MeshPlace, ranks_along

__all__ = ["ParameterCuts", "cuts_of", "local_of"]


@dataclass(frozen=True, slots=True)
class ParameterCuts:
    """Axes of a parameter's placements; empty for a plain tensor."""

    sharded: tuple[str, ...] = ()
    """Axes along which ranks hold different parts."""
    partial: tuple[str, ...] = ()
    """Axes along which values are addends, and so are gradients."""
    is_known: bool = False
    """Whether placements along tp or etp exist: a plain copy there is then certain."""


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
    found: dict[str, list[str]] = {"sharded": [], "partial": []}
    is_known = False
    for axis, placement in zip(mesh.axis_names, parameter.placements, strict=True):
        if mesh.axis_length(axis) == 1:
            continue
        _check_axis(name, mesh, axis, place)
        is_known |= axis in ("tp", "etp")
        if placement.is_partial():
            if axis not in ("tp", "etp"):
                raise LayoutError(
                    f"{name}: its values are addends along {axis!r}, along which parameters are copies or cut",
                    tensor=name,
                    rank=place.rank,
                    got=repr(placement),
                    want="Replicate or Shard",
                )
            found["partial"].append(axis)
        elif not placement.is_replicate():
            found["sharded"].append(axis)
    return ParameterCuts(tuple(found["sharded"]), tuple(found["partial"]), is_known)


def _is_placed(parameter: Any) -> bool:
    return hasattr(parameter, "placements") and hasattr(parameter, "device_mesh")


def _check_axis(name: str, mesh: Any, axis: str, place: MeshPlace) -> None:
    """Check that an axis of a parameter's mesh is one of the plan's, along the same ranks."""
    plans = [known for known in (place.dense, place.expert) if known is not None and axis in known.axis_names]
    if not plans:
        raise LayoutError(
            f"{name}: its placements are along {axis!r}, an axis that the mesh of the plan does not have",
            tensor=name,
            rank=place.rank,
            got=f"the mesh {mesh.grid!r}",
            want=f"axes of {' or of '.join(repr(m.grid) for m in (place.dense, place.expert) if m is not None)}",
            next_step="give the axes of both meshes the same names",
        )
    # A rank outside of the parameter's mesh holds no part of it, and has no group to compare.
    if place.rank not in mesh:
        return
    along = ranks_along(mesh, place.rank, [axis])
    if all(ranks_along(known, place.rank, [axis]) != along for known in plans):
        raise LayoutError(
            f"{name}: its mesh has other ranks along {axis!r} than the plan's",
            tensor=name,
            rank=place.rank,
            got=f"ranks {list(along)}",
            want=f"ranks {list(ranks_along(plans[0], place.rank, [axis]))}",
            next_step="make both meshes of the same ranks in the same order",
        )
