"""Tensors placed by layouts: a whole tensor becomes a DTensor, of which this rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from xrank.distribution.devices import live_mesh
from xrank.distribution.parameters import NAMES
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.terms.tensors import to_placements


def distribute_tensor(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """Return a tensor in a layout: the same object if it already has the layout.

    Every rank calls this with the whole tensor; the values are those of the mesh's first rank. Without a process group
    the layout is only checked, and the tensor is returned.

    Args:
        tensor: a whole tensor, or a DTensor, which is redistributed on the same mesh.
        layout: the layout, with a mesh.

    Raises:
        LayoutError: the layout has no mesh, or does not fit the tensor.

    Example:
        >>> import torch
        >>> from xrank.distribution import DeviceMesh, TensorLayout, distribute_tensor
        >>> layout = TensorLayout(("model", None), DeviceMesh((1,), ("model",)))
        >>> distribute_tensor(torch.ones(4, 2), layout).shape
        torch.Size([4, 2])
    """
    if not isinstance(layout, TensorLayout):
        raise LayoutError(f"{layout!r} is not a layout", got=type(layout).__name__, want="a TensorLayout")
    mesh = layout.device_mesh
    if mesh is None:
        step = "make the layout with its mesh: TensorLayout(axes, device_mesh)"
        raise LayoutError("Cannot create sharding when device mesh is not set for TensorLayout.", next_step=step)
    placements = placements_for(layout, mesh, tensor.shape)
    torch_mesh = live_mesh(mesh)
    if torch_mesh is None:
        return tensor
    if isinstance(tensor, dtensor.DTensor):
        if tensor.device_mesh == torch_mesh and tensor.placements == placements:
            return tensor
        return tensor.redistribute(torch_mesh, placements)
    return dtensor.distribute_tensor(tensor, torch_mesh, placements)


def fit_layout(layout: TensorLayout, ndim: int) -> TensorLayout:
    """Return a layout for a tensor of that many dims. Dims after the layout's last one are whole, as in Keras."""
    missing = ndim - len(layout.dims)
    if missing < 0:
        raise LayoutError(f"the layout {layout} has more dims than the tensor", got=f"a tensor of {ndim} dims")
    text = str(layout)
    if missing == 0 or not text.endswith("]"):
        return layout
    whole = ", ".join(f"whole{i}" for i in range(missing))
    return TensorLayout.parse(f"[{whole}]" if text == "[]" else f"{text[:-1]}, {whole}]", layout.device_mesh)


def placements_for(layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return torch's placements of a tensor of that shape."""
    if layout.tree.sums:
        why = f"a whole tensor has values, and the layout {layout} has partial sums on ranks"
        raise LayoutError(why, want="a layout without sums")
    placements = to_placements(fit_layout(layout, len(shape)), mesh, tuple(shape))
    for axis, placement in zip(mesh.axis_names, placements, strict=True):
        factor = getattr(placement, "split_factor", 1) * mesh.axis_length(axis)
        if hasattr(placement, "split_factor") and shape[placement.dim] % factor:
            raise LayoutError(
                f"torch neither scatters nor gathers dim {placement.dim} in the layout {layout}: it is uneven, and cut "
                f"along {axis!r} after a later axis of the mesh",
                got=f"{shape[placement.dim]} positions",
                want=f"a multiple of {factor}, or cuts in the order of the mesh {mesh.grid!r}",
            )
        if not GATHERS_PIECES and _counts_pieces(placement, placements, mesh):
            raise LayoutError(
                f"torch {torch.__version__} does not gather dim {placement.dim} in the layout {layout}: each rank "
                "holds a part of several pieces",
                got=f"{placement.split_factor} pieces",
                want="torch 2.13, or one part for each rank",
            )
    return placements


GATHERS_PIECES = "use_strided_shard_as_shard_order" in DTensorSpec.__dataclass_fields__
"""Whether torch redistributes strided shards that no order of cuts explains; 2.10 stops at an assertion."""


def _counts_pieces(placement: Any, placements: Sequence[Any], mesh: DeviceMesh) -> bool:
    """Return whether a strided shard counts pieces of its dim, and not the parts of an axis that cut it before."""
    dim = getattr(placement, "dim", None)
    cutting = [axis for axis, at in zip(mesh.axis_names, placements, strict=True) if getattr(at, "dim", None) == dim]
    return hasattr(placement, "split_factor") and sum(mesh.axis_length(axis) > 1 for axis in cutting) == 1


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """A hook that redistributes the DTensors that a module returns to a caller that gave it DTensors.

    Inside a model activations are plain tensors, for which the layout changes no value: it is only checked.
    """

    layout: TensorLayout
    mesh: DeviceMesh

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in its layout."""
        return pytree.tree_map_only(torch.Tensor, self._redistribute, output)

    def _redistribute(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            fit_layout(self.layout, tensor.ndim)
            return tensor
        return tensor.redistribute(live_mesh(self.mesh), placements_for(self.layout, self.mesh, tensor.shape))


def output_rules(layout_map: LayoutMap, roots: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """Return the output rule of each module that has one; the path of the outermost module's output is ``output``."""
    found: dict[nn.Module, str] = {}
    for root in roots:
        for name, module in root.named_modules():
            rule = layout_map.rule_for(f"{name}/output" if name else "output")
            if rule is not None:
                found[module] = rule
    return found


def convert_states(module: nn.Module, mesh: TorchMesh) -> None:
    """Convert the module's own tensors whenever its state dict is made or loaded; not those of its parts."""
    if not any(isinstance(hook, _ToDTensors) for hook in module._state_dict_hooks.values()):
        module._register_state_dict_hook(_ToDTensors(mesh))  # type: ignore[no-untyped-call]
        module._register_load_state_dict_pre_hook(_FromState(mesh), with_module=True)  # type: ignore[no-untyped-call]


class _Converter:
    def __init__(self, mesh: TorchMesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: Any) -> Any:
        return self  # a copied module has the same mesh


class _ToDTensors(_Converter):
    """The hook that makes DTensors of the module's own buffers."""

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        for name, buffer in module._buffers.items():
            value = state.get(prefix + name)
            if buffer is not None and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                whole = (Replicate(),) * self.mesh.ndim
                state[prefix + name] = DTensor.from_local(value, self.mesh, whole, run_check=False)


class _FromState(_Converter):
    """The hook that makes of loaded tensors what the module's own parameters and buffers are."""

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *arguments: Any) -> None:
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            value = state.get(prefix + name)
            if own is None or not isinstance(value, torch.Tensor) or value.shape != own.shape:
                continue  # torch's own error names the shapes
            if isinstance(own, DTensor) and not isinstance(value, DTensor):
                whole = (Replicate(),) * self.mesh.ndim
                placed = DTensor.from_local(value.detach().to(self.mesh.device_type), self.mesh, whole, run_check=False)
                state[prefix + name] = placed.redistribute(placements=own.placements)
            elif isinstance(value, DTensor) and not isinstance(own, DTensor):
                state[prefix + name] = value.full_tensor()


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
    """Return the plans of a module's parameters, in its order; nothing is changed."""
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
        step = "run the module once on an input, then lay it out"
        raise UsageError(f"{names[0]} has no shape yet", tensor=names[0], next_step=step)
    if parameter.grad is not None:
        step = "lay the module out before backward"
        raise UsageError(f"{names[0]} already has a gradient", tensor=names[0], next_step=step)
    found: dict[str, tuple[Any, ...]] = {}
    for name in names:
        layout = layout_of(name)
        if layout is not None:
            try:
                found[name] = placements_for(layout, mesh, parameter.shape)
            except LayoutError as error:
                error.about(f"{name}, of shape {tuple(parameter.shape)}", tensor=name)
                raise
    if len(set(found.values())) > 1:
        got = str({name: str(placements) for name, placements in found.items()})
        why = f"{names[0]} is one parameter with several names, which have different layouts"
        raise LayoutError(why, tensor=names[0], got=got, want="one layout for all of its names")
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
            dtensor.distribute_tensor(whole, torch_mesh, plan.placements, src_data_rank=source),
            plan.parameter.requires_grad,
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
