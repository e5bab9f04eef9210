"""Tensors placed by layouts: a whole tensor becomes a DTensor, of which this rank holds a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import tensor as dtensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from xrank.dialects.placements import to_placements
from xrank.distribution.devices import live_mesh
from xrank.errors import LayoutError
from xrank.layout import DeviceMesh, TensorLayout


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
        raise LayoutError(
            "Cannot create sharding when device mesh is not set for TensorLayout.",
            got=repr(layout),
            next_step="make the layout with its mesh: TensorLayout(axes, device_mesh)",
        )
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
    """Return a layout for a tensor of that many dims. Dims after the layout's last one are whole, as in Keras.

    Raises:
        LayoutError: the layout has more dims than the tensor.
    """
    missing = ndim - len(layout.dims)
    if missing < 0:
        raise LayoutError(
            f"the layout {layout} has more dims than the tensor",
            got=f"a tensor of {ndim} dims",
            want=f"{len(layout.dims)} dims",
        )
    text = str(layout)
    if missing == 0 or not text.endswith("]"):
        return layout
    whole = ", ".join(f"whole{i}" for i in range(missing))
    return TensorLayout.parse(f"[{whole}]" if text == "[]" else f"{text[:-1]}, {whole}]", layout.device_mesh)


def placements_for(layout: TensorLayout, mesh: DeviceMesh, shape: Sequence[int]) -> tuple[Any, ...]:
    """Return torch's placements of a tensor of that shape.

    Raises:
        LayoutError: the layout does not fit the shape, or placements cannot express it.
    """
    if layout.tree.sums:
        raise LayoutError(
            f"a whole tensor has values, and the layout {layout} has addends on ranks",
            got=" ".join(f"sum({axis})" for axis in layout.tree.sums),
            want="a layout without sums",
        )
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
