"""Gradients and optimizer states by name, ready for a workspace: each rank's own slices, without padding.

What comes out goes to ``NFSWorkspace.write_configs_and_weights(config, tensors, layouts=layouts)`` on every rank;
`xrank gather` then puts the whole tensors together, and `xrank reshard` cuts them for another number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.plans.placed_parameters import local_of
from xrank.gradients.sharding.shard_layouts import SliceLayouts
from xrank.gradients.sharding.shards import OwnedSlice, owned_slices, slice_of
from xrank.layout import LayoutMap

__all__ = ["export_gradients", "export_optimizer_shards", "load_optimizer_shards"]

_Models = DistributedDataParallel | Sequence[DistributedDataParallel]
_Names = Callable[[str], str]


def export_gradients(
    models: _Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    """Return this rank's gradients under the names of their parameters, and how they lie in the whole model.

    Tensors are views of ``main_grad``: write them before the next step begins.

    Args:
        models: one, or several; then each name has the model's number before it.
        names: from such a name to that in the whole model, where a stage or an expert counts its own from 0.
        layouts: how parameters are cut, by name in the whole model, for those that say it neither by placements nor by
            Megatron's attributes; one of which nothing says it is a copy along tp.

    Raises:
        GradientError: the step's gradients were not exchanged, or their memory is released.
        LayoutError: it is not known how a parameter is cut, or no layout says it.
        UsageError: two parameters have one name.
    """
    places, found = SliceLayouts(layouts), {}
    for name, one in _renamed(owned_slices(models), names).items():
        found[name] = one.gradient()
        places.add(name, name, one)
    return found, _map_of(places)


def export_optimizer_shards(
    optimizer: torch.optim.Optimizer, models: _Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    r"""Return what an optimizer steps on this rank, with its states, and how all of it lies in the whole model.

    Values have the parameters' names, so that a gather with ``--exclude 'state\..*'`` writes the model; a state is
    ``state.<parameter>.<key>``, as torch's checkpoints name it. Numbers of groups, such as rates, are not among them.

    Args:
        optimizer: over `ParameterShards`, or, where nothing is sharded, over the module's parameters.
        models: those of the shards.
        names: as of `export_gradients`.
        layouts: as of `export_gradients`.

    Raises:
        LayoutError: as `export_gradients`.
        UsageError: the optimizer steps something else, or a state is neither one number nor of the slice's shape.
    """
    slices = _renamed(owned_slices(models), names)
    places, found = SliceLayouts(layouts), {}
    for name, one, parameter in _stepped(optimizer, slices):
        found[name] = _within(name, local_of(parameter).detach(), one)
        places.add(name, name, one)
        for key, state in optimizer.state[parameter].items():
            if state is None:
                continue
            full, value = f"state.{name}.{key}", _tensor(state)
            if full in slices:
                raise _twice(full)
            found[full] = _within(full, value, one) if value.ndim else value
            if value.ndim:
                places.add(full, name, one)
            else:
                places.add_scalar(full, one)
    return found, _map_of(places)


@torch.no_grad()
def load_optimizer_shards(
    optimizer: torch.optim.Optimizer,
    models: _Models,
    tensors: Mapping[str, torch.Tensor],
    *,
    names: _Names | None = None,
) -> None:
    """Take what `export_optimizer_shards` gave, resharded for this run's ranks; then call ``take_parameters``.

    Args:
        optimizer: over `ParameterShards`; its states are replaced.
        models: those of the shards.
        tensors: this rank's, as ``read_configs_and_weights_from_rank`` returns them.
        names: as of `export_gradients`.

    Raises:
        UsageError: a parameter is missing among them, or a tensor is of another shape; nothing is changed then.
    """
    stepped = list(_stepped(optimizer, _renamed(owned_slices(models), names)))
    loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for name, one, parameter in stepped:
        if name not in tensors:
            near = get_close_matches(name, tensors, n=1)
            raise UsageError(
                f"{name}: the states have no values of it",
                tensor=name,
                rank=one.model.plan.rank,
                got=f"{near[0]}, and others" if near else f"{len(tensors)} tensors of other names",
                want="what export_optimizer_shards gave, in this run's layouts",
            )
        _within(name, tensors[name], one)
        prefix = f"state.{name}."
        states = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for key, value in states.items():
            states[key] = (_within(prefix + key, value, one) if value.ndim else value).clone()
        loaded[parameter] = states
    for name, _, parameter in stepped:
        local_of(parameter).copy_(tensors[name])
        optimizer.state[parameter] = {
            key: value.to(local_of(parameter).device) if value.ndim else value
            for key, value in loaded[parameter].items()
        }


def _renamed(slices: Mapping[str, OwnedSlice], names: _Names | None) -> dict[str, OwnedSlice]:
    found: dict[str, OwnedSlice] = {}
    for name, one in slices.items():
        new = name if names is None else names(name)
        if new in found:
            raise _twice(new)
        found[new] = one
    return found


def _stepped(
    optimizer: torch.optim.Optimizer, slices: Mapping[str, OwnedSlice]
) -> list[tuple[str, OwnedSlice, torch.nn.Parameter]]:
    """Return name, slice and what is stepped of it, in the order of the slices."""
    by_parameter = {id(one.model.planned_parameters[one.planned.name]): name for name, one in slices.items()}
    by_place = {(id(one.model), one.planned.name): name for name, one in slices.items()}
    found: dict[str, torch.nn.Parameter] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        own = slice_of(parameter)
        name = by_parameter.get(id(parameter)) if own is None else by_place.get((id(own.model), own.planned.name))
        if name is None or (own is None and slices[name].is_cut):
            raise UsageError(
                f"{name or 'a parameter'}: the optimizer steps what is no shard of these models",
                tensor=name,
                got=f"a tensor of shape {list(parameter.shape)}",
                want="ParameterShards(models).parameters()",
                next_step="construct the optimizer over the shards, and give their models",
            )
        found[name] = parameter
    return [(name, one, found[name]) for name, one in slices.items() if name in found]


def _tensor(state: object) -> torch.Tensor:
    if isinstance(state, torch.Tensor):
        local: torch.Tensor = local_of(state)
        return local.detach()
    if isinstance(state, bool | int | float):
        return torch.tensor(state)
    raise UsageError(
        f"a state of the optimizer is a {type(state).__name__}", got=type(state).__name__, want="a tensor or a number"
    )


def _within(name: str, tensor: torch.Tensor, one: OwnedSlice) -> torch.Tensor:
    if tuple(tensor.shape) != one.shape:
        raise UsageError(
            f"{name}: it has not the shape of this rank's slice",
            tensor=name,
            rank=one.model.plan.rank,
            got=str(list(tensor.shape)),
            want=str(list(one.shape)),
            next_step="states that mix elements of a parameter cannot be cut: use an optimizer that works by element",
        )
    return tensor


def _twice(name: str) -> UsageError:
    return UsageError(
        f"{name}: two tensors have this name",
        tensor=name,
        got="one name for two",
        want="names of the whole model",
        next_step="let names= tell them apart",
    )


def _map_of(places: SliceLayouts) -> LayoutMap:
    return LayoutMap() if places.map is None else places.map
