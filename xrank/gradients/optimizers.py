"""Optimizers and parts of parameters: which optimizers can step parts, and the states that their first step makes.

Gradients are in ``main_grad``, so an optimizer over a wrapped module's own parameters finds none and skips them all. So
does one over shards that are not attached. Both look like training, so their first step raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xrank.errors import UsageError
from xrank.gradients.faults import At

OWNED = "xrank_owned"
"""Attribute of a shard: the slice that it is."""
ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""The shards that give each optimizer its gradients."""

_STATES: Mapping[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.ASGD: ("step", "eta", "mu", "ax"),
    torch.optim.RMSprop: ("step", "square_avg", "momentum_buffer", "grad_avg"),
    torch.optim.Rprop: ("step", "prev", "step_size"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""The optimizers of torch that work element by element, and their states."""
_NEEDED = {"max_exp_avg_sq": "amsgrad", "momentum_buffer": "momentum", "grad_avg": "centered"}
"""The setting of a parameter group without which a state is not made."""
_SCALARS = frozenset(("step", "mu_product", "eta", "mu"))
_ELEMENTWISE = frozenset(("Lion", "FusedAdam", "FusedSGD", "DeepSpeedCPUAdam", "AdamWScheduleFree", "SGDScheduleFree"))
"""Classes of other libraries that work element by element."""
_MIXING = frozenset(("Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Lars", "Shampoo", "DistributedShampoo", "SOAP"))
"""Classes whose step of an element depends on others of its parameter: norms, factored moments, orthogonal updates."""
_UNFIT = {
    "LBFGS": "it runs the backward inside its step, and those gradients would not be exchanged",
    "SparseAdam": "it takes sparse gradients, and those in buffers are dense",
}
_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()
"""Optimizers whose first step has begun."""
_WATCH: list[Any] = []


def check_optimizer(optimizer: torch.optim.Optimizer, slices: Iterable[Any], *, is_elementwise: bool = False) -> None:
    """Check by an optimizer's class whether it can step these slices."""
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    unfit = next((kind for kind in kinds if kind in _UNFIT), None)
    if unfit is not None:
        raise UsageError(f"{unfit} cannot step shards: {_UNFIT[unfit]}", got=unfit, want="an optimizer such as AdamW")
    part = next((one for one in slices if one.is_part), None)
    mixing = next((kind for kind in kinds if kind in _MIXING), None)
    if part is None or (mixing is None and (is_elementwise or _find_listed(optimizer) is not None)):
        return
    if mixing is not None:
        why = f"{mixing} updates each element from other elements of its parameter"
        next_step = (
            "use AdamW for sharded parameters; with use_distributed_optimizer=False, parameters that tp does not "
            "split stay whole"
        )
    else:
        why = f"{kinds[0]} may not update each element independently"
        next_step = "if it does, call shards.attach(optimizer, elementwise=True); else use AdamW for sharded parameters"
    at = At(part.name, part.model.plan.rank)
    raise at.usage_error(f"{why}, and this rank holds a part", next_step, f"a slice of shape {list(part.shape)}")


def list_states(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, bool]:
    """Return the states that a step makes for a parameter of a group: key -> whether it has the parameter's shape."""
    kind = _find_listed(optimizer)
    if kind in _STATES:
        made = (key for key in _STATES[kind] if key not in _NEEDED or group.get(_NEEDED[key]))
        return {key: key not in _SCALARS for key in made}
    stepped = next((state for one in group["params"] if (state := optimizer.state.get(one))), None)
    if stepped is None and optimizer in _SEEN:
        return {}
    if stepped is None:
        name = type(optimizer).__name__
        raise UsageError(
            f"the states of {name} are unknown before its first step", got=name, next_step="export after a step"
        )
    return {key: bool(getattr(state, "ndim", 0)) for key, state in stepped.items() if state is not None}


def watch_optimizers() -> None:
    """Check every optimizer of this process at its first step, from now on."""
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_check_first_step))


def _find_listed(optimizer: torch.optim.Optimizer) -> Any:
    """Return the listed class whose step an optimizer has; None for a subclass with a step of its own."""
    own = inspect.unwrap(type(optimizer).step)
    kinds: list[Any] = [kind for kind in type(optimizer).__mro__ if kind in _STATES or kind.__name__ in _ELEMENTWISE]
    return next((kind for kind in kinds if inspect.unwrap(kind.step) is own), None)


def _check_first_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    if optimizer in _SEEN or optimizer in ATTACHED:
        _SEEN.add(optimizer)
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slices = [getattr(parameter, OWNED) for parameter in parameters if hasattr(parameter, OWNED)]
    if slices:
        check_optimizer(optimizer, slices, is_elementwise=True)
    for parameter in parameters:
        if parameter.grad is not None or not parameter.numel():
            continue
        own = getattr(parameter, OWNED, None)
        if own is not None:
            raise At(own.name, own.model.plan.rank).usage_error(
                "its shard has no gradient, so this step would not change it",
                "call shards.attach(optimizer) after it is made, or give_gradients() and take_parameters() each step",
            )
        if hasattr(parameter, "main_grad"):
            raise At().usage_error(
                f"a parameter of shape {list(parameter.shape)} has its gradient in main_grad, where the optimizer "
                f"does not find it",
                "make the optimizer over ParameterShards(ddp).parameters(), or map_groups(groups), and attach it",
            )
    _SEEN.add(optimizer)
