"""Checks gradients, whoever made them: that replicas agree, and that they are those of one process.

Replicas that agree may all be wrong: a half of the batch that was never added up is missing on each of them. So give a
reference, the gradients of one process over the whole batch, wherever the model is small enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xrank.gradients.buffers.nonfinite import first_nonfinite
from xrank.gradients.checking.findings import GradientCheck, GradientFinding, encoded, merged
from xrank.gradients.checking.reference_check import compare_with_reference
from xrank.gradients.checking.replica_check import compare_replicas
from xrank.gradients.plan_exchange import check_agreement, torch_wire
from xrank.gradients.plans.agreement import agreement_lines
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan, PlannedParameter
from xrank.gradients.wires.wire import Wire

__all__ = ["GradientCheck", "GradientFinding", "check_gradients"]

_PREFIX = "module."
"""Wrappers of modules put it before names: torch's, and Megatron's once for each."""


@torch.no_grad()
def check_gradients(
    named_gradients: Mapping[str, Any],
    plan: GradientPlan,
    *,
    reference: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    wire: Wire | None = None,
) -> GradientCheck:
    """Check the gradients that all ranks have after a step's last exchange; on all ranks of the mesh.

    Looked at are, with the plan's distributed optimizer, the elements that each rank owns; all others without. Of a
    parameter that is in the plan and not in the mapping, something is missing; None is a gradient that never came, and
    right where it came on no replica. Frozen parameters are passed over. Nothing is changed.

    Args:
        named_gradients: by parameter name, with or without ``module.`` of wrappers before it: ``main_grad``, ``.grad``,
            or DeepSpeed's ``safe_get_full_grad``; local tensors or DTensors.
        plan: of this rank, from the module whose gradients these are: ``GradientPlan.from_module(module, mesh)``.
        reference: what one process has for the whole batch, by the names of this rank, each of the shape of the local
            tensor, or of the whole one for DTensors. Others' names may be in it.
        tolerance: by how much a gradient may differ from the reference, relative to its largest element; what the
            dtypes allow when None: 1e-5 for float32, 2e-2 for 16 bits.
        wire: what stands in for torch's process groups.

    Raises:
        GradientError: the plans of two ranks do not fit together; the same on all ranks.
        UsageError: there is no process group, and no `wire`.
    """
    if wire is None:
        wire = torch_wire(plan)
    check_agreement(agreement_lines(plan), wire, plan)
    findings: list[GradientFinding] = []
    held = _held(named_gradients, plan, findings)
    for name, gradient in held.items():
        found = None if gradient is None else first_nonfinite(local_of(gradient))
        if found is not None:
            place, value = found
            message = f"it is {value} at element {list(place)}, in bucket {plan[name].bucket}"
            findings.append(GradientFinding("nonfinite", name, (plan.rank,), message))
    owned = {name: None if one is None else _owned(one, plan[name]) for name, one in held.items()}
    findings += compare_replicas(owned, plan, wire)
    if reference is not None:
        findings += compare_with_reference(held, _renamed(reference, plan), plan, tolerance)
    everyone = tuple(sorted(plan.views.main.ranks))
    texts = wire.exchange(encoded(findings), everyone)
    return GradientCheck(plan.rank, len(held), merged(texts[rank] for rank in everyone))


def _held(
    named_gradients: Mapping[str, Any], plan: GradientPlan, findings: list[GradientFinding]
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the plan's parameters, in its order, and note what does not fit."""
    given = _renamed(named_gradients, plan)
    held: dict[str, torch.Tensor | None] = {}
    for planned in plan.parameters:
        if planned.name not in given:
            message = "there is no gradient of this name, though it is in the plan"
            findings.append(GradientFinding("missing", planned.name, (plan.rank,), message))
            continue
        gradient = given[planned.name]
        local = None if gradient is None else local_of(gradient)
        if local is not None and tuple(local.shape) != planned.shape:
            message = f"its gradient is of shape {list(local.shape)}, and the parameter of {list(planned.shape)}"
            findings.append(GradientFinding("shape", planned.name, (plan.rank,), message))
            continue
        held[planned.name] = gradient
    known = {planned.name for planned in plan.parameters} | {*plan.frozen}
    findings += (
        GradientFinding("unknown", name, (plan.rank,), "it is no parameter of the plan")
        for name in given
        if name not in known
    )
    return held


def _renamed(named: Mapping[str, Any], plan: GradientPlan) -> dict[str, Any]:
    """Return a mapping by the plan's names; a name that it has not stays."""
    found = {}
    frozen = {*plan.frozen}
    for name, value in named.items():
        inner = name
        while inner not in plan and inner not in frozen and inner.startswith(_PREFIX):
            inner = inner[len(_PREFIX) :]
        if inner in plan:
            found[plan[inner].name] = value
        else:
            found[inner if inner in frozen else name] = value
    return found


def _owned(gradient: Any, planned: PlannedParameter) -> torch.Tensor:
    local: torch.Tensor = local_of(gradient)
    return local.reshape(-1)[slice(*planned.owned)]
