"""Compares gradients with those of one process, and names the forgotten factor of a gradient that is a multiple."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xrank.dialects.placements import describe_mesh, from_placements
from xrank.gradients.checking.factors import describe_factor, summarize_factors
from xrank.gradients.checking.findings import GradientFinding
from xrank.gradients.checking.missing_sums import Comparable
from xrank.gradients.nonfinite import first_nonfinite
from xrank.gradients.plan import GradientPlan, PlannedParameter
from xrank.gradients.roles import local_of
from xrank.layout.local_part import local_part
from xrank.words import join_words

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-1}
"""Tolerance by dtype, relative to a parameter's largest element. In 100 right runs of a small transformer, cut along
every axis, rounding errors reached 4e-6 in float32 and 6e-2 in bfloat16. A wrong factor is off by 0.25 or more."""
_SHARE_OF_ALL = 1e-2
"""Share of the tolerance that is relative to the largest element of all parameters, so that a gradient of zeros may
have rounding errors."""


def compare_with_reference(
    gradients: Mapping[str, Any], reference: Mapping[str, Any], plan: GradientPlan, tolerance: float | None
) -> tuple[list[GradientFinding], dict[str, Comparable]]:
    """Return where this rank's gradients differ from those of one process, and what was compared.

    Args:
        gradients: by name, gradients of the local shape; None if none came.
        reference: by name, gradients of the local or of the whole shape, or None.
        plan: this rank's plan.
        tolerance: as in `check_gradients`.
    """
    findings: list[GradientFinding] = []
    compared: dict[str, Comparable] = {}
    judged: list[str] = []
    known = [one for one in reference.values() if one is not None and bool(one.isfinite().all())]
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
        if bool(wanted.reshape(-1)[part].any()):
            judged.append(name)
        allowed = _tolerance(planned, wanted, local) if tolerance is None else tolerance
        # The largest element of the whole parameter: small elements of a slice have the rounding errors of the others.
        own = float(wanted.abs().max()) if wanted.numel() else 0.0
        bound = allowed * (own + _SHARE_OF_ALL * largest)
        mine, expected = _widen(local.reshape(-1)[part], wanted.reshape(-1)[part])
        if not mine.is_complex():
            compared[name] = mine, expected, bound
        found = _find_difference(mine, expected, bound, planned, plan)
        if found is not None:
            findings.append(found)
    return summarize_factors(findings, plan, judged), compared


def _widen(gradient: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kind = torch.complex128 if gradient.is_complex() else torch.float64
    return gradient.to(kind), wanted.to(gradient.device, kind)


def _find_difference(
    found: torch.Tensor,
    wanted: torch.Tensor,
    bound: float,
    planned: PlannedParameter,
    plan: GradientPlan,
) -> GradientFinding | None:
    if not found.numel():
        return None
    off = (found - wanted).abs()
    difference = float(off.max())
    if not difference > bound:  # also if it is a NaN, which another check reports
        return None
    # The least-squares factor: a gradient that equals it times the reference is only scaled.
    norm = float(torch.linalg.vector_norm(wanted))
    ratio = float((found.conj() * wanted).sum().real) / norm**2 if norm else 0.0
    is_multiple = ratio > 0 and float((found - ratio * wanted).abs().max()) <= ratio * bound
    if is_multiple:
        return GradientFinding(
            "scale", planned.name, (plan.rank,), describe_factor(ratio, plan, planned), difference, ratio
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
        return _cut(reference, gradient)
    return reference if tuple(reference.shape) == planned.shape else None


def _cut(whole: torch.Tensor, gradient: Any) -> torch.Tensor | None:
    """Return the part of a whole tensor that has the placements of a DTensor on this rank; None for addends."""
    if any(placement.is_partial() for placement in gradient.placements):
        return None
    mesh = describe_mesh(gradient.device_mesh)
    layout = from_placements(mesh, gradient.placements, whole.ndim)
    at = dict(zip(mesh.axis_names, gradient.device_mesh.get_coordinate(), strict=True))
    part = local_part(layout, mesh, at, tuple(whole.shape))
    assert part is not None  # placements have no "where"
    found, flat = whole.new_zeros(part.shape), whole.contiguous().view(-1)
    for nest in part.nests:
        counts, steps, whole_steps = zip(*nest.loops, strict=True) if nest.loops else ((), (), ())
        found.view(-1).as_strided(counts, steps, nest.x).copy_(flat.as_strided(counts, whole_steps, nest.y))
    return found


def _tolerance(planned: PlannedParameter, *tensors: torch.Tensor) -> float:
    dtypes = {planned.dtype, *(tensor.dtype for tensor in tensors)}
    return max(_TOLERANCES.get(dtype, 1e-4) for dtype in dtypes)
