"""Compares gradients with those of one process, and names the forgotten factor of a gradient that is a multiple."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from math import prod
from typing import Any

import torch

from xrank.gradients.buffers.nonfinite import first_nonfinite
from xrank.gradients.checking.findings import GradientFinding
from xrank.gradients.plans.mesh_places import MeshPlace
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.plans.plan_entries import PlannedParameter
from xrank.words import join_words

__all__ = ["compare_with_reference", "find_factors"]

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def compare_with_reference(
    gradients: Mapping[str, Any], reference: Mapping[str, Any], plan: GradientPlan, tolerance: float | None
) -> list[GradientFinding]:
    """Return where this rank's gradients differ from those of one process.

    Args:
        gradients: by name, gradients of the local shape; None if none came.
        reference: by name, gradients of the local or of the whole shape, or None.
        plan: this rank's plan.
        tolerance: as in `check_gradients`.
    """
    findings = []
    known = [one for one in reference.values() if one is not None and bool(one.isfinite().all())]
    # The bound of `_difference` includes the largest element of all: zeros with rounding errors then pass.
    largest = max((float(one.abs().max()) for one in known if one.numel()), default=0.0)
    for name, gradient in gradients.items():
        planned = plan[name]
        if name not in reference:
            findings.append(
                GradientFinding("missing", name, (plan.rank,), "the reference has no gradient of this name")
            )
            continue
        wanted = _local_reference(reference[name], gradient, planned)
        if wanted is None:
            got = f"{list(planned.shape)}, and the reference of {list(reference[name].shape)}"
            message = f"it is of the local shape {got}, and no placement defines this rank's part"
            findings.append(GradientFinding("shape", name, (plan.rank,), message))
            continue
        bad = first_nonfinite(wanted)
        if bad is not None:
            message = f"the reference is {bad[1]} at element {list(bad[0])}, so nothing can be compared with it"
            findings.append(GradientFinding("nonfinite", name, (plan.rank,), message))
            continue
        local = torch.zeros(planned.shape, dtype=planned.dtype) if gradient is None else local_of(gradient)
        part = slice(*planned.owned)
        allowed = _tolerance(planned, wanted, local) if tolerance is None else tolerance
        found = _difference(local.reshape(-1)[part], wanted.reshape(-1)[part], allowed, largest, planned, plan)
        if found is not None:
            findings.append(found)
    return findings


def find_factors(
    ratio: float, plan: GradientPlan, planned: PlannedParameter, tolerance: float = 0.02
) -> tuple[str, ...]:
    """Return the lengths of axes, or products of lengths, that equal a ratio or its inverse, with the fewest axes.

    Args:
        ratio: gradient divided by reference.
        plan: this rank's plan.
        planned: the parameter; axes of its own mesh come first.
        tolerance: allowed difference of the ratio from a length, relative to the length.
    """
    is_expert = plan.buffers[planned.buffer].is_expert
    place = MeshPlace(plan.views, plan.rank)
    lengths: dict[str, int] = {}
    for mesh in (place.mesh(is_expert), place.mesh(False), *(mesh for _, mesh in plan.views.others)):
        for axis in mesh.axis_names:
            if mesh.axis_length(axis) > 1:
                lengths.setdefault(axis, mesh.axis_length(axis))
    # A missing division and a division too many have inverse ratios and the same axis.
    factor = max(ratio, 1 / ratio)
    for count in range(1, len(lengths) + 1):
        found = tuple(
            " x ".join(chosen)
            for chosen in combinations(lengths, count)
            if abs(factor / prod(lengths[axis] for axis in chosen) - 1) <= tolerance
        )
        if found:
            return found
    return ()


def _difference(
    gradient: torch.Tensor,
    wanted: torch.Tensor,
    tolerance: float,
    largest: float,
    planned: PlannedParameter,
    plan: GradientPlan,
) -> GradientFinding | None:
    if not gradient.numel():
        return None
    kind = torch.complex128 if gradient.is_complex() else torch.float64
    found, wanted = gradient.to(kind), wanted.to(gradient.device, kind)
    off = (found - wanted).abs()
    bound = tolerance * float(wanted.abs().max()) + tolerance * 1e-2 * largest
    difference = float(off.max())
    if not difference > bound:  # also for a NaN, which is another finding
        return None
    # The least-squares factor: a gradient that equals it times the reference is only scaled.
    norm = float(torch.linalg.vector_norm(wanted))
    ratio = float((found.conj() * wanted).sum().real) / norm**2 if norm else 0.0
    is_multiple = ratio > 0 and float((found - ratio * wanted).abs().max()) <= ratio * bound
    if is_multiple:
        return GradientFinding(
            "scale", planned.name, (plan.rank,), _scale_message(ratio, plan, planned), difference, ratio
        )
    at = int(off.argmax())
    if not bool(found.any()):
        message = "it is zero, and that of one process is not"
    else:
        relative = difference / max(float(wanted.abs().max()), 1e-300)
        message = (
            f"it differs from that of one process by up to {relative:.3g} of the "
            f"largest element, most at element {at} of those that are compared{_hint_at_later(planned)}"
        )
    return GradientFinding("reference", planned.name, (plan.rank,), message, difference)


def _scale_message(ratio: float, plan: GradientPlan, planned: PlannedParameter) -> str:
    axes = find_factors(ratio, plan, planned)
    times = f"{ratio:.4g} times" if ratio > 1 else f"1/{1 / ratio:.4g} of"
    start = f"it is {times} that of one process"
    if not axes:
        return f"{start}, which is not a length of an axis: see numbers of micro-batches and of tokens"
    alternatives = " or ".join(axes)
    if ratio > 1:
        return f"{start}, as many as ranks along {alternatives}: a division by it is missing, or a sum was made twice"
    return f"{start}, as many as ranks along {alternatives}: it was divided once too often, or not summed"


def _hint_at_later(planned: PlannedParameter) -> str:
    if not planned.later:
        return ""
    axes = dict.fromkeys(axis for later in planned.later for axis in later.axes)
    verbs = join_words(f"{later.operation} along {join_words(later.axes)}" for later in planned.later)
    return f"; the plan has a later {verbs}, without which it is a part along {join_words(axes)}"


def _local_reference(reference: Any, gradient: Any, planned: PlannedParameter) -> torch.Tensor | None:
    """Return this rank's part of a reference; None if its placement is unknown."""
    if reference is None:
        return torch.zeros(planned.shape, dtype=planned.dtype)
    reference = local_of(reference)
    if hasattr(gradient, "placements") and tuple(reference.shape) == tuple(gradient.shape):
        for dim, (placement, place) in enumerate(
            zip(gradient.placements, gradient.device_mesh.get_coordinate(), strict=True)
        ):
            if type(placement).__name__ == "Shard":
                parts = reference.chunk(gradient.device_mesh.size(dim), placement.dim)
                # torch.chunk makes fewer parts if there are not enough rows.
                reference = parts[place] if place < len(parts) else reference.narrow(placement.dim, 0, 0)
            elif not placement.is_replicate():
                return None
    return reference if tuple(reference.shape) == planned.shape else None


def _tolerance(planned: PlannedParameter, *tensors: torch.Tensor) -> float:
    dtypes = {planned.dtype, *(tensor.dtype for tensor in tensors)}
    return max(_TOLERANCES.get(dtype, 1e-5) for dtype in dtypes)
