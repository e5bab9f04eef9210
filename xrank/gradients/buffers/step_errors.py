"""Errors of a step that begins before the gradients of the last step were final."""

from __future__ import annotations

from collections.abc import Sequence

from xrank.errors import GradientError
from xrank.gradients.plan import GradientPlan
from xrank.gradients.wire import GradientFault


def make_drop_fault(rank: int) -> GradientFault:
    """Return the fault that ranks receive when they finish a step that this rank drops."""
    return GradientFault(
        f"rank {rank} dropped this step, whose gradients other ranks exchange",
        rank,
        got="zero_grad_buffer(discard=True)",
        want="finish_grad_sync or finalize_model_grads, as on other ranks",
        next_step="drop a step on all ranks, or on none",
    )


def make_unfinalized_error(plan: GradientPlan) -> GradientError:
    """Return the error of a step without its later reductions."""
    planned = next(planned for planned in plan.parameters if planned.later)
    later = planned.later[0]
    return GradientError(
        f"{planned.name}: its gradients of this step were added up over replicas, and not along "
        f"{' and '.join(later.axes)}",
        tensor=planned.name,
        rank=plan.rank,
        got="finish_grad_sync, and no finalize_model_grads",
        want=f"also a {later.operation} over ranks {list(later.ranks)}: {later.reason}",
        next_step="call finalize_model_grads instead of it, or zero_grad_buffer(discard=True) on all ranks to drop "
        "the step",
    )


def make_unexchanged_error(plan: GradientPlan, arrivals: Sequence[int]) -> GradientError:
    """Return the error of a step whose gradients were not exchanged.

    Args:
        plan: this rank's plan.
        arrivals: number of gradients of each of its parameters.
    """
    found = zip(plan.parameters, arrivals, strict=True)
    name = next((planned.name for planned, count in found if count), plan.parameters[0].name)
    return GradientError(
        f"{name}: its gradients of this step were never exchanged",
        tensor=name,
        rank=plan.rank,
        got="backward, and no finish_grad_sync",
        want="finish_grad_sync or finalize_model_grads after the last backward of every step",
        next_step="call it, or zero_grad_buffer(discard=True) on all ranks to drop the step",
    )
