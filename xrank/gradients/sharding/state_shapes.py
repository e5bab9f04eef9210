"""Shapes of the states that an optimizer will have after its first step, from a step on tensors without memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from xrank.gradients.plans.placed_parameters import local_of

__all__ = ["find_state_shapes"]


def find_state_shapes(optimizer: torch.optim.Optimizer) -> Mapping[int, Mapping[str, torch.Tensor]]:
    """Return the states of parameters that were not stepped yet, by the parameter's id and the state's key.

    The tensors show shapes only. Nothing of the optimizer is changed. An optimizer that cannot step tensors of the meta
    device has none.
    """
    twins: dict[int, torch.nn.Parameter] = {}
    groups = []
    for group in optimizer.param_groups:
        fresh = [parameter for parameter in group["params"] if not optimizer.state.get(parameter)]
        for parameter in fresh:
            twin = torch.nn.Parameter(torch.empty_like(local_of(parameter), device="meta"))
            twin.grad = torch.empty_like(twin)
            twins[id(parameter)] = twin
        # The plain loop is the one kernel that every device has.
        plain = dict.fromkeys({"foreach", "fused", "capturable"} & group.keys(), False)
        groups.append({**group, **plain, "lr": 0.0, "params": [twins[id(parameter)] for parameter in fresh]})
    if not twins:
        return {}
    twin_optimizer = object.__new__(type(optimizer))
    try:
        # As unpickling makes an optimizer: without a constructor, whose arguments are unknown.
        twin_optimizer.__setstate__(
            {"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups}
        )
        twin_optimizer.step()
    except Exception:  # of an optimizer's own code, which may read values
        return {}
    return {
        number: {key: state for key, state in twin_optimizer.state[twin].items() if isinstance(state, torch.Tensor)}
        for number, twin in twins.items()
    }
