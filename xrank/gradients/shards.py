"""Optimizers that cannot step parts of parameters: known by their class, or found by a trial step on eight numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xrank.errors import GradientError, UsageError
from xrank.gradients.distributed_data_parallel import DistributedDataParallel
from xrank.gradients.optimizer_twins import make_twin
from xrank.gradients.plan import PlannedParameter
from xrank.gradients.roles import local_of

_MIXING = frozenset({"Adafactor", "Muon", "LAMB", "Lamb", "LARS", "Lars", "Shampoo", "DistributedShampoo", "SOAP"})
"""Classes whose step of an element depends on others of its parameter: norms, factored moments, orthogonal updates."""
_UNFIT = {
    "LBFGS": "it runs the backward inside its step, and those gradients would not be exchanged",
    "SparseAdam": "it takes sparse gradients, and those in buffers are dense",
}
_TOLERANCE = 1e-9
"""Relative, in float64: a step that works by element differs by rounding at most."""


class PartOfParameter(Protocol):
    """The part of an `OwnedSlice` that a check reads."""

    @property
    def name(self) -> str:
        """Name of the parameter."""

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements of the parameter."""

    @property
    def is_cut(self) -> bool:
        """Whether the part is flat."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""

    @property
    def model(self) -> Any:
        """The wrapped model, whose plan has a rank."""


def check_class(optimizer: torch.optim.Optimizer, slices: Iterable[PartOfParameter]) -> None:
    """Check by the optimizer's class whether it can step these slices; in its constructor, too.

    Raises:
        UsageError: it mixes elements of a parameter, of which this rank holds a part; or it needs a closure or sparse
            gradients.
    """
    kinds = [kind.__name__ for kind in type(optimizer).__mro__]
    for kind in kinds:
        if kind in _UNFIT:
            raise UsageError(f"{kind} cannot step shards: {_UNFIT[kind]}", got=kind, want="an optimizer such as AdamW")
    mixing = next((kind for kind in kinds if kind in _MIXING), None)
    if mixing is not None:
        _refuse(mixing, slices)


def check_optimizer(optimizer: torch.optim.Optimizer, slices: Sequence[PartOfParameter]) -> None:
    """Check whether an optimizer can step these slices: by its class, then by a trial for those of other libraries.

    An optimizer whose step cannot be tried, since its constructor sets more than torch's, passes the trial.

    Raises:
        UsageError: as in `check_class`.
    """
    check_class(optimizer, slices)
    kind = type(optimizer).__name__
    for is_flat in (False, True):
        parts = [one for one in slices if one.is_part and one.is_cut == is_flat]
        if parts and _mixes_elements(optimizer, is_flat=is_flat):
            _refuse(kind, parts)


def _refuse(kind: str, slices: Iterable[PartOfParameter]) -> None:
    part = next((one for one in slices if one.is_part), None)
    if part is not None:
        raise UsageError(
            f"{part.name}: {kind} steps an element by the others of its parameter, and this rank holds a part",
            tensor=part.name,
            rank=part.model.plan.rank,
            got=f"{kind}, and a slice of shape {list(part.shape)}",
            want="an optimizer that works element by element, or whole parameters",
            next_step="use AdamW for cut parameters; use_distributed_optimizer=False leaves those whole that tp "
            "does not cut",
        )


def _mixes_elements(optimizer: torch.optim.Optimizer, *, is_flat: bool) -> bool:
    """Return whether steps of two halves of a matrix differ from steps of the whole, with the optimizer's settings."""
    drawn = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = _try_steps(optimizer, *drawn)
    again = _try_steps(optimizer, *drawn)
    if whole is None or again is None or not torch.equal(whole, again):
        return False  # it cannot be tried, or it is random
    halves = [drawn[:, :2], drawn[:, 2:]]
    stepped = [_try_steps(optimizer, *(half.flatten(1) if is_flat else half)) for half in halves]
    if any(half is None for half in stepped):
        return True  # it steps matrices only
    found = torch.cat([half.flatten() for half in stepped if half is not None])
    return not torch.allclose(found, whole.flatten(), rtol=_TOLERANCE, atol=_TOLERANCE)


def _try_steps(optimizer: torch.optim.Optimizer, values: torch.Tensor, *gradients: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter after a step with each gradient; None if the optimizer raises."""
    parameter = torch.nn.Parameter(values.clone())
    # A warm-up may begin with a rate of 0, and a step that changes nothing shows nothing.
    twin = make_twin(optimizer, [{**optimizer.param_groups[0], "lr": 0.1, "params": [parameter]}])
    with torch.random.fork_rng(devices=[]):
        for gradient in gradients:
            parameter.grad = gradient.clone()
            try:
                twin.step()
            except Exception:  # of an optimizer's own code
                return None
    return parameter.detach()


OWNED = "xrank_owned"
"""Attribute of a shard: the slice that it is."""
ATTACHED: WeakKeyDictionary[torch.optim.Optimizer, Any] = WeakKeyDictionary()
"""The shards that give each optimizer its gradients."""

_SEEN: WeakSet[torch.optim.Optimizer] = WeakSet()
_WATCH: list[Any] = []


def watch_optimizers() -> None:
    """Check every optimizer of this process when it is made, and at its first step, from now on."""
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_check_step))
        _watch_constructors()


def _watch_constructors() -> None:
    """Check the class of each optimizer that gets shards, before its constructor looks at their shapes.

    Muon's raises an error of its own about a flat tensor without a name. torch has no hook there; every constructor
    calls `add_param_group`.
    """
    add_param_group = torch.optim.Optimizer.add_param_group

    @wraps(add_param_group)
    def add_checked(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params")
        entries = given if isinstance(given, list | tuple) else [given]
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        slices = [getattr(tensor, OWNED) for tensor in tensors if hasattr(tensor, OWNED)]
        if slices:
            check_class(self, slices)
        add_param_group(self, param_group)

    torch.optim.Optimizer.add_param_group = add_checked  # type: ignore[method-assign]


def _check_step(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
    if optimizer in _SEEN or optimizer in ATTACHED:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None or not parameter.numel():
                continue
            own = getattr(parameter, OWNED, None)
            if own is not None:
                raise UsageError(
                    f"{own.name}: its shard has no gradient, so this step would not change it",
                    tensor=own.name,
                    rank=own.model.plan.rank,
                    got="an optimizer that ParameterShards.attach did not get",
                    want="gradients from main_grad before each step",
                    next_step="call shards.attach(optimizer) after it is made, or give_gradients() before each step "
                    "and take_parameters() after it",
                )
            if hasattr(parameter, "main_grad"):
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} has its gradient in main_grad and none in .grad, so "
                    "this step would not change it",
                    got="an optimizer over the parameters of a wrapped module",
                    want="an optimizer over ParameterShards",
                    next_step="make it over ParameterShards(ddp).parameters(), or over map_groups(groups) of them, and "
                    "attach it",
                )
    _SEEN.add(optimizer)


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
        """Return this part of the gradient; a view.

        Raises:
            GradientError: the step's gradients were not finalized yet, or their memory is released.
        """
        if not self.model.sync.is_finished or self.model.later_is_due:
            raise GradientError(
                f"{self.name}: its gradient was not exchanged yet",
                tensor=self.name,
                rank=self.model.plan.rank,
                got="no finalize_model_grads since zero_grad_buffer",
                want="the sum over all replicas",
                next_step="call finalize_model_grads on all ranks first",
            )
        return self.take_from(self.model.main_grad(self.planned.name))


def list_owned_slices(
    models: DistributedDataParallel | Sequence[DistributedDataParallel],
) -> Mapping[str, OwnedSlice]:
    """Return this rank's part of every parameter that has a gradient, in the order of the plans; parts may be empty.

    Args:
        models: one model, or several; then each name starts with the model's number, as in a ``ModuleList``.
    """
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
        self._shards = {name: _shard(one) for name, one in self.slices.items()}
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
        made = (
            [dict(group) for group in listed]
            if all(isinstance(group, dict) for group in listed)
            else [{"params": listed}]
        )
        for group in made:
            given = group["params"]
            mapped = []
            for entry in [given] if isinstance(given, torch.Tensor) else given:
                name, parameter = entry if isinstance(entry, tuple) else (None, entry)
                shard = found.get(id(parameter))
                if shard is None:
                    raise UsageError(
                        f"{name or 'a parameter'} of a group is not one that these models train",
                        tensor=name,
                        got=f"a tensor of shape {list(parameter.shape)}",
                        want="parameters of the wrapped modules that need a gradient",
                        next_step="leave frozen parameters out of the groups, and wrap the module that the groups name",
                    )
                mapped.append(shard if name is None else (name, shard))
            group["params"] = mapped
        return made

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Make an optimizer call `give_gradients` before each of its steps, and `take_parameters` after it.

        Raises:
            UsageError: the optimizer steps other parameters; or it mixes elements of a parameter, of which this rank
                holds a part; or it needs a closure or sparse gradients.
        """
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        check_optimizer(optimizer, [one for name, one in self.slices.items() if id(self._shards[name]) in stepped])
        own = {id(shard) for shard in self._shards.values()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in own for parameter in group["params"]):
                raise UsageError(
                    "the optimizer steps parameters that are not shards of these models",
                    got=type(optimizer).__name__,
                    want="shards.parameters() or shards.named_parameters()",
                    next_step="construct the optimizer over the shards",
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
                raise _make_moved_error(self.slices[name])
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
            raise UsageError(
                "a closure runs a backward inside the optimizer's step, and its gradients would not be exchanged",
                got="step(closure)",
                want="step()",
                next_step="run the backward and finalize_model_grads before the step",
            )
        self.give_gradients()

    def _run_after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        self.take_parameters()


def find_shards(optimizer: torch.optim.Optimizer) -> ParameterShards | None:
    """Return the shards that are attached to an optimizer; None without any."""
    found: ParameterShards | None = ATTACHED.get(optimizer)
    return found


def find_slice(parameter: torch.Tensor) -> OwnedSlice | None:
    """Return the slice of a shard; None for another tensor."""
    found: OwnedSlice | None = getattr(parameter, OWNED, None)
    return found


def _make_moved_error(one: OwnedSlice) -> GradientError:
    return GradientError(
        f"{one.name}: it no longer shares the memory of its shard, which the optimizer steps",
        tensor=one.name,
        rank=one.model.plan.rank,
        got="a parameter whose data was replaced",
        want="data that is changed in place",
        next_step="construct ParameterShards and the optimizer again; copy into parameters, do not replace",
    )


def _shard(one: OwnedSlice) -> torch.nn.Parameter:
    # Without a conversion `to` returns the parameter's own memory.
    shard = torch.nn.Parameter(one.values().to(one.planned.grad_dtype))
    setattr(shard, OWNED, one)
    return shard
