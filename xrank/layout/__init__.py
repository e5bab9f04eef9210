"""Which rank holds what: nests, meshes, the notation, layout maps. No torch, no I/O beyond layout files."""

from xrank.layout.layout_map import LayoutMap
from xrank.layout.mesh import DeviceMesh
from xrank.layout.mesh_index import MeshIndex
from xrank.layout.mesh_views import MeshViews
from xrank.layout.tensor_layout import TensorLayout

__all__ = ["DeviceMesh", "LayoutMap", "MeshIndex", "MeshViews", "TensorLayout"]
