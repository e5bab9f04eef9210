"""This rank's part of a gradient: a DTensor gradient may have other placements than its parameter."""

from __future__ import annotations

from typing import Any

import torch

from xrank.gradients.plan import PlannedParameter
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientFault


def find_foreign_axis(gradient: Any, parameter: Any, planned: PlannedParameter) -> str | None:
    """Return an axis of replicas along which torch itself keeps a gradient as addends or parts; None without one.

    Activations are then DTensors along it, so torch has scaled the gradient by its own rules, not by the plan's.
    """
    differing = _find_differing(gradient, parameter)
    return next((axis for dim in differing for axis in planned.placement_axes[dim] if axis in planned.axes), None)


def take_local_gradient(gradient: Any, parameter: Any, planned: PlannedParameter) -> torch.Tensor:
    """Return a gradient as a strided tensor with the placements of its parameter's local tensor.

    Addends stay addends along axes that finalize reduces later. Along other axes torch adds them up here; all ranks
    along such an axis do so in the order of their backwards.

    Args:
        gradient: gradient from autograd.
        parameter: its parameter.
        planned: the parameter's entry in the plan.
    """
    later = {axis for one in planned.later for axis in one.axes}
    wanted = list(gradient.placements) if hasattr(gradient, "placements") else []
    for dim in _find_differing(gradient, parameter):
        if not later.issuperset(planned.placement_axes[dim]):
            wanted[dim] = parameter.placements[dim]
    if wanted and wanted != list(gradient.placements):
        # A collective along the differing axes: all ranks along them come here, in the order of their backwards.
        gradient = gradient.redistribute(gradient.device_mesh, wanted)
    local: torch.Tensor = local_of(gradient)
    return local if local.layout is torch.strided else local.to_dense()


def _find_differing(gradient: Any, parameter: Any) -> list[int]:
    """Return the dims of the mesh along which placements of a gradient and its parameter differ."""
    if not hasattr(gradient, "placements") or not hasattr(parameter, "placements"):
        return []
    pairs = zip(gradient.placements, parameter.placements, gradient.device_mesh.shape, strict=True)
    return [dim for dim, (own, its, length) in enumerate(pairs) if own != its and length > 1]


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
