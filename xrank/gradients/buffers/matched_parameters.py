"""Matches a module's parameters with a plan: when the module is wrapped, and at the end of each step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import torch

from xrank.errors import UsageError
from xrank.gradients.plan import GradientPlan
from xrank.gradients.plan_maker import iter_parameters
from xrank.gradients.roles import local_of
from xrank.gradients.wire import GradientFault


def match_parameters(
    module: torch.nn.Module | Sequence[torch.nn.Module], plan: GradientPlan
) -> dict[str, torch.nn.Parameter]:
    """Return the module's parameters by their names in the plan, in its order.

    Raises:
        UsageError: parameters and plan differ, or a parameter already has a gradient.
    """
    for part in [module] if isinstance(module, torch.nn.Module) else module:
        _refuse_other_wrappers(part, plan.rank)
    found = dict(iter_parameters(module))
    matched = {}
    for planned in plan.parameters:
        parameter = found.get(planned.name)
        local = None if parameter is None else local_of(parameter)
        got = "none" if local is None else f"{tuple(local.shape)} in {local.dtype}"
        if parameter is None or local is None or (tuple(local.shape), local.dtype) != (planned.shape, planned.dtype):
            raise _make_mismatch_error(planned.name, plan.rank, got, f"{planned.shape} in {planned.dtype}")
        if not parameter.requires_grad:
            raise _make_mismatch_error(planned.name, plan.rank, "it is frozen", "a parameter that needs a gradient")
        if hasattr(parameter, "main_grad"):
            raise UsageError(
                f"{planned.name} has a main_grad already: two hooks would take the gradient from each other",
                tensor=planned.name,
                rank=plan.rank,
                got="a wrapped module",
                want="a module that is not wrapped",
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
            raise _make_mismatch_error(name, plan.rank, "it needs a gradient", "a parameter of the plan")
    return matched


def find_unplanned(module: torch.nn.Module, plan: GradientPlan, known: Container[int]) -> list[GradientFault]:
    """Return a fault for each parameter that needs a gradient and is not in the plan.

    Args:
        module: the module at this moment; modules may change.
        plan: this rank's plan.
        known: ids of the plan's parameters.
    """
    return [
        GradientFault(
            f"{name}: it needs a gradient on rank {plan.rank}, and has no place in the plan",
            plan.rank,
            name,
            got="a parameter that was frozen or absent when the plan was made",
            want="one of the plan's parameters",
            next_step="call unwrap(), then make the plan and the DistributedDataParallel again",
        )
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in known
    ]


def find_frozen(parameters: Mapping[str, torch.nn.Parameter], rank: int) -> list[GradientFault]:
    """Return a fault for each of the plan's parameters that no longer needs a gradient: weight decay would move it."""
    return [
        GradientFault(
            f"{name}: it was frozen on rank {rank} after the plan was made, and optimizers still step it",
            rank,
            name,
            got="requires_grad=False",
            want="a parameter that needs a gradient, or that is not in the plan",
            next_step="call unwrap(), freeze it, then make plan, DistributedDataParallel and optimizer again",
        )
        for name, parameter in parameters.items()
        if not parameter.requires_grad
    ]


def _refuse_other_wrappers(module: torch.nn.Module, rank: int) -> None:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.parallel.DistributedDataParallel):
            raise UsageError(
                f"{name or 'the module'} is wrapped by torch's DistributedDataParallel: both would send gradients",
                tensor=name or None,
                rank=rank,
                got=type(part).__name__,
                want="a module whose gradients no other wrapper exchanges",
                next_step="make the plan and the wrapper from its .module",
            )


def _make_mismatch_error(name: str, rank: int, got: str, want: str) -> UsageError:
    return UsageError(
        f"{name} differs from the plan",
        tensor=name,
        rank=rank,
        got=got,
        want=want,
        next_step="make the plan from the wrapped module in its current state",
    )
