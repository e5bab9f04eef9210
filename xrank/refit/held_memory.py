"""The memory of a model's tensors. Both sides keep addresses, so they must notice when a tensor gets another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from xrank.readers.live.module_tensors import FilledModule, list_tensors

if TYPE_CHECKING:
    import torch

MemoryPlaces: TypeAlias = dict[str, tuple[object, ...]]
"""Name -> dtype, shape, strides and address of the local tensor."""


def list_places(model: FilledModule) -> MemoryPlaces:
    """Return the places of a model's tensors on this rank."""
    places: MemoryPlaces = {}
    for number, (name, tensor) in enumerate(list_tensors(model)):
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no memory of its own
        key = name if name not in places else f"{name} ({number})"  # Megatron's chunks may repeat names
        places[key] = (str(local.dtype), tuple(local.shape), tuple(local.stride()), _address(local))
    return places


def find_moved(old: MemoryPlaces, new: MemoryPlaces) -> tuple[str, str, str] | None:
    """Return the first tensor in another place, with its old and its new one as text; None if all are the same."""
    if old == new:
        return None
    name = next(name for name in (*old, *new) if old.get(name) != new.get(name))
    return name, _describe(old.get(name)), _describe(new.get(name))


def count_versions(views: Sequence[torch.Tensor]) -> list[int]:
    """Return torch's counts of changes in place, 0 for inference tensors, which have none."""
    return [0 if view.is_inference() else view._version for view in views]


def _describe(place: tuple[object, ...] | None) -> str:
    if place is None:
        return "no tensor"
    dtype, shape, strides, address = place
    return f"{dtype}, shape {shape}, strides {strides}, at address {address}"


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is _strided() and tensor.device.type != "meta" else 0


def _strided() -> torch.layout:
    import torch

    return torch.strided
