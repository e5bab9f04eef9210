"""Gradients and optimizer states by name, ready for a workspace: each rank's own slices, without padding.

The results go to ``NFSWorkspace.write_configs_and_weights(config, tensors, layouts=layouts)`` on every rank. Then
`xrank gather` merges the whole tensors, and `xrank reshard` cuts them for another number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches

import torch

from xrank.errors import UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.optimizer_twins import find_state_shapes
from xrank.gradients.roles import local_of
from xrank.gradients.sharding.shard_layouts import SliceLayouts
from xrank.gradients.sharding.shards import OwnedSlice, find_slice, list_owned_slices
from xrank.layout import LayoutMap

_Models = DistributedDataParallel | Sequence[DistributedDataParallel]
_Names = Callable[[str], str]


def export_gradients(
    models: _Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    """Return this rank's gradients under the names of their parameters, and their layouts in the whole model.

    Tensors are views of ``main_grad``: write them before the next step begins.

    Args:
        models: one model, or several; then each name starts with the model's number.
        names: maps such a name to the name in the whole model, where a stage or an expert counts its own from 0.
        layouts: cuts of parameters by name in the whole model, for parameters without placements and Megatron's
            attributes. A parameter without any source is a copy along tp.

    Raises:
        GradientError: the step's gradients were not exchanged, or their memory is released.
        LayoutError: the cut of a parameter is unknown, or no layout can express it.
        UsageError: two parameters have one name.

    Example:
        >>> from xrank.gradients import export_gradients, finalize_model_grads
        >>> ddp(torch.ones(1, 2)).sum().backward()  # ddp: a module on one rank, as in DistributedDataParallel
        >>> finalize_model_grads(ddp)
        []
        >>> gradients, layouts = export_gradients(ddp)
        >>> sorted(gradients)
        ['bias', 'weight']
    """
    places, found = SliceLayouts(layouts), {}
    for name, one in _rename_slices(list_owned_slices(models), names).items():
        found[name] = one.gradient()
        places.add(name, name, one)
    return found, places.finish()


def export_optimizer_shards(
    optimizer: torch.optim.Optimizer, models: _Models, *, names: _Names | None = None, layouts: LayoutMap | None = None
) -> tuple[dict[str, torch.Tensor], LayoutMap]:
    r"""Return the parameters and states of an optimizer on this rank, and their layouts in the whole model.

    Values have the parameters' names, so that a gather that excludes ``state\..*`` writes the model; a state is
    ``state.<parameter>.<key>``, as in torch's checkpoints. Settings of parameter groups, such as rates, are omitted.
    Before the first step there are no states; the layouts have theirs already, so that `xrank reshard` can cut the
    states of another run for this one.

    Args:
        optimizer: over `ParameterShards`, or, if nothing is sharded, over the module's parameters.
        models: the models of the shards.
        names: as in `export_gradients`.
        layouts: as in `export_gradients`.

    Raises:
        LayoutError: as in `export_gradients`.
        UsageError: the optimizer steps other tensors, or a state is neither one number nor of the slice's shape.

    Example:
        >>> from xrank.gradients import ParameterShards, export_optimizer_shards
        >>> optimizer = torch.optim.SGD(ParameterShards(ddp).parameters(), lr=0.1)  # ddp: a module on one rank
        >>> tensors, layouts = export_optimizer_shards(optimizer, ddp)
        >>> sorted(tensors)
        ['bias', 'weight']
    """
    slices = _rename_slices(list_owned_slices(models), names)
    places, found = SliceLayouts(layouts), {}
    fresh = find_state_shapes(optimizer)
    for name, one, parameter in _find_stepped(optimizer, slices):
        found[name] = _check_shape(name, local_of(parameter).detach(), one)
        places.add(name, name, one)
        stepped = optimizer.state.get(parameter)
        for key, state in (stepped or fresh.get(id(parameter), {})).items():
            if state is None:
                continue
            full, value = f"state.{name}.{key}", _tensor(state)
            # A parameter may have such a name itself.
            if full in slices:
                raise _make_clash_error(full)
            if value.ndim:
                places.add(full, name, one)
                _check_shape(full, value, one)
            else:
                places.add_scalar(full, one)
            if stepped:
                found[full] = value
    return found, places.finish()


@torch.no_grad()
def load_optimizer_shards(
    optimizer: torch.optim.Optimizer,
    models: _Models,
    tensors: Mapping[str, torch.Tensor],
    *,
    names: _Names | None = None,
) -> None:
    """Load the results of `export_optimizer_shards`, resharded for this run's ranks; then call ``take_parameters``.

    Args:
        optimizer: over `ParameterShards`; its states are replaced.
        models: the models of the shards.
        tensors: this rank's tensors, as ``read_configs_and_weights_from_rank`` returns them.
        names: as in `export_gradients`.

    Raises:
        UsageError: a parameter is missing, or a tensor has another shape; then nothing is changed.

    Example:
        >>> from xrank.gradients import ParameterShards, load_optimizer_shards
        >>> shards = ParameterShards(ddp)  # ddp: a module on one rank, as in DistributedDataParallel
        >>> optimizer = torch.optim.SGD(shards.parameters(), lr=0.1)
        >>> load_optimizer_shards(optimizer, ddp, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        >>> ddp.module.weight.tolist()
        [[1.0, 1.0]]
    """
    stepped = list(_find_stepped(optimizer, _rename_slices(list_owned_slices(models), names)))
    loaded: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
    for name, one, parameter in stepped:
        if name not in tensors:
            near = get_close_matches(name, tensors, n=1)
            raise UsageError(
                f"{name}: the states have no values of it",
                tensor=name,
                rank=one.model.plan.rank,
                got=f"{near[0]}, and others" if near else f"{len(tensors)} tensors of other names",
                want="the tensors of export_optimizer_shards, in this run's layouts",
            )
        _check_shape(name, tensors[name], one)
        prefix = f"state.{name}."
        states = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        for key, value in states.items():
            # A clone, because optimizers step their states in place, and the tensors are the caller's.
            states[key] = (_check_shape(prefix + key, value, one) if value.ndim else value).clone()
        loaded[parameter] = states
    # Every tensor was checked above: from here on, changes happen.
    for name, _, parameter in stepped:
        local_of(parameter).copy_(tensors[name])
        optimizer.state[parameter] = {
            # torch keeps counts of steps, which have no dims, on the CPU.
            key: value.to(local_of(parameter).device) if value.ndim else value
            for key, value in loaded[parameter].items()
        }


def _rename_slices(slices: Mapping[str, OwnedSlice], names: _Names | None) -> dict[str, OwnedSlice]:
    found: dict[str, OwnedSlice] = {}
    for name, one in slices.items():
        new = name if names is None else names(name)
        if new in found:
            raise _make_clash_error(new)
        found[new] = one
    return found


def _find_stepped(
    optimizer: torch.optim.Optimizer, slices: Mapping[str, OwnedSlice]
) -> list[tuple[str, OwnedSlice, torch.nn.Parameter]]:
    """Return name, slice and stepped tensor of each stepped slice, in the order of the slices."""
    by_parameter = {id(one.model.planned_parameters[one.planned.name]): name for name, one in slices.items()}
    by_place = {(id(one.model), one.planned.name): name for name, one in slices.items()}
    found: dict[str, torch.nn.Parameter] = {}
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        own = find_slice(parameter)
        name = by_parameter.get(id(parameter)) if own is None else by_place.get((id(own.model), own.planned.name))
        if name is None or (own is None and slices[name].is_cut):
            raise UsageError(
                f"{name or 'a parameter'}: the optimizer steps a tensor that is not a shard of these models",
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


def _check_shape(name: str, tensor: torch.Tensor, one: OwnedSlice) -> torch.Tensor:
    if tuple(tensor.shape) != one.shape:
        raise UsageError(
            f"{name}: its shape is not that of this rank's slice",
            tensor=name,
            rank=one.model.plan.rank,
            got=str(list(tensor.shape)),
            want=str(list(one.shape)),
            next_step="states that mix elements of a parameter cannot be cut: use an optimizer that works by element",
        )
    return tensor


def _make_clash_error(name: str) -> UsageError:
    return UsageError(
        f"{name}: two tensors have this name",
        tensor=name,
        got="one name for two",
        want="names of the whole model",
        next_step="let names= return different names",
    )
