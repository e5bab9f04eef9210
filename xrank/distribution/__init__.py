"""Keras' distribution API on torch: the same names and rules, parameters as DTensors, devices as ranks."""

from xrank.distribution.devices import get_device_count, initialize, list_devices
from xrank.distribution.distributions import DataParallel, ModelParallel
from xrank.distribution.placed import distribute_tensor
from xrank.distribution.scopes import distribution, set_distribution
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout

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
