"""Layouts, the parts of tensors that ranks hold: nests, meshes, the notation, layout maps.

The package does not import torch; its only I/O is that of layout files.
"""

from xrank.layout.layout_map import LayoutMap
from xrank.layout.mesh import DeviceMesh, MeshIndex, MeshViews
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["DeviceMesh", "LayoutMap", "MeshIndex", "MeshViews", "TensorLayout"]
