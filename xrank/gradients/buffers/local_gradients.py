"""This rank's part of a gradient: a DTensor gradient may have other placements than its parameter."""

from __future__ import annotations

from typing import Any

import torch

from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan_entries import PlannedParameter
from xrank.gradients.wires.faults import GradientFault

__all__ = ["find_foreign_axis", "make_foreign_fault", "take_local_gradient"]


def find_foreign_axis(gradient: Any, parameter: Any, planned: PlannedParameter) -> str | None:
    """Return an axis of replicas along which torch itself keeps a gradient as addends or parts; None without one.

    Activations are then DTensors along it, so torch has scaled the gradient by its own rules, not by the plan's.
    """
    return next((axis for axis, own, _ in _find_differences(gradient, parameter) if axis in planned.axes and own), None)


def take_local_gradient(gradient: Any, parameter: Any, planned: PlannedParameter) -> torch.Tensor:
    """Return a gradient as a strided tensor with the placements of its parameter's local tensor.

    Addends stay addends along axes that finalize reduces later. Along other axes torch adds them up here; all ranks
    along such an axis do so in the order of their backwards.

    Args:
        gradient: gradient from autograd.
        parameter: its parameter.
        planned: the parameter's entry in the plan.
    """
    differing = _find_differences(gradient, parameter)
    later = {axis for one in planned.later for axis in one.axes}
    if any(axis not in later for axis, _, _ in differing):
        kept = {axis: own for axis, own, _ in differing if axis in later}
        names = gradient.device_mesh.mesh_dim_names or ()
        wanted = [kept.get(name, one) for name, one in zip(names, parameter.placements, strict=True)]
        # A collective along the differing axes: all ranks along them come here, in the order of their backwards.
        gradient = gradient.redistribute(gradient.device_mesh, wanted)
    local: torch.Tensor = local_of(gradient)
    return local if local.layout is torch.strided else local.to_dense()


def _find_differences(gradient: Any, parameter: Any) -> list[tuple[str, Any, Any]]:
    """Return the axes along which placements of a gradient and its parameter differ, with both placements."""
    if not hasattr(gradient, "placements") or not hasattr(parameter, "placements"):
        return []
    names = gradient.device_mesh.mesh_dim_names or ()
    found = zip(names, gradient.placements, parameter.placements, strict=True)
    lengths = gradient.device_mesh.shape
    return [(name, own, its) for (name, own, its), n in zip(found, lengths, strict=True) if own != its and n > 1]


def make_foreign_fault(name: str, axis: str, rank: int) -> GradientFault:
    """Return the fault of a gradient that has a foreign axis."""
    return GradientFault(
        f"{name}: on rank {rank} torch keeps its gradient as parts along {axis}, and would add it up by itself",
        rank,
        name,
        got=f"activations that are DTensors along {axis}",
        want=f"plain tensors, or DTensors along other axes: gradients along {axis} are added up here",
        next_step=f"leave {axis} out of the mesh of the activations",
    )
