"""Keras' distribution API on torch: the same names and rules, parameters as DTensors, devices as ranks.

Names are loaded on first use, so that importing this package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xrank.deferred import defer_imports

if TYPE_CHECKING:
    from xrank.distribution.devices import get_device_count, initialize, list_devices
    from xrank.distribution.distributions import DataParallel, ModelParallel
    from xrank.distribution.keras_forms import DeviceMesh, LayoutMap, TensorLayout
    from xrank.distribution.placing import distribute_tensor
    from xrank.distribution.scopes import distribution, set_distribution

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

_HOMES = {
    "DataParallel": "distributions",
    "DeviceMesh": "keras_forms",
    "LayoutMap": "keras_forms",
    "ModelParallel": "distributions",
    "TensorLayout": "keras_forms",
    "distribute_tensor": "placing",
    "distribution": "scopes",
    "get_device_count": "devices",
    "initialize": "devices",
    "list_devices": "devices",
    "set_distribution": "scopes",
}

__getattr__, __dir__ = defer_imports(__name__, _HOMES)
