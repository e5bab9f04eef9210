"""Live modules that Megatron-core cuts: a rank's tensors under the whole model's names, and their places.

Modules count layers within their chunk and experts within their rank. Two sources determine how a parameter is cut:
its attributes ``partition_dim`` and the like (megatron/core/tensor_parallel/layers.py), and its name in the table for
Megatron's files (`xrank.dialects.megatron.layouts`). They must agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from xrank.dialects.megatron.cuts import read_partition, refusal, resolve_layout
from xrank.dialects.megatron.layouts import (
    is_projection,
    layout_of_packed,
    projections,
    shape_of_grouped,
    stack_of,
    whole_name,
)
from xrank.dialects.megatron.mesh import MegatronMesh
from xrank.dialects.megatron.numbers import CONFIG_SIZES, configs_of, first_layer, num_experts
from xrank.errors import LayoutError
from xrank.formats.pickles import is_extra_state
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, TensorLayout
from xrank.workspace.tensor_places import LocatedTensors, locate_tensors

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One tensor of a chunk."""

    name: str
    """Name in the whole model."""
    is_expert: bool
    value: torch.Tensor
    """The module's tensor, with its attributes."""
    local: torch.Tensor
    """The same tensor; if it contains several experts, they are its first dim."""
    owner: torch.nn.Module


def is_megatron(model: object) -> bool:
    """Return whether it is a list of chunks, or a module with signs of Megatron's cuts."""
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
    """Return this rank's tensors, by names of the whole model, and their places.

    The last stage's copy of a tied embedding gets the embedding's name: a replica, as in Megatron's own checkpoints.

    Args:
        model: a module, or the virtual chunks of a stage; wrappers with it as ``module`` are removed.
        mesh: the rank's place.
        layouts: rules for tensors that are cut in another way; a rule overrides everything else.
        rank: this rank.

    Raises:
        LayoutError: a tensor's name and attributes disagree, or its cut or layer is unknown.
        UsageError: a tensor without bytes to read.
    """
    chunks = [_unwrap(chunk) for chunk in (model if isinstance(model, list | tuple) else [model])]
    # A mesh from Megatron's own process groups needs no check.
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
                    want="one tensor per name",
                    next_step="give each chunk once, with layer_number as Megatron's layers have it",
                )
    gating = _find_gating(chunks, parts, rank)
    # This checks each tensor, and applies the map's rules.
    found = locate_tensors({name: part.local for name, part in parts.items()}, layouts, rank)
    local_shapes = {name: tuple(part.local.shape) for name, part in parts.items()}
    meshes: dict[MeshRecord, int] = {mesh: number for number, mesh in enumerate(found.meshes)}
    records = {}
    for name, part in parts.items():
        given = found.records.get(name)
        if given is None:
            layout = resolve_layout(
                name,
                part.value,
                part.owner,
                part.local.ndim,
                part.is_expert,
                mesh,
                rank,
                is_gated=gating.get(stack_of(name), False),
                packed=layout_of_packed(name, local_shapes, mesh.lengths["tp"]),
            )
            # One rank's part does not show the shape of a whole that is cut.
            given = TensorRecord(str(layout), shape=None if any(layout.cut_axes) else tuple(part.local.shape))
            own = _mesh_of(layout, part, mesh)
        elif given.view is not None or given.name is not None:
            records[name] = given
            continue
        else:
            assert given.layout is not None
            layout = TensorLayout.parse(given.layout)
            recorded = None if given.mesh is None else found.meshes[given.mesh]
            own = _mesh_of(layout, part, mesh) if recorded is None else _sharing(recorded, layout, part, rank)
        records[name] = replace(given, mesh=meshes.setdefault(_record(own), len(meshes)))
    return LocatedTensors(found.local, tuple(meshes), records)


def _unwrap(chunk: Any) -> Any:
    """Return the module inside wrappers without parameters, such as DistributedDataParallel and Float16Module."""
    children = getattr(chunk, "_modules", {})
    while list(children) == ["module"] and not chunk._parameters:
        chunk = children["module"]
        children = chunk._modules
    return chunk


def _check_sizes(chunks: Sequence[torch.nn.Module], mesh: MegatronMesh, rank: int) -> None:
    """Check the caller's mesh against the modules' config."""
    for config in configs_of(chunks):
        for axis, length in mesh.lengths.items():
            size = getattr(config, CONFIG_SIZES[axis], None)
            # Without experts, nothing is cut over etp.
            is_used = axis != "etp" or getattr(config, "num_moe_experts", None)
            if type(size) is int and size != length and is_used:
                raise LayoutError(
                    f"mesh= is not that of the module's config: {CONFIG_SIZES[axis]} differs",
                    rank=rank,
                    got=f"{axis}={length}",
                    want=f"{axis}={size}",
                    next_step="give the mesh of the run, or none if Megatron's process groups are initialised",
                )


def _parts_of(chunk: torch.nn.Module, mesh: MegatronMesh, *, is_only: bool, rank: int) -> Iterator[_Part]:
    """Yield the tensors of one chunk by their names in the whole model."""
    values = {name: value for name, value in chunk.state_dict(keep_vars=True).items() if not is_extra_state(name)}
    num_own = num_experts(chunk, values, mesh, rank)
    first = first_layer(chunk, values, rank, is_whole=is_only and mesh.num_stages == 1)
    for local_name, value in values.items():
        owner = chunk.get_submodule(local_name.rpartition(".")[0])
        name, is_expert = whole_name(local_name, first, num_own * mesh.expert_rank)
        # The head of the last stage is a copy of the first stage's embedding: under its name it becomes a replica.
        if name.endswith(_HEAD) and getattr(value, "shared_embedding", False):
            name = name.removesuffix(_HEAD) + _EMBEDDING
        distributed = sys.modules.get("torch.distributed.tensor")
        if distributed is not None and isinstance(value, distributed.DTensor):
            raise refusal(
                name,
                rank,
                "it is a DTensor in a module that Megatron cuts",
                got="a DTensor",
                want="plain tensors",
                next_step="give a state dict of DTensors whose placements describe every cut",
            )
        local = _split_experts(name, value, owner, rank)
        yield _Part(name, is_expert or local is not value, value, local, owner)


def _split_experts(name: str, value: torch.Tensor, owner: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return GroupedMLP's weight with its experts as the first dim; other tensors unchanged."""
    number = getattr(owner, "num_local_experts", 0)
    try:
        shape = shape_of_grouped(name, tuple(value.shape), number if type(number) is int else 0)
    except ValueError as error:
        raise refusal(
            name,
            rank,
            "its shape does not fit the number of experts in its module",
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
            "it is not a plain matrix, so its experts cannot be separated",
            got=f"strides {value.stride()}",
            want="a contiguous parameter",
            next_step="make it contiguous",
        )
    return value.detach().view(shape)


def _find_gating(chunks: Sequence[torch.nn.Module], parts: Mapping[str, _Part], rank: int) -> dict[str, bool]:
    """Return stack of layers -> whether linear_fc1 is gate and up; config, attributes and shapes must agree."""
    interleaved = next((n for c in configs_of(chunks) if (n := getattr(c, "moe_mlp_glu_interleave_size", None))), None)
    if interleaved:
        raise LayoutError(
            "the experts have alternating gate and up rows, which are not supported here",
            rank=rank,
            got=f"moe_mlp_glu_interleave_size {interleaved}",
            want="halves",
            next_step="export from a checkpoint of --ckpt-format torch_dist, which records it",
        )
    stacks: dict[str, dict[str, _Part]] = {}
    for name, part in parts.items():
        stacks.setdefault(stack_of(name), {})[name] = part
    own = {config.gated_linear_unit for config in configs_of(chunks) if hasattr(config, "gated_linear_unit")}
    # A chunk's config is that of its language model.
    return {stack: _is_gated(of_stack, set() if "vision" in stack else own, rank) for stack, of_stack in stacks.items()}


def _is_gated(parts: Mapping[str, _Part], answers: set[bool], rank: int) -> bool:
    """Return whether linear_fc1 is gate and up in a stack of layers, for which a config may have answers."""
    # Each source gives an answer, and all must be the same: halves that are taken for one matrix would be cut wrongly.
    answers = set(answers)
    weights = {name: part for name, part in parts.items() if is_projection(name)}
    strides = {cut.stride for part in weights.values() if (cut := read_partition(part.value, part.owner)) is not None}
    if 2 in strides:
        answers.add(True)
    for name, rows, columns in projections({name: tuple(part.local.shape) for name, part in parts.items()}):
        if rows not in (columns, 2 * columns):
            raise refusal(
                name,
                rank,
                "its shape is not that of projections to linear_fc2",
                got=f"{rows} rows, for {columns} columns of linear_fc2",
                want=f"{columns}, or {2 * columns} of gate and up",
                next_step="check that linear_fc1 and linear_fc2 are cut over the same ranks",
            )
        answers.add(rows == 2 * columns)
        if len(answers) > 1:
            raise refusal(
                name,
                rank,
                "config, partition_stride and shapes disagree whether it is gate and up halves",
                got=f"{rows} rows, for {columns} columns of linear_fc2; partition_stride {sorted(strides)}",
                want="one kind in all layers, as in config.gated_linear_unit",
                next_step="check config.gated_linear_unit and the modules' sizes",
            )
    if weights and not answers:
        raise refusal(
            next(iter(weights)),
            rank,
            "it is unknown whether it is gate and up halves",
            got="no linear_fc2 beside it",
            want="config.gated_linear_unit, or linear_fc2",
            next_step="export the chunks as Megatron makes them",
        )
    return True in answers


def _mesh_of(layout: TensorLayout, part: _Part, mesh: MegatronMesh) -> DeviceMesh:
    used = {axis for axes in layout.cut_axes for axis in axes}
    if "ep" in used:
        return mesh.experts
    return mesh.expert if part.is_expert or "etp" in used else mesh.dense


def _sharing(record: MeshRecord, layout: TensorLayout, part: _Part, rank: int) -> DeviceMesh:
    """Return the ranks of a rule's mesh that share a tensor: those of one stage and one expert."""
    names, shape, ranks = record
    mesh = DeviceMesh(shape, names, ranks)
    used = {axis for axes in layout.cut_axes for axis in axes}
    apart = {axis for axis in ("pp", "ep") if axis in names and axis not in used and (axis == "pp" or part.is_expert)}
    if len(apart) == len(names):
        return DeviceMesh((1,), ("tp",), (rank,))
    at = mesh.coordinate(rank)
    return mesh.submesh(**{axis: at[axis] for axis in apart})


def _record(mesh: DeviceMesh) -> MeshRecord:
    return mesh.axis_names, mesh.shape, mesh.ranks
