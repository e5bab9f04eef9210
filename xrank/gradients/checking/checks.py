"""Checks gradients from any framework: replicas must agree, and must equal the gradients of one process.

Replicas that agree may all be wrong: if half of the batch was never added up, it is missing on each of them. So give a
reference, the gradients of one process over the whole batch, wherever the model is small enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xrank.gradients.buffers.nonfinite import first_nonfinite
from xrank.gradients.checking.findings import GradientCheck, GradientFinding, encode_findings, merge_findings
from xrank.gradients.checking.reference_check import compare_with_reference
from xrank.gradients.checking.replica_check import compare_replicas
from xrank.gradients.plan_exchange import check_agreement, torch_wire
from xrank.gradients.plans.agreement import agreement_lines
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.plans.plan_entries import PlannedParameter
from xrank.gradients.wires.wire import GradientWire

__all__ = ["GradientCheck", "GradientFinding", "check_gradients"]

_PREFIX = "module."
"""Prefix that wrappers of modules put before names: torch's wrapper once, Megatron's once for each."""


@torch.no_grad()
def check_gradients(
    named_gradients: Mapping[str, Any],
    plan: GradientPlan,
    *,
    reference: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    wire: GradientWire | None = None,
) -> GradientCheck:
    """Check the gradients that all ranks have after a step's last exchange; on all ranks of the mesh.

    With the plan's distributed optimizer, only the elements that each rank owns are checked. A parameter of the plan
    that the mapping lacks is a finding. None means that no gradient came, which is right if none came on any replica.
    Frozen parameters are skipped. Nothing is changed.

    Args:
        named_gradients: by parameter name, with or without ``module.`` of wrappers before it: ``main_grad``, ``.grad``,
            or DeepSpeed's ``safe_get_full_grad``; local tensors or DTensors.
        plan: this rank's plan, from the module of these gradients: ``GradientPlan.from_module(module, mesh)``.
        reference: gradients of one process for the whole batch, by the names of this rank, each of the shape of the
            local tensor, or of the whole tensor for DTensors. Names of other ranks may be in it.
        tolerance: allowed difference from the reference, relative to the reference's largest element; by dtype when
            None: 1e-5 for float32, 2e-2 for 16 bits.
        wire: replacement of torch's process groups.

    Raises:
        GradientError: the plans of two ranks do not fit together; the same on all ranks.
        UsageError: torch.distributed is not initialised, and `wire` is None.

    Example:
        >>> from xrank.gradients import check_gradients
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp.finish_grad_sync()
        >>> check_gradients({name: ddp.main_grad(name) for name in ("weight", "bias")}, ddp.plan).is_right
        True
    """
    if wire is None:
        wire = torch_wire(plan)
    check_agreement(agreement_lines(plan), wire, plan)
    findings: list[GradientFinding] = []
    gradients = _match_gradients(named_gradients, plan, findings)
    for name, gradient in gradients.items():
        found = None if gradient is None else first_nonfinite(local_of(gradient))
        if found is not None:
            place, value = found
            message = f"it is {value} at element {list(place)}, in bucket {plan[name].bucket}"
            findings.append(GradientFinding("nonfinite", name, (plan.rank,), message))
    # Outside of the owned elements a reduce-scatter leaves partial sums.
    owned = {name: None if one is None else _take_owned(one, plan[name]) for name, one in gradients.items()}
    findings += compare_replicas(owned, plan, wire)
    if reference is not None:
        findings += compare_with_reference(gradients, _rename_to_plan(reference, plan), plan, tolerance)
    everyone = tuple(sorted(plan.views.main.ranks))
    texts = wire.exchange(encode_findings(findings), everyone)
    return GradientCheck(plan.rank, len(gradients), merge_findings(texts[rank] for rank in everyone))


def _match_gradients(
    named_gradients: Mapping[str, Any], plan: GradientPlan, findings: list[GradientFinding]
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the plan's parameters, in its order, and append a finding for each mismatch."""
    given = _rename_to_plan(named_gradients, plan)
    matched: dict[str, torch.Tensor | None] = {}
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
        matched[planned.name] = gradient
    known = {planned.name for planned in plan.parameters} | {*plan.frozen}
    findings += (
        GradientFinding("unknown", name, (plan.rank,), "it is not a parameter of the plan")
        for name in given
        if name not in known
    )
    return matched


def _rename_to_plan(named: Mapping[str, Any], plan: GradientPlan) -> dict[str, Any]:
    """Return a mapping by the plan's names; unknown names stay."""
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


def _take_owned(gradient: Any, planned: PlannedParameter) -> torch.Tensor:
    local: torch.Tensor = local_of(gradient)
    return local.reshape(-1)[slice(*planned.owned)]
