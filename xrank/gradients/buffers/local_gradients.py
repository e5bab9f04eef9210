"""What of a gradient is this rank's: of a DTensor's, whose placements may be others than its parameter's."""

from __future__ import annotations

from typing import Any

import torch

from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import PlannedParameter
from xrank.gradients.wires.faults import Fault

__all__ = ["foreign_axis", "foreign_fault", "local_gradient"]


def foreign_axis(gradient: Any, parameter: Any, planned: PlannedParameter) -> str | None:
    """Return an axis of replicas along which torch itself keeps a gradient as addends or parts; None if there is none.

    Activations are DTensors along it then, so that torch has scaled the gradient by its own rules, not by the plan's.
    """
    return next((axis for axis, own, _ in _differing(gradient, parameter) if axis in planned.axes and own), None)


def local_gradient(gradient: Any, parameter: Any, planned: PlannedParameter) -> torch.Tensor:
    """Return a gradient as the local tensor of its parameter is, strided.

    Along an axis that finalize reduces it over, addends stay addends. Along another, torch adds them up here, which
    all ranks along it do in the order of their backwards.

    Args:
        gradient: what autograd left.
        parameter: it is of this.
        planned: the parameter in the plan.
    """
    differing = _differing(gradient, parameter)
    later = {axis for one in planned.later for axis in one.axes}
    if any(axis not in later for axis, _, _ in differing):
        kept = {axis: own for axis, own, _ in differing if axis in later}
        names = gradient.device_mesh.mesh_dim_names or ()
        wanted = [kept.get(name, one) for name, one in zip(names, parameter.placements, strict=True)]
        gradient = gradient.redistribute(gradient.device_mesh, wanted)
    local: torch.Tensor = local_of(gradient)
    return local if local.layout is torch.strided else local.to_dense()


def _differing(gradient: Any, parameter: Any) -> list[tuple[str, Any, Any]]:
    """Return the axes along which a gradient is placed otherwise than its parameter, with both placements."""
    if not hasattr(gradient, "placements") or not hasattr(parameter, "placements"):
        return []
    names = gradient.device_mesh.mesh_dim_names or ()
    found = zip(names, gradient.placements, parameter.placements, strict=True)
    lengths = gradient.device_mesh.shape
    return [(name, own, its) for (name, own, its), n in zip(found, lengths, strict=True) if own != its and n > 1]


def foreign_fault(name: str, axis: str, rank: int) -> Fault:
    """Return what is wrong with a gradient that has a `foreign_axis`."""
    return Fault(
        f"{name}: on rank {rank} torch keeps its gradient as parts along {axis}, and would add it up by itself",
        rank,
        name,
        got=f"activations that are DTensors along {axis}",
        want=f"plain tensors, or DTensors along other axes: gradients along {axis} are added up here",
        next_step=f"leave {axis} out of the mesh of the activations",
    )
