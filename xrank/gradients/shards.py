"""The tensors that this rank's optimizer steps: the owned slices of all parameters, as plain Parameters.

One step, on all ranks alike::

    shards = ParameterShards(ddp)
    optimizer = torch.optim.AdamW(shards.named_parameters(), lr=1e-3)
    shards.attach(optimizer)
    ...
    finalize_model_grads([ddp])
    optimizer.step()  # before it the shards get their gradients, after it all ranks get the parameters
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.faults import At
from xrank.gradients.optimizers import ATTACHED, OWNED, check_optimizer
from xrank.gradients.plan import PlannedParameter
from xrank.gradients.roles import local_of


@dataclass(frozen=True, slots=True, eq=False)
class OwnedSlice:
    """This rank's part of one parameter: the elements that are right after the exchange and that it steps."""

    name: str
    """Name in the plan; with several models, the model's number before it."""
    model: DistributedDataParallel
    planned: PlannedParameter

    @property
    def is_cut(self) -> bool:
        """Whether replicas own other elements. Then all tensors here are flat; else they have the local shape."""
        model = self.model
        return model.config.use_distributed_optimizer and len(model.plan.buffers[self.planned.buffer].shard_ranks) > 1

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements of the parameter: replicas, or ranks along tp or another axis."""
        parameter = self.model.planned_parameters[self.planned.name]
        placements = zip(getattr(parameter, "placements", ()), self.planned.placement_axes, strict=True)
        is_placed = any(axes and not placement.is_replicate() for placement, axes in placements)
        return self.is_cut or bool(self.planned.is_cut_over_tp) or is_placed

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        start, stop = self.planned.owned
        return (stop - start,) if self.is_cut else self.planned.shape

    def take_from(self, local: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the local shape; a view."""
        return local.view(-1)[slice(*self.planned.owned)] if self.is_cut else local

    def values(self) -> torch.Tensor:
        """Return this part of the parameter; a view."""
        return self.take_from(local_of(self.model.planned_parameters[self.planned.name]).detach())

    def gradient(self) -> torch.Tensor:
        """Return this part of the gradient; a view."""
        if not self.model.sync.is_finished or self.model.later_is_due:
            raise At(self.name, self.model.plan.rank).error(
                "its gradient was not exchanged yet since zero_grad_buffer",
                "call finalize_model_grads on all ranks first",
            )
        return self.take_from(self.model.main_grad(self.planned.name))


def list_owned_slices(
    models: DistributedDataParallel | Sequence[DistributedDataParallel],
) -> Mapping[str, OwnedSlice]:
    """Return this rank's part of every parameter that has a gradient, in the order of the plans; parts may be empty."""
    several = [models] if isinstance(models, DistributedDataParallel) else list(models)
    found = {}
    for number, model in enumerate(several):
        for planned in model.plan.parameters:
            name = planned.name if len(several) == 1 else f"{number}.{planned.name}"
            found[name] = OwnedSlice(name, model, planned)
    return found


class ParameterShards:
    """Owned slices as Parameters, for any optimizer of torch.optim.

    Shards share the module's memory if gradients and parameters have one dtype. If gradients are wider, a shard is a
    copy in the gradients' dtype: the optimizer steps the copy, and the parameter gets its rounded values. The norm of
    one rank's shards is not the norm of the model: see `grad_norm` and `clip_grad_norm`.

    Args:
        models: one model, or several.

    Example:
        >>> from xrank.gradients import ParameterShards
        >>> shards = ParameterShards(ddp)  # ddp: a module on one rank, as in DistributedDataParallel
        >>> [name for name, _ in shards.named_parameters()]
        ['weight', 'bias']
    """

    def __init__(self, models: DistributedDataParallel | Sequence[DistributedDataParallel]) -> None:
        self.slices = list_owned_slices(models)
        """Slices by name, in the order of the shards."""
        self.models = tuple(dict.fromkeys(one.model for one in self.slices.values()))
        """The models, each once."""
        # Without a conversion `to` returns the parameter's own memory.
        self._shards = {
            name: torch.nn.Parameter(one.values().to(one.planned.grad_dtype)) for name, one in self.slices.items()
        }
        for name, shard in self._shards.items():
            setattr(shard, OWNED, self.slices[name])
        for model in self.models:
            model.value_listeners.append(self.refresh)

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the shards with the names of their parameters.

        Empty shards are included, so that all ranks have states of the same names.
        """
        yield from self._shards.items()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Return the shards."""
        yield from self._shards.values()

    def map_groups(self, groups: Iterable[Any]) -> list[dict[str, Any]]:
        """Return an optimizer's parameter groups with the shards in the place of the models' parameters.

        Shards of the distributed optimizer are flat. So write groups by the parameters' own names and shapes, such as
        weight decay for those of two dims or more, and map them here.

        Args:
            groups: parameters, or dicts with ``params``, as an optimizer takes them.

        Raises:
            UsageError: a parameter does not belong to the models, or needs no gradient.

        Example:
            >>> from xrank.gradients import ParameterShards
            >>> decayed = [p for p in ddp.module.parameters() if p.ndim > 1]  # ddp: a module on one rank
            >>> groups = ParameterShards(ddp).map_groups([{"params": decayed, "weight_decay": 0.1}])
            >>> [len(group["params"]) for group in groups]
            [1]
        """
        found = {
            id(one.model.planned_parameters[one.planned.name]): self._shards[name] for name, one in self.slices.items()
        }
        listed = list(groups)
        are_groups = all(isinstance(group, dict) for group in listed)
        made: list[dict[str, Any]] = [dict(group) for group in listed] if are_groups else [{"params": listed}]
        for group in made:
            given = group["params"]
            mapped = []
            for entry in [given] if isinstance(given, torch.Tensor) else given:
                name, parameter = entry if isinstance(entry, tuple) else (None, entry)
                shard = found.get(id(parameter))
                if shard is None:
                    raise At(name).usage_error(
                        f"a parameter of shape {list(parameter.shape)} in a group is not one that these models train",
                        "leave frozen parameters out of the groups, and wrap the module that the groups name",
                    )
                mapped.append(shard if name is None else (name, shard))
            group["params"] = mapped
        return made

    def attach(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> None:
        """Make an optimizer call `give_gradients` before each of its steps, and `take_parameters` after it.

        Args:
            optimizer: an optimizer over these shards.
            elementwise: accept an optimizer that is not known to step each element of a parameter by itself.

        Raises:
            UsageError: the optimizer steps other parameters; or it mixes elements of a parameter, of which this rank
                holds a part, or is not known; or it needs a closure or sparse gradients.
        """
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        slices = [one for name, one in self.slices.items() if id(self._shards[name]) in stepped]
        check_optimizer(optimizer, slices, is_elementwise=elementwise)
        own = {id(shard) for shard in self._shards.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"]):
                raise At().usage_error(
                    f"the {type(optimizer).__name__} steps parameters that are not shards of these models",
                    "construct the optimizer over shards.parameters() or shards.named_parameters()",
                )
        ATTACHED[optimizer] = self
        optimizer.register_step_pre_hook(self._run_before_step)
        optimizer.register_step_post_hook(self._run_after_step)

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Give each shard its ``.grad``, a view of ``main_grad``, for readers before the step such as clipping.

        Raises:
            GradientError: this step's gradients were not exchanged, or their memory is released; or a parameter has
                left its buffer, so that its steps would be lost.
        """
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            # A replaced .data leaves the shard with the old memory, and the step would change nothing.
            if values.dtype == shard.dtype and values.numel() and values.data_ptr() != shard.data_ptr():
                raise At(name, self.slices[name].model.plan.rank).error(
                    "its data was replaced, and no longer shares the memory of its shard, which the optimizer steps",
                    "construct ParameterShards and the optimizer again; copy into parameters, do not replace",
                )
            shard.grad = self.slices[name].gradient()

    @torch.no_grad()
    def take_parameters(self) -> None:
        """Copy the stepped values into the modules, and gather the parameters; on all ranks."""
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            # Shards of the module's dtype share its memory, so that only wider copies are written back.
            if values.dtype != shard.dtype:
                values.copy_(shard)
        for model in self.models:
            model.start_param_sync()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the modules' values into shards that are copies.

        `DistributedDataParallel.load_state_dict` and `broadcast_params` call this. Call it yourself after loading a
        checkpoint into a bare module.
        """
        for name, shard in self._shards.items():
            values = self.slices[name].values()
            if values.dtype != shard.dtype:
                shard.copy_(values)

    def _run_before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        if any(one is not None for one in (*arguments[1:], options.get("closure"))):
            raise At().usage_error(
                "a closure runs a backward inside the optimizer's step, and its gradients would not be exchanged",
                "run the backward and finalize_model_grads before step() without a closure",
            )
        self.give_gradients()

    def _run_after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self.take_parameters()
