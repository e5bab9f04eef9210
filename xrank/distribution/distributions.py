"""The two distributions: DataParallel, with the whole model on each rank, and ModelParallel, by a LayoutMap."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor

from xrank.distribution import keras_forms
from xrank.distribution.calls import CallHooks
from xrank.distribution.datasets import shard_dataset
from xrank.distribution.devices import list_devices, live_mesh
from xrank.distribution.parameters import average_gradients
from xrank.distribution.placing import (
    OutputLayout,
    convert_states,
    fit_layout,
    lay_out_parameters,
    output_rules,
    plan_parameters,
    replicate,
)
from xrank.distribution.scopes import scope_of
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.terms.tensors import describe_mesh, from_placements

Module = TypeVar("Module", bound=nn.Module)


class Distribution:
    """The common part of both distributions.

    Without a process group, a mesh only describes: layouts are checked, and modules and tensors stay whole.

    Args:
        device_mesh: the mesh.
        batch_dim_name: axis along which ranks get different parts of the batch; the mesh's first when None.
        auto_shard_dataset: whether `distribute_dataset` cuts datasets.
    """

    def __init__(
        self, device_mesh: DeviceMesh, batch_dim_name: str | None = None, auto_shard_dataset: bool = True
    ) -> None:
        self._device_mesh = device_mesh
        self._batch_dim_name = batch_dim_name or device_mesh.axis_names[0]
        self.auto_shard_dataset = auto_shard_dataset

    def __repr__(self) -> str:
        return f"<{type(self).__name__} device_mesh={self.device_mesh}>"

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh."""
        return self._device_mesh

    @property
    def batch_dim_name(self) -> str:
        """Axis along which ranks get different parts of the batch."""
        return self._batch_dim_name

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
            UsageError: as in `xrank.distribution.datasets.shard_dataset`.
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
        auto_shard_dataset: whether `distribute_dataset` cuts datasets.

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
    """Parameters are laid out by a LayoutMap; parameters without a rule are on every rank.

    A rule for ``<name of a module>/output`` lays out the module's output, including the batch axis.

    Args:
        layout_map: patterns of parameters' names to layouts, with a mesh.
        batch_dim_name: axis along which ranks get different parts of the batch; the mesh's first when None.
        auto_shard_dataset: whether `distribute_dataset` cuts datasets.
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
        outputs = output_rules(self.layout_map, roots)
        if torch_mesh is not None:
            for root, planned in zip(roots, plans, strict=True):
                lay_out_parameters(root, planned, torch_mesh)
                self._surround(root, list(root.parameters()), torch_mesh)
                for module in root.modules():
                    self._lay_out_output(module, outputs.get(module))
                    convert_states(module, torch_mesh)
        return {rule for rule in (*rules, *outputs.values()) if rule is not None}

    def _lay_out_output(self, module: nn.Module, rule: str | None) -> None:
        layout = None if rule is None else self.layout_map[rule]
        if layout is not None:
            hook = OutputLayout(layout, self.device_mesh)
            if hook not in module._forward_hooks.values():
                module.register_forward_hook(hook)

    def check_used(self, rules: set[str]) -> None:
        """Check that all rules were used."""
        unused = [rule for rule in self.layout_map if rule not in rules]
        if unused and self.strict:
            raise LayoutError(
                f"the rule {unused[0]!r} of the LayoutMap is used for no parameter and no output",
                got=f"{len(unused)} such rules: {unused[:8]}",
                want="patterns for whole names, as in named_parameters() of the outermost module, or NAME/output",
                next_step="print the names; or pass strict=False to ModelParallel",
            )
