"""The two distributions: DataParallel, with the whole model on each rank, and ModelParallel, by a LayoutMap."""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from xrank.distribution import keras_forms
from xrank.distribution.calls import CallHooks, scope_of
from xrank.distribution.devices import list_devices, live_mesh, shard_dataset
from xrank.distribution.parameters import NAMES, average_gradients
from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.terms.tensors import describe_mesh, from_placements, to_placements


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
                f"torch neither scatters nor gathers dim {placement.dim} in the layout {layout}: it is split unevenly, "
                f"and along {axis!r} after a later axis of the mesh",
                got=f"{shape[placement.dim]} positions",
                want=f"a multiple of {factor}, or cuts in the order of the mesh {mesh.grid!r}",
            )
        if GATHERS_PIECES or not hasattr(placement, "split_factor"):
            continue
        # A strided shard counts pieces of its dim if no other axis cuts the dim before; else parts of that axis.
        alike = [
            axis
            for axis, at in zip(mesh.axis_names, placements, strict=True)
            if getattr(at, "dim", None) == placement.dim
        ]
        if sum(mesh.axis_length(axis) > 1 for axis in alike) == 1:
            raise LayoutError(
                f"torch {torch.__version__} does not gather dim {placement.dim} in the layout {layout}: each rank "
                "holds a part of several pieces",
                got=f"{placement.split_factor} pieces",
                want="torch 2.13, or one part for each rank",
            )
    return placements


GATHERS_PIECES = "use_strided_shard_as_shard_order" in DTensorSpec.__dataclass_fields__
"""Whether torch redistributes strided shards that no order of cuts explains; 2.10 stops at an assertion."""


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """A hook that redistributes the DTensors that a module returns to a caller that gave it DTensors."""

    layout: TensorLayout
    mesh: DeviceMesh

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in its layout."""
        return pytree.tree_map_only(torch.Tensor, self._redistribute, output)

    def _redistribute(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):  # inside a model, where the layout changes no value
            fit_layout(self.layout, tensor.ndim)
            return tensor
        return tensor.redistribute(live_mesh(self.mesh), placements_for(self.layout, self.mesh, tensor.shape))


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

    def whole(self, tensor: torch.Tensor) -> DTensor:
        """Return a tensor that every rank holds as a DTensor."""
        return DTensor.from_local(tensor, self.mesh, (Replicate(),) * self.mesh.ndim, run_check=False)


class _ToDTensors(_Converter):
    """The hook that makes DTensors of the module's own buffers."""

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, metadata: Any) -> None:
        for name, buffer in module._buffers.items():
            value = state.get(prefix + name)
            if buffer is not None and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                state[prefix + name] = self.whole(value)


class _FromState(_Converter):
    """The hook that makes of loaded tensors what the module's own parameters and buffers are."""

    def __call__(self, module: nn.Module, state: MutableMapping[str, Any], prefix: str, *arguments: Any) -> None:
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            value = state.get(prefix + name)
            if own is None or not isinstance(value, torch.Tensor) or value.shape != own.shape:
                continue  # torch's own error names the shapes
            if isinstance(own, DTensor) and not isinstance(value, DTensor):
                placed = self.whole(value.detach().to(self.mesh.device_type))
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
    names: tuple[str, ...], parameter: nn.Parameter, mesh: DeviceMesh, layout_of: Callable[[str], TensorLayout | None]
) -> ParameterPlan:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        step = "run the module once on an input, then distribute it"
        raise UsageError(f"{names[0]} has no shape yet", tensor=names[0], next_step=step)
    if parameter.grad is not None:
        step = "distribute the module before backward"
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
            f"{names[0]} already has a different layout",
            tensor=names[0],
            got=str(parameter.placements),
            want=str(placements),
            next_step="create the whole model in one scope, and do not use any part of it before",
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
        # Earlier optimizers find the new parameter at their next step. They may hold the old one, but not its memory.
        if not _WATCH:
            _WATCH.append(register_optimizer_step_pre_hook(_renew))
        setattr(plan.parameter, _PLACED, placed)
        plan.parameter.data = plan.parameter.data.new_empty(0)


def replicate(tensor: torch.Tensor, torch_mesh: TorchMesh) -> None:
    """Copy the values of the mesh's first rank to every rank, in place."""
    if not tensor.is_meta and not isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor.copy_(dtensor.distribute_tensor(tensor.detach(), torch_mesh).to_local())


_WATCH: list[Any] = []


def _renew(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        group["params"] = [getattr(parameter, _PLACED, parameter) for parameter in group["params"]]


Module = TypeVar("Module", bound=nn.Module)


class Distribution:
    """The common part of both distributions.

    Without a process group, a mesh only describes: layouts are checked, and modules and tensors stay whole.
    """

    def __init__(
        self, device_mesh: DeviceMesh, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ) -> None:
        self.device_mesh = device_mesh
        self.batch_dim_name = batch_dim_name or device_mesh.axis_names[0]
        self.auto_shard_dataset = auto_shard_dataset

    def __repr__(self) -> str:
        return f"<{type(self).__name__} device_mesh={self.device_mesh}>"

    @property
    def num_processes(self) -> int:
        """Number of ranks of the process group; 1 without one."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def num_model_replicas(self) -> int:
        """Number of parts of a batch."""
        return self.device_mesh.axis_length(self.batch_dim_name)

    @property
    def num_data_shards(self) -> int:
        """Number of different parts of the data over all processes."""
        return min(self.num_model_replicas, self.num_processes)

    @property
    def data_shard_id(self) -> int:
        """Index of this process's part of the data: its place along the batch axis."""
        if self.num_processes == 1:
            return 0
        return self.device_mesh.coordinate(dist.get_rank())[self.batch_dim_name]

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        """Return the layout of data of that global shape: the batch axis cuts dim 0."""
        axes: list[str | None] = [None] * len(data_shape)
        axes[0] = self.batch_dim_name
        return keras_forms.TensorLayout(axes, self.device_mesh)

    def get_variable_layout(self, variable: torch.Tensor | str, shape: Sequence[int] | None = None) -> TensorLayout:
        """Return the layout of a parameter: of a DTensor its own, else by name and global shape.

        Args:
            variable: a DTensor, or the name of a parameter in ``named_parameters`` of the whole module.
            shape: global shape of a named parameter.
        """
        if isinstance(variable, DTensor):
            mesh = describe_mesh(variable.device_mesh)
            return keras_forms.in_keras_form(from_placements(mesh, variable.placements, variable.ndim))
        if not isinstance(variable, str) or shape is None:
            got = f"{type(variable).__name__}, shape {shape}"
            want = 'such as ("layers.0.weight", (8, 4)), or a DTensor'
            raise LayoutError("a parameter's layout needs its name and its shape", got=got, want=want)
        layout = self.get_tensor_layout(variable)
        if layout is None:
            return keras_forms.TensorLayout((None,) * len(shape), self.device_mesh)
        return keras_forms.in_keras_form(fit_layout(layout, len(shape)))

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Return the layout of a tensor by its path; None if no rule matches."""
        raise NotImplementedError

    def scope(self) -> AbstractContextManager[None]:
        """Make this distribution current; modules made inside are laid out at the end, or on their first use."""
        return scope_of(self)

    def distribute_dataset(self, dataset: Any) -> Any:
        """Return this process's part of a dataset or DataLoader; in a single process, the dataset itself.

        Raises:
            UsageError: as in `shard_dataset`.
        """
        if self.num_processes == 1 or not self.auto_shard_dataset:
            return dataset
        live_mesh(self.device_mesh)
        return shard_dataset(dataset, self.num_model_replicas, self.data_shard_id)

    def distribute_module(self, module: Module) -> Module:
        """Lay out an existing module in place, and return it."""
        self.check_used(self.lay_out([module]))
        return module

    def lay_out(self, roots: list[nn.Module]) -> set[str]:
        """Lay out whole modules, and return the rules that were used."""
        raise NotImplementedError

    def check_used(self, rules: set[str]) -> None:
        """Check that all rules were used."""

    def _surround(self, root: nn.Module, parameters: list[nn.Parameter], torch_mesh: TorchMesh) -> None:
        """Replicate buffers, average gradients along the batch axis, and surround all calls."""
        axis = self.device_mesh.axis_names.index(self.batch_dim_name)
        for buffer in root.buffers():
            replicate(buffer, torch_mesh)
        average_gradients(parameters, torch_mesh, axis)
        hooks = CallHooks(torch_mesh, self.batch_dim_name)
        for module in root.modules():
            hooks.register(module)


class DataParallel(Distribution):
    """Every rank holds the whole model and gets its own part of the data; gradients are averaged over the ranks.

    Args:
        device_mesh: a mesh with one axis; with several axes, the first one is used, with a warning.
        devices: a list of devices, for a mesh with the axis "batch"; if both are None, all of `list_devices`.
        auto_shard_dataset: whether `distribute_dataset` shards datasets.

    Example:
        >>> from xrank.distribution import DataParallel
        >>> DataParallel(devices=["cpu:0"]).num_model_replicas
        1
    """

    def __init__(
        self,
        device_mesh: DeviceMesh | None = None,
        devices: Sequence[Any] | None = None,
        auto_shard_dataset: bool = True,
    ) -> None:
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            raise LayoutError(
                "Expect `mesh` to be an instance of `DeviceMesh`. "
                f"Received: mesh={device_mesh} (of type {type(device_mesh)})"
            )
        if device_mesh is None:
            found = list_devices() if devices is None or len(devices) == 0 else devices
            device_mesh = keras_forms.DeviceMesh(tuple(getattr(found, "shape", (len(found),))), ["batch"], found)
        if len(device_mesh.shape) > 1:
            warnings.warn(
                f"Expect the input mesh to be 1D, but received mesh.devices.ndim={len(device_mesh.shape)}. "
                "The first axis will be used for data-parallel sharding.",
                stacklevel=2,
            )
        super().__init__(device_mesh, device_mesh.axis_names[0], auto_shard_dataset)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Return None: tensors have no layouts, every rank holds them."""
        return None

    def lay_out(self, roots: list[nn.Module]) -> set[str]:
        """Copy the first rank's values to every rank, and average gradients along the batch axis."""
        torch_mesh = live_mesh(self.device_mesh)
        if torch_mesh is not None:
            for root in roots:
                plans = plan_parameters(root, self.device_mesh, self.get_tensor_layout)
                for plan in plans:
                    replicate(plan.parameter, torch_mesh)
                self._surround(root, [plan.parameter for plan in plans], torch_mesh)
        return set()


class ModelParallel(Distribution):
    """Shards parameters by a LayoutMap; parameters without a rule are replicated.

    A rule for ``<name of a module>/output`` gives the layout of the module's output, including the batch axis.

    Args:
        layout_map: patterns of parameters' names to layouts, with a mesh.
        batch_dim_name: axis along which ranks get different parts of the batch; the mesh's first when None.
        auto_shard_dataset: whether `distribute_dataset` shards datasets.
        strict: whether an unused rule is an error.
        device_mesh: the map's own mesh, which older versions of Keras also required here.
        ignored: other keywords, which Keras accepts silently; they cause a warning.

    Example:
        >>> from xrank.distribution import DeviceMesh, LayoutMap, ModelParallel
        >>> layouts = LayoutMap(DeviceMesh((1, 1), ("batch", "model")))
        >>> layouts["weight"] = "[f/model, h]"
        >>> ModelParallel(layout_map=layouts).get_tensor_layout("weight").dims is not None
        True
    """

    def __init__(
        self,
        *,
        layout_map: LayoutMap | None = None,
        batch_dim_name: str | None = None,
        auto_shard_dataset: bool = True,
        strict: bool = True,
        device_mesh: DeviceMesh | None = None,
        **ignored: Any,
    ) -> None:
        if layout_map is None:
            raise LayoutError("You must specify a layout_map argument.", want="layout_map=LayoutMap(device_mesh)")
        if not isinstance(layout_map, LayoutMap):
            raise LayoutError(
                f"Argument `layout_map` must be a `LayoutMap` instance. Received: layout_map={layout_map}"
            )
        mesh = layout_map.device_mesh
        if mesh is None:
            raise LayoutError("the layout_map has no mesh", next_step="make it with its mesh: LayoutMap(device_mesh)")
        if device_mesh is not None and device_mesh != mesh:
            want = f"{mesh!r}, or None to use the map's mesh"
            raise LayoutError("device_mesh is not the mesh of the layout_map", got=repr(device_mesh), want=want)
        if ignored:
            warnings.warn(f"ModelParallel ignores unknown arguments: {', '.join(ignored)}", stacklevel=2)
        super().__init__(mesh, batch_dim_name, auto_shard_dataset)
        self.layout_map = layout_map
        self.strict = strict

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        """Return the layout that the map has for a path."""
        return self.layout_map[path]

    def lay_out(self, roots: list[nn.Module]) -> set[str]:
        """Replace parameters by DTensors; all checks come before the first change."""
        mesh = self.device_mesh
        mesh.axis_length(self.batch_dim_name)
        torch_mesh = live_mesh(mesh)
        # Plans check all parameters of all modules before the first one is replaced.
        plans = [plan_parameters(root, mesh, self.get_tensor_layout) for root in roots]
        rules = {self.layout_map.rule_for(name) for planned in plans for plan in planned for name in plan.names}
        outputs: dict[nn.Module, str] = {}
        for root in roots:
            for name, module in root.named_modules():
                # The path of the outermost module's output is "output".
                rule = self.layout_map.rule_for(f"{name}/output" if name else "output")
                if rule is not None:
                    outputs[module] = rule
        if torch_mesh is not None:
            for root, planned in zip(roots, plans, strict=True):
                lay_out_parameters(root, planned, torch_mesh)
                self._surround(root, list(root.parameters()), torch_mesh)
                for module in root.modules():
                    layout = self.layout_map[outputs[module]] if module in outputs else None
                    hook = None if layout is None else OutputLayout(layout, mesh)
                    if hook is not None and hook not in module._forward_hooks.values():
                        module.register_forward_hook(hook)
                    convert_states(module, torch_mesh)
        return {rule for rule in (*rules, *outputs.values()) if rule is not None}

    def check_used(self, rules: set[str]) -> None:
        """Check that all rules were used."""
        unused = [rule for rule in self.layout_map if rule not in rules]
        if unused and self.strict:
            raise LayoutError(
                f"the rule {unused[0]!r} of the LayoutMap matches no parameter and no output",
                got=f"{len(unused)} such rules: {unused[:8]}",
                want="patterns for whole names, as in named_parameters() of the outermost module, or NAME/output",
                next_step="print the names; or pass strict=False to ModelParallel",
            )
