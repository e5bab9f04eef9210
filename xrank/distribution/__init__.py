"""Keras' distribution API on torch: the same names and rules, parameters as DTensors, devices as ranks.

Names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.distribution.calls import distribution, set_distribution
    from xrank.distribution.devices import get_device_count, initialize, list_devices
    from xrank.distribution.distributions import DataParallel, ModelParallel, distribute_tensor
    from xrank.distribution.keras_forms import DeviceMesh, LayoutMap, TensorLayout

__all__ = [
    "DataParallel",
    "DeviceMesh",
    "LayoutMap",
    "ModelParallel",
    "TensorLayout",
    "distribute_tensor",
    "distribution",
    "get_device_count",
    "initialize",
    "list_devices",
    "set_distribution",
]

_MODULES: dict[str, tuple[str, ...]] = {
    "calls": ("distribution", "set_distribution"),
    "devices": ("get_device_count", "initialize", "list_devices"),
    "distributions": ("DataParallel", "ModelParallel", "distribute_tensor"),
    "keras_forms": ("DeviceMesh", "LayoutMap", "TensorLayout"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
