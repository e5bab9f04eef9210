"""Twins of optimizers: their steps show the shapes of states, or how a step works, and change nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from xrank.gradients.roles import local_of


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
        groups.append({**group, "lr": 0.0, "params": [twins[id(parameter)] for parameter in fresh]})
    if not twins:
        return {}
    try:
        twin_optimizer = make_twin(optimizer, groups)
        twin_optimizer.step()
    except Exception:  # of an optimizer's own code, which may read values
        return {}
    return {
        number: {key: state for key, state in twin_optimizer.state[twin].items() if isinstance(state, torch.Tensor)}
        for number, twin in twins.items()
    }


def make_twin(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and defaults over other groups, without states.

    It is made as unpickling makes one: without a constructor, whose arguments are unknown.
    """
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    # The plain loop is the one kernel that every device has.
    plain = [{**group, **dict.fromkeys({"foreach", "fused", "capturable"} & group.keys(), False)} for group in groups]
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": plain})
    return twin
