"""Plans for modules: the layout of each parameter, all checked before the first change; and their execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.optimizer import register_optimizer_step_pre_hook

from xrank.distribution.parameters import NAMES
from xrank.distribution.placed import placements_for
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, TensorLayout

_PLACED = "_xrank_placed"
"""Attribute of a parameter that was replaced in its module: the new parameter."""


@dataclass(frozen=True, slots=True)
class ParameterPlan:
    """One parameter with all of its names, and its future placements."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    placements: tuple[Any, ...]


def plan_parameters(
    root: nn.Module, mesh: DeviceMesh, layout_of: Callable[[str], TensorLayout | None]
) -> list[ParameterPlan]:
    """Return the plans of a module's parameters, in its order; nothing is changed.

    Args:
        root: the outermost module, whose ``named_parameters`` define the names.
        mesh: the mesh.
        layout_of: layout by name; None leaves the parameter on every rank, unless another of its names has a layout.

    Raises:
        LayoutError: a layout does not fit its parameter, names of a shared one disagree, or it has another layout.
        UsageError: a parameter has no shape yet, or has a gradient.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [_plan_parameter(tuple(known), parameter, mesh, layout_of) for parameter, known in names.items()]


def _plan_parameter(
    names: tuple[str, ...],
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    layout_of: Callable[[str], TensorLayout | None],
) -> ParameterPlan:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise UsageError(
            f"{names[0]} has no shape yet",
            tensor=names[0],
            next_step="run the module once on an input, then lay it out",
        )
    if parameter.grad is not None:
        raise UsageError(
            f"{names[0]} already has a gradient", tensor=names[0], next_step="lay the module out before backward"
        )
    found: dict[str, tuple[Any, ...]] = {}
    for name in names:
        layout = layout_of(name)
        if layout is not None:
            try:
                found[name] = placements_for(layout, mesh, parameter.shape)
            except LayoutError as error:
                raise LayoutError(
                    f"{name}, of shape {tuple(parameter.shape)}: {error.message}",
                    tensor=name,
                    got=error.got,
                    want=error.want,
                    next_step=error.next_step,
                ) from error
    if len(set(found.values())) > 1:
        raise LayoutError(
            f"{names[0]} is one parameter with several names, which have different layouts",
            tensor=names[0],
            got=str({name: str(placements) for name, placements in found.items()}),
            want="one layout for all of its names",
        )
    placements = next(iter(found.values()), (Replicate(),) * len(mesh.shape))
    if isinstance(parameter, DTensor) and (
        tuple(parameter.device_mesh.mesh_dim_names or ()) != tuple(mesh.axis_names)
        or parameter.placements != placements
    ):
        raise LayoutError(
            f"{names[0]} already has another layout",
            tensor=names[0],
            got=str(parameter.placements),
            want=str(placements),
            next_step="make the whole model in one scope, and do not use a part of it before",
        )
    return ParameterPlan(names, parameter, placements)


def lay_out_parameters(root: nn.Module, plans: Sequence[ParameterPlan], torch_mesh: TorchMesh) -> None:
    """Replace each parameter by a DTensor with the values of the mesh's first rank."""
    for plan in plans:
        if isinstance(plan.parameter, DTensor):
            continue
        # On the meta device the first rank has no values to send.
        source = None if plan.parameter.is_meta else 0
        whole = plan.parameter.detach()
        placed = nn.Parameter(
            dtensor.distribute_tensor(whole, torch_mesh, plan.placements, src_data_rank=source), plan.parameter.requires_grad
        )
        for name in plan.names:
            above, _, last = name.rpartition(".")
            setattr(root.get_submodule(above), last, placed)  # recurrent modules then renew their lists of weights
        for key, value in vars(plan.parameter).items():
            setattr(placed, key, value)
        setattr(placed, NAMES, plan.names)
        _replace_in_optimizers(plan.parameter, placed)


def replicate(tensor: torch.Tensor, torch_mesh: TorchMesh) -> None:
    """Copy the values of the mesh's first rank to every rank, in place."""
    if not tensor.is_meta and not isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor.copy_(dtensor.distribute_tensor(tensor.detach(), torch_mesh).to_local())


def _replace_in_optimizers(parameter: nn.Parameter, placed: nn.Parameter) -> None:
    """Make earlier optimizers find the new parameter at their next step, and free the values of the old one."""
    _watch_optimizers()
    setattr(parameter, _PLACED, placed)
    # An optimizer may hold the old parameter for ever, but not its memory.
    parameter.data = parameter.data.new_empty(0)


def _watch_optimizers() -> None:
    if not _WATCH:
        _WATCH.append(register_optimizer_step_pre_hook(_renew))


_WATCH: list[Any] = []


def _renew(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [getattr(parameter, _PLACED, parameter) for parameter in group["params"]]
