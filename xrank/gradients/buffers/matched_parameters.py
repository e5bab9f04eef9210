"""Whether a module's parameters are those of a plan: when it is wrapped, and at the end of each step."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch

from xrank.errors import UsageError
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.plans.plan import GradientPlan
from xrank.gradients.plans.plan_maker import named_parameters
from xrank.gradients.wires.faults import Fault

__all__ = ["matched_parameters", "strangers"]


def matched_parameters(
    module: torch.nn.Module | Sequence[torch.nn.Module], plan: GradientPlan
) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters by their names in the plan, in its order.

    Raises:
        UsageError: they are not those of the plan, or one has a gradient already.
    """
    for part in [module] if isinstance(module, torch.nn.Module) else module:
        _refuse_other_wrappers(part, plan.rank)
    found = dict(named_parameters(module))
    matched = {}
    for planned in plan.parameters:
        parameter = found.get(planned.name)
        local = None if parameter is None else local_of(parameter)
        got = "none" if local is None else f"{tuple(local.shape)} in {local.dtype}"
        if parameter is None or local is None or (tuple(local.shape), local.dtype) != (planned.shape, planned.dtype):
            raise _differs(planned.name, plan.rank, got, f"{planned.shape} in {planned.dtype}")
        if not parameter.requires_grad:
            raise _differs(planned.name, plan.rank, "it is frozen", "a parameter that needs a gradient")
        if hasattr(parameter, "main_grad"):
            raise UsageError(
                f"{planned.name} has a main_grad already: one hook would take the gradient from the other",
                tensor=planned.name,
                rank=plan.rank,
                got="a module that is wrapped",
                want="one that is not",
                next_step="call unwrap() of the DistributedDataParallel that it has",
            )
        if parameter.grad is not None:
            raise UsageError(
                f"{planned.name} has a gradient already, which would be added to the next",
                tensor=planned.name,
                rank=plan.rank,
                next_step="set .grad to None before the module is wrapped",
            )
        matched[planned.name] = parameter
    for name, parameter in found.items():
        if parameter.requires_grad and name not in plan:
            raise _differs(name, plan.rank, "it needs a gradient", "a parameter that the plan knows")
    return matched


def strangers(module: torch.nn.Module, plan: GradientPlan, known: Container[int]) -> list[Fault]:
    """Return a fault for each parameter that needs a gradient and is not in the plan.

    Args:
        module: as it is now; modules may change.
        plan: of this rank.
        known: ids of the parameters that the plan is of.
    """
    return [
        Fault(
            f"{name}: it needs a gradient on rank {plan.rank}, and has no place in the plan",
            plan.rank,
            name,
            got="a parameter that was frozen, or not there, when the plan was made",
            want="one of the plan's parameters",
            next_step="call unwrap(), then make the plan and the DistributedDataParallel again",
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]


def _refuse_other_wrappers(module: torch.nn.Module, rank: int) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{name or 'the module'} is wrapped by torch's DistributedDataParallel: both would send gradients",
                tensor=name or None,
                rank=rank,
                got=type(part).__name__,
                want="a module that no other wrapper exchanges gradients of",
                next_step="make plan and wrapper of its .module",
            )


def _differs(name: str, rank: int, got: str, want: str) -> UsageError:
    return UsageError(
        f"{name} is not as the plan says",
        tensor=name,
        rank=rank,
        got=got,
        want=want,
        next_step="make the plan from the module that is wrapped, as it is now",
    )
