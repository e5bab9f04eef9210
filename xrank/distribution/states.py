"""State dicts of laid out modules: buffers are replicas by their type, and whole tensors can be loaded.

In a module a buffer is a plain tensor, equal on all ranks. In its state dict the buffer is a replicated DTensor, from
which `NFSWorkspace` and torch's distributed checkpoints know that every rank holds all of it. A state to load may have
DTensors, or whole plain tensors that are equal on all ranks, as a file of the whole model gives.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import DTensor, Replicate


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
