"""Live modules whose tensors are cut as Megatron-core cuts them: what a rank holds, under the whole model's names.

Modules count layers within their chunk and experts within their rank. A parameter says how it is cut by
``partition_dim`` and its like (megatron/core/tensor_parallel/layers.py), and its name says it, too: by the table that
reads Megatron's files (`xrank.dialects.megatron.layouts`). What both say must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xrank.dialects.megatron.cuts import checked_layout, partition_of, refusal
from xrank.dialects.megatron.layouts import grouped_shape, is_projection, projections, whole_name
from xrank.dialects.megatron.mesh import MegatronMesh
from xrank.dialects.megatron.numbers import CONFIG_SIZES, configs_of, first_layer, num_experts
from xrank.errors import LayoutError
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, TensorLayout
from xrank.readers.live.module_tensors import is_extra_state
from xrank.workspace.tensor_places import LocatedTensors, locate_tensors

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["is_megatron", "megatron_tensors"]

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One tensor of a chunk."""

    name: str
    """In the whole model."""
    is_expert: bool
    value: torch.Tensor
    """As the module has it, with its attributes."""
    local: torch.Tensor
    """The same, with experts as a dim of their own where the module has several in one."""
    owner: torch.nn.Module


def is_megatron(model: object) -> bool:
    """Say whether it is a list of chunks, or a module of which something says that Megatron cut it."""
    import torch

    if isinstance(model, list | tuple):
        return True
    return isinstance(model, torch.nn.Module) and (
        any(hasattr(parameter, "partition_dim") for parameter in model.parameters())
        or any(type(module).__module__.startswith("megatron.core.") for module in model.modules())
    )


def megatron_tensors(
    model: torch.nn.Module | Sequence[torch.nn.Module], mesh: MegatronMesh, *, layouts: LayoutMap | None, rank: int
) -> LocatedTensors:
    """Return what this rank holds, by names of the whole model, and where it belongs.

    The last stage's copy of a tied embedding has the embedding's name: a replica, as in Megatron's own checkpoints.

    Args:
        model: a module, or the virtual chunks of a stage; wrappers that hold it as ``module`` do no harm.
        mesh: where the rank stands.
        layouts: rules for tensors that are cut in another way; a rule goes before all else.
        rank: this rank.

    Raises:
        LayoutError: a tensor whose name and attributes disagree, or of which it is not known how it is cut, or which
            layer's it is.
        UsageError: a tensor that has no bytes to take.
    """
    chunks = [_unwrapped(chunk) for chunk in (model if isinstance(model, list | tuple) else [model])]
    if mesh.is_given:
        _check_sizes(chunks, mesh, rank)
    parts: dict[str, _Part] = {}
    for chunk in chunks:
        for part in _parts_of(chunk, mesh, is_only=len(chunks) == 1, rank=rank):
            known = parts.setdefault(part.name, part)
            if known is not part and known.value is not part.value:
                raise refusal(
                    part.name,
                    rank,
                    "this rank holds it twice",
                    got=f"{tuple(known.value.shape)} and {tuple(part.value.shape)}",
                    want="one tensor of a name",
                    next_step="give each chunk once, with layer_number as Megatron's layers have it",
                )
    is_gated = _gating(chunks, parts, rank)
    # It checks each tensor, and takes the rules of the map.
    found = locate_tensors({name: part.local for name, part in parts.items()}, layouts, rank)
    meshes: dict[MeshRecord, int] = {mesh: number for number, mesh in enumerate(found.meshes)}
    records = {}
    for name, part in parts.items():
        given = found.records.get(name)
        if given is None:
            layout = checked_layout(
                name, part.value, part.owner, part.local.ndim, part.is_expert, mesh, rank, is_gated=is_gated
            )
            given = TensorRecord(str(layout), shape=None if any(layout.axes) else tuple(part.local.shape))
            own = _mesh_of(layout, part, mesh)
        elif given.view is not None or given.name is not None:
            records[name] = given
            continue
        else:
            assert given.layout is not None
            layout = TensorLayout.parse(given.layout)
            told = None if given.mesh is None else found.meshes[given.mesh]
            own = _mesh_of(layout, part, mesh) if told is None else _sharing(told, layout, part, rank)
        records[name] = replace(given, mesh=meshes.setdefault(_record(own), len(meshes)))
    return LocatedTensors(found.local, tuple(meshes), records)


def _unwrapped(chunk: Any) -> Any:
    """Return the module inside DistributedDataParallel, Float16Module and their like, which hold nothing else."""
    children = getattr(chunk, "_modules", {})
    while list(children) == ["module"] and not chunk._parameters:
        chunk = children["module"]
        children = chunk._modules
    return chunk


def _check_sizes(chunks: Sequence[torch.nn.Module], mesh: MegatronMesh, rank: int) -> None:
    """Check the caller's mesh against what the modules' config says of the run."""
    for config in configs_of(chunks):
        for axis, length in mesh.lengths.items():
            told = getattr(config, CONFIG_SIZES[axis], None)
            # Nothing is cut over etp where there are no experts.
            has_any = axis != "etp" or getattr(config, "num_moe_experts", None)
            if type(told) is int and told != length and has_any:
                raise LayoutError(
                    f"mesh= is not that of the module's config: {CONFIG_SIZES[axis]} differs",
                    rank=rank,
                    got=f"{axis}={length}",
                    want=f"{axis}={told}",
                    next_step="give the mesh of the run, or none where Megatron's process groups are initialised",
                )


def _parts_of(chunk: torch.nn.Module, mesh: MegatronMesh, *, is_only: bool, rank: int) -> Iterator[_Part]:
    """Yield the tensors of one chunk by their names in the whole model."""
    values = {name: value for name, value in chunk.state_dict(keep_vars=True).items() if not is_extra_state(name)}
    num_own = num_experts(chunk, values, mesh, rank)
    first = first_layer(chunk, values, rank, is_whole=is_only and mesh.num_stages == 1)
    for local_name, value in values.items():
        owner = chunk.get_submodule(local_name.rpartition(".")[0])
        name, is_expert = whole_name(local_name, first, num_own * mesh.expert_rank)
        if name == _HEAD and getattr(value, "shared_embedding", False):
            name = _EMBEDDING
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(value, distributed.DTensor):
            raise refusal(
                name,
                rank,
                "it is a DTensor in a module that Megatron cuts",
                got="a DTensor",
                want="plain tensors",
                next_step="give a state dict of DTensors whose placements say every cut",
            )
        local = _by_expert(name, value, owner, rank)
        yield _Part(name, is_expert or local is not value, value, local, owner)


def _by_expert(name: str, value: torch.Tensor, owner: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return GroupedMLP's weight with its experts as the first dim; any other tensor as it is."""
    number = getattr(owner, "num_local_experts", 0)
    try:
        shape = grouped_shape(name, tuple(value.shape), number if type(number) is int else 0)
    except ValueError as error:
        raise refusal(
            name,
            rank,
            "it is not the tensor of as many experts as its module says",
            got=str(error),
            want="a matrix of num_local_experts matrices",
            next_step="set num_local_experts on the module, as Megatron's GroupedMLP does",
        ) from None
    if shape is None:
        return value
    if not value.is_contiguous():
        raise refusal(
            name,
            rank,
            "it is no plain matrix, so its experts cannot be told apart",
            got=f"strides {value.stride()}",
            want="a contiguous parameter",
            next_step="make it contiguous",
        )
    return value.detach().view(shape)


def _gating(chunks: Sequence[torch.nn.Module], parts: Mapping[str, _Part], rank: int) -> bool:
    """Return whether linear_fc1 is gate and up: by config, attributes and shapes, which must agree."""
    told = {config.gated_linear_unit for config in configs_of(chunks) if hasattr(config, "gated_linear_unit")}
    interleaved = next((n for c in configs_of(chunks) if (n := getattr(c, "moe_mlp_glu_interleave_size", None))), None)
    if interleaved:
        raise LayoutError(
            "the experts have gate and up rows in turns, which is not known here",
            rank=rank,
            got=f"moe_mlp_glu_interleave_size {interleaved}",
            want="halves",
            next_step="export from a checkpoint of --ckpt-format torch_dist, which records it",
        )
    weights = {name: part for name, part in parts.items() if is_projection(name)}
    strides = {cut.stride for part in weights.values() if (cut := partition_of(part.value, part.owner)) is not None}
    if 2 in strides:
        told.add(True)
    for name, rows, columns in projections({name: tuple(part.local.shape) for name, part in parts.items()}):
        if rows not in (columns, 2 * columns):
            raise refusal(
                name,
                rank,
                "its shape is that of no projections to linear_fc2",
                got=f"{rows} rows, for {columns} columns of linear_fc2",
                want=f"{columns}, or {2 * columns} of gate and up",
                next_step="check that linear_fc1 and linear_fc2 are cut over the same ranks",
            )
        told.add(rows == 2 * columns)
        if len(told) > 1:
            raise refusal(
                name,
                rank,
                "config, partition_stride and shapes disagree whether it is gate and up halves",
                got=f"{rows} rows, for {columns} columns of linear_fc2; partition_stride {sorted(strides)}",
                want="one kind in all layers, as config.gated_linear_unit says",
                next_step="check config.gated_linear_unit and the modules' sizes",
            )
    if weights and not told:
        raise refusal(
            next(iter(weights)),
            rank,
            "nothing says whether it is gate and up halves",
            got="no linear_fc2 beside it",
            want="config.gated_linear_unit, or linear_fc2",
            next_step="export the chunks as Megatron makes them",
        )
    return True in told


def _mesh_of(layout: TensorLayout, part: _Part, mesh: MegatronMesh) -> DeviceMesh:
    used = {axis for axes in layout.axes for axis in axes}
    if "ep" in used:
        return mesh.experts
    return mesh.expert if part.is_expert or "etp" in used else mesh.dense


def _sharing(told: MeshRecord, layout: TensorLayout, part: _Part, rank: int) -> DeviceMesh:
    """Return the ranks of a rule's mesh that share a tensor: those of one stage, and of one expert's."""
    names, shape, ranks = told
    mesh = DeviceMesh(shape, names, ranks)
    used = {axis for axes in layout.axes for axis in axes}
    apart = {axis for axis in ("pp", "ep") if axis in names and axis not in used and (axis == "pp" or part.is_expert)}
    if len(apart) == len(names):
        return DeviceMesh((1,), ("tp",), (rank,))
    at = mesh.coordinate(rank)
    return mesh.submesh(**{axis: at[axis] for axis in apart})


def _record(mesh: DeviceMesh) -> MeshRecord:
    return mesh.axis_names, mesh.shape, mesh.ranks
