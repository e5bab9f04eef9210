"""Checks gradients from any framework: replicas must agree, and must equal the gradients of one process.

Replicas that agree may all be wrong: if half of the batch was never added up, it is missing on each of them. So give a
reference, the gradients of one process over the whole batch, wherever the model is small enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from xrank.errors import UsageError
from xrank.gradients.checking.given_gradients import (
    Given,
    GivenGradients,
    find_foreign_view,
    read_gradients,
    rename_to_plan,
    take_slices,
)
from xrank.gradients.comparisons import (
    GradientCheck,
    GradientFinding,
    compare_replicas,
    compare_with_reference,
    encode_findings,
    explain_missing_sums,
    find_unowned,
    merge_findings,
)
from xrank.gradients.nonfinite import first_nonfinite
from xrank.gradients.plan import GradientPlan, PlannedParameter, agreement_lines
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientWire, check_agreement, torch_wire

__all__ = ["GradientCheck", "GradientFinding", "check_gradients"]


@torch.no_grad()
def check_gradients(
    named_gradients: Given,
    plan: GradientPlan,
    *,
    reference: Mapping[str, Any] | None = None,
    tolerance: float | None = None,
    wire: GradientWire | None = None,
) -> GradientCheck:
    """Check the gradients that all ranks have after a step's last exchange; on all ranks of the mesh.

    With a distributed optimizer, only the elements that each rank owns are checked: those of Megatron's own buckets if
    its wrapper is given, else those of the plan. A parameter of the plan that the mapping lacks is a finding. None
    means that no gradient came, which is right if none came on any replica. Frozen parameters are skipped. Nothing is
    changed.

    Args:
        named_gradients: the module that holds them in ``main_grad`` or ``.grad``: this package's wrapper, Megatron's
            ``DistributedDataParallel``, one that ``fully_shard`` changed, or any other; or its chunks. Or gradients by
            parameter name, with or without ``module.`` of wrappers before it, such as DeepSpeed's
            ``safe_get_full_grad``; local tensors or DTensors.
        plan: this rank's plan, from the module of these gradients: ``GradientPlan.from_module(module, mesh)``.
        reference: gradients of one process for the whole batch, by the names of this rank, each of the shape of the
            local tensor, or of the whole tensor for DTensors. Names of other ranks may be in it.
        tolerance: allowed difference from the reference, relative to the parameter's largest element in it; by dtype
            when None: 1e-4 for float32, 0.1 for 16 bits. Check in float32 to find small errors.
        wire: replacement of torch's process groups.

    Raises:
        GradientError: the plans of two ranks do not fit together; the same on all ranks.
        UsageError: torch.distributed is not initialised, and `wire` is None; or gradients in a dict lie in a buffer
            with slices that the plan does not know: on all ranks.

    Example:
        >>> from xrank.gradients import check_gradients
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> ddp.finish_grad_sync()
        >>> check_gradients(ddp, ddp.plan).is_right
        True
    """
    if wire is None:
        wire = torch_wire(plan)
    check_agreement(agreement_lines(plan), wire, plan)
    everyone = tuple(sorted(plan.views.main.ranks))
    given = read_gradients(named_gradients, plan)
    _check_views(given, plan, wire)
    plan = take_slices(plan, given)
    findings = find_unowned(plan, wire)
    gradients = _match_gradients(given.named, plan, findings)
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
        differences, compared = compare_with_reference(gradients, rename_to_plan(reference, plan), plan, tolerance)
        findings += explain_missing_sums(differences, compared, plan, wire)
    texts = wire.exchange(encode_findings(findings), everyone)
    return GradientCheck(plan.rank, len(gradients), merge_findings(texts[rank] for rank in everyone))


def _check_views(given: GivenGradients, plan: GradientPlan, wire: GradientWire) -> None:
    """Raise on all ranks the error of the first rank that has gradients in a buffer with unknown slices."""
    if not plan.config.use_distributed_optimizer:
        return
    error = find_foreign_view(given, plan)
    texts = wire.exchange("" if error is None else error.message, tuple(sorted(plan.views.main.ranks)))
    if error is not None:
        raise error
    for rank, text in sorted(texts.items()):
        if text:
            raise UsageError(text, rank=rank, next_step="give the wrapper itself in the place of a dict, on all ranks")


def _match_gradients(
    given: Mapping[str, Any], plan: GradientPlan, findings: list[GradientFinding]
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of the plan's parameters, in its order, and append a finding for each mismatch."""
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


def _take_owned(gradient: Any, planned: PlannedParameter) -> torch.Tensor:
    local: torch.Tensor = local_of(gradient)
    return local.reshape(-1)[slice(*planned.owned)]
