"""Find the cuts of a tensor in a Megatron module by its name, and check them against its attributes.

Attributes are ``tensor_model_parallel``, ``partition_dim`` and ``partition_stride``
(megatron/core/tensor_parallel/layers.py: set_tensor_model_parallel_attributes), and ``allreduce=False`` on experts'
parameters if the experts are on several ranks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from xrank.dialects.megatron.layouts import layout_of
from xrank.dialects.megatron.mesh import MegatronMesh
from xrank.errors import LayoutError
from xrank.layout import TensorLayout

if TYPE_CHECKING:
    import torch

_OWN_LAYERS = {"output_size_per_partition": 0, "num_embeddings_per_partition": 0, "input_size_per_partition": 1}
"""Attribute of Megatron's parallel layers -> the dim of their weight that they cut. The weight has its own attributes
only if the layer initialized it: `perform_initialization=False` skips both."""

_PACKED = re.compile(r".*\b(?:linear_fc1|in_proj|conv1d)(?:_\w+)?\.(?:weight|bias)\d*", re.ASCII)
"""Modules of several projections side by side. A rank holds its part of each projection, so one cut along the dim would
mix them (megatron/core/transformer/mlp.py, ssm/mamba_mixer.py, ssm/gated_delta_net.py: sharded_state_dict)."""


@dataclass(frozen=True, slots=True)
class PartitionAttributes:
    """The cut of a parameter by its attributes."""

    dim: int | None
    """The dim that is cut; None for a whole parameter."""
    stride: int = 1
    """Number of pieces of the dim, end to end, each cut by itself."""


def refusal(name: str, rank: int, problem: str, *, got: str, want: str, next_step: str) -> LayoutError:
    """Return the error that the place of a tensor is unknown or contradictory."""
    return LayoutError(f"{name}: {problem}", tensor=name, rank=rank, got=got, want=want, next_step=next_step)


def read_partition(value: torch.Tensor, owner: torch.nn.Module) -> PartitionAttributes | None:
    """Return the cut of a tensor by its attributes; None if they do not define it."""
    # Transformer Engine marks every weight as cut along dim 0 except those of row parallel layers, also weights that
    # Megatron duplicates, or cuts itself for experts (pytorch/module/linear.py: reset_parameters).
    mode = getattr(owner, "parallel_mode", "")
    if mode is None:
        return None
    dim = getattr(value, "partition_dim", -1)
    is_cut = getattr(value, "tensor_model_parallel", dim >= 0)
    if getattr(value, "tensor_model_parallel", False) and dim < 0:
        return None  # a state space mixer marks its own parameters without the dim (ssm/mamba_mixer.py)
    if is_cut and 0 <= dim < value.ndim:
        return PartitionAttributes(dim, getattr(value, "partition_stride", 1))
    if mode or hasattr(owner, "num_local_experts"):
        return None
    cuts = (dim for name, dim in _OWN_LAYERS.items() if hasattr(owner, name) and getattr(owner, "weight", 0) is value)
    return PartitionAttributes(next(cuts, None))


def resolve_layout(
    name: str,
    value: torch.Tensor,
    owner: torch.nn.Module,
    num_dims: int,
    is_expert: bool,
    mesh: MegatronMesh,
    rank: int,
    *,
    is_gated: bool,
    packed: TensorLayout | None = None,
) -> TensorLayout:
    """Return the layout of a tensor over tp, etp and ep.

    Args:
        name: the name in the whole model.
        value: the tensor, with its attributes.
        owner: the module with the tensor.
        num_dims: number of dims; one more than the tensor's own if its experts are a separate dim.
        is_expert: whether it belongs to one or several experts.
        mesh: the meshes of the rank.
        rank: this rank.
        is_gated: whether linear_fc1 is a gate and an up projection.
        packed: the layout of a tensor of several projections, from `layout_of_packed`.

    Raises:
        LayoutError: name and attributes disagree, or the cut is unknown.
    """
    _check_marks(name, value, mesh, rank, is_expert=is_expert)
    marked = read_partition(value, owner)
    layout = packed or layout_of(name, is_gated=is_gated)
    if layout is None:
        has_no_dim = getattr(value, "partition_dim", -1) < 0
        is_marked = marked is None and has_no_dim and getattr(value, "tensor_model_parallel", False)
        if is_expert or is_marked or (marked is not None and marked.dim is not None and _PACKED.fullmatch(name)):
            raise refusal(
                name,
                rank,
                "how Megatron cuts a tensor of this name is not known",
                got=f"a part of shape {list(value.shape)}"
                + (f", cut along dim {marked.dim}" if marked else ", tensor_model_parallel" if is_marked else ""),
                want="a name that xrank's table has, or a rule of layouts=",
                next_step="give layouts= with this tensor's rule, on the axes tp, etp and ep",
            )
        return _plain(num_dims, *((marked.dim, marked.stride) if marked is not None else (None, 1)))
    if len(layout.dims) != num_dims:
        raise refusal(
            name,
            rank,
            "it does not have the dims of Megatron's tensor of this name",
            got=f"shape {list(value.shape)}",
            want=str(layout),
            next_step="give layouts= with this tensor's rule",
        )
    axis = "etp" if is_expert else "tp"
    dims = [dim for dim, axes in enumerate(layout.cut_axes) if axis in axes]
    wanted = dims[0] if dims else None
    if num_dims > value.ndim:  # GroupedMLP: experts and f are the columns of one matrix, or its rows
        wanted = 1 if wanted == 2 else 0
    length = mesh.lengths[axis]
    if marked is None or length == 1:
        return layout
    stride = 2 if "<" in str(layout) else 1
    # Older versions of Megatron set stride 1 for gate and up halves, too.
    if marked.dim != wanted or (marked.dim is not None and marked.stride not in (1, stride)):
        raise refusal(
            name,
            rank,
            "its attributes contradict how Megatron cuts a tensor of this name",
            got="whole on every rank" if marked.dim is None else f"partition_dim {marked.dim}, stride {marked.stride}",
            want=f"{layout}: " + ("whole" if wanted is None else f"partition_dim {wanted}, stride {stride}"),
            next_step="set the attributes that Megatron's layers set, or give layouts= with this tensor's rule",
        )
    return layout


def _check_marks(name: str, value: torch.Tensor, mesh: MegatronMesh, rank: int, *, is_expert: bool) -> None:
    """Check `allreduce`, which is False on parameters whose gradients are one expert rank's own."""
    mark, ways = getattr(value, "allreduce", None), mesh.lengths["ep"]
    if mark is False and (not is_expert or ways == 1):
        raise refusal(
            name,
            rank,
            "its attributes place it on one of several expert ranks",
            got="allreduce=False" + ("" if is_expert else ", and a name that is not an expert's") + f", ep={ways}",
            want="an expert's name, and a mesh with the axis ep",
            next_step="give the mesh of the run, with its axis ep",
        )
    if is_expert and ways > 1 and mark is not False and value.requires_grad:
        raise refusal(
            name,
            rank,
            "its attributes do not place it on one of several expert ranks",
            got=f"allreduce={mark}, ep={ways}",
            want="allreduce=False, as Megatron marks experts over several ranks",
            next_step="give the mesh of the run; without ep, where every rank holds all experts",
        )


@lru_cache(maxsize=64)
def _plain(num_dims: int, cut: int | None, stride: int) -> TensorLayout:
    """Return the layout with one cut along one dim of `stride` pieces end to end."""
    dims = [f"d{dim}" for dim in range(num_dims)]
    if cut is not None:
        dims[cut] = f"{stride} n/tp" if stride > 1 else f"{dims[cut]}/tp"
    return TensorLayout.parse(f"[{', '.join(dims)}]")
