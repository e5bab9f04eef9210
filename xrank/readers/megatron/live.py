"""Live modules that Megatron-core cuts: their meshes, cuts, and the whole model's names of a rank's tensors."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from xrank.errors import LayoutError
from xrank.formats.pickles import is_extra_state
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, MeshViews, TensorLayout
from xrank.readers.live.modules import LocatedTensors, locate_tensors
from xrank.readers.megatron.layouts import (
    LAYER,
    count_experts,
    expert_in,
    in_vision_tower,
    is_projection,
    layout_of,
    layout_of_packed,
    plain_layout,
    projections,
    shape_of_grouped,
    stack_of,
    whole_name,
)
from xrank.readers.records import Subject

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


_AXES = ("tp", "pp", "cp", "dp", "ep", "etp", "edp")


class MegatronMesh(Struct, frozen=True):
    """The meshes of one rank; each has the axes that Megatron's layouts use for the tensors on it."""

    dense: DeviceMesh
    """The ranks that share the dense tensors of this rank's stage, with the axis tp."""
    expert: DeviceMesh
    """The ranks that share this rank's experts, with the axis etp."""
    experts: DeviceMesh
    """The ranks that share all experts of this rank's stage, with the axes ep and etp."""
    num_stages: int
    expert_rank: int
    """This rank's place along ep."""
    is_given: bool
    """Whether the caller gave the mesh; False if it is from Megatron's own process groups."""

    @property
    def lengths(self) -> dict[str, int]:
        """Axis -> number of ranks that share the model along it."""
        return {
            "tp": self.dense.axis_length("tp"),
            "pp": self.num_stages,
            "ep": self.experts.axis_length("ep"),
            "etp": self.experts.axis_length("etp"),
        }


def megatron_mesh(mesh: Any, rank: int, world_size: int) -> MegatronMesh | None:
    """Return the meshes of a rank; None if the arrangement of the ranks is unknown.

    `mesh` is a `DeviceMesh`, torch's, or the two factorings from `xrank.layout.mesh.megatron_views`. Without it,
    Megatron's process groups count, if the program has made them; a single process is a mesh of one rank.
    """
    if mesh is not None:
        if not isinstance(mesh, MeshViews | DeviceMesh):
            from xrank.layout.terms.tensors import describe_mesh

            mesh = describe_mesh(mesh)
        return _from_views(mesh if isinstance(mesh, MeshViews) else MeshViews(mesh), rank)
    state = sys.modules.get("megatron.core.parallel_state")
    if state is not None and state.model_parallel_is_initialized():
        return _from_groups(state, rank)
    return _from_views(MeshViews(DeviceMesh((1,), ("tp",), (rank,))), rank) if world_size == 1 else None


def _from_views(views: MeshViews, rank: int) -> MegatronMesh:
    of_experts = next((view for _, view in views.others if {"ep", "etp"} & set(view.axis_names)), views.main)
    for axis in (*views.main.axis_names, *of_experts.axis_names):
        if axis not in _AXES:
            raise rank_error(
                rank,
                f"the mesh has the axis {axis!r}, which is not one of Megatron's",
                views.main.grid,
                f"axes among {', '.join(_AXES)}",
                "rename the axes of mesh= to Megatron's; dp is for replicas",
            )
    dense = _with_axes(views.main, "tp", "pp")
    if "etp" not in of_experts.axis_names and "tp" in of_experts.axis_names:
        names = ["etp" if axis == "tp" else axis for axis in of_experts.axis_names]
        of_experts = DeviceMesh(of_experts.shape, names, of_experts.ranks)
    of_experts = _with_axes(of_experts, "ep", "etp", "pp")
    at = of_experts.coordinate(rank)
    experts = of_experts.submesh(pp=at["pp"])
    return MegatronMesh(
        dense=dense.submesh(pp=dense.coordinate(rank)["pp"]),
        expert=experts.submesh(ep=at["ep"]),
        experts=experts,
        num_stages=dense.axis_length("pp"),
        expert_rank=at["ep"],
        is_given=True,
    )


def _with_axes(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Return the mesh with these axes; new axes have length 1."""
    more = [axis for axis in axes if axis not in mesh.axis_names]
    return DeviceMesh((*(1 for _ in more), *mesh.shape), (*more, *mesh.axis_names), mesh.ranks)


def _from_groups(state: Any, rank: int) -> MegatronMesh:
    """Read Megatron's process groups; other groups of the same kind hold replicas or other stages."""
    from torch.distributed import get_process_group_ranks

    tensor = get_process_group_ranks(state.get_tensor_model_parallel_group())
    expert = get_process_group_ranks(state.get_expert_tensor_parallel_group())
    across = get_process_group_ranks(state.get_expert_model_parallel_group())
    if rank not in tensor or rank not in across:
        raise rank_error(
            rank,
            f"Megatron's process groups of this process are not those of rank {rank}",
            f"ranks {tensor} along tp, {across} along ep",
            f"rank {rank} among them",
            "let all ranks of the world take part",
        )
    both = get_process_group_ranks(state.get_expert_tensor_and_model_parallel_group())
    experts = _grid(expert, across, both, rank)
    return MegatronMesh(
        dense=DeviceMesh((len(tensor),), ("tp",), tensor),
        expert=DeviceMesh((len(expert),), ("etp",), expert),
        experts=experts,
        num_stages=len(get_process_group_ranks(state.get_pipeline_model_parallel_group())),
        expert_rank=across.index(rank),
        is_given=False,
    )


def _grid(expert: Sequence[int], across: Sequence[int], both: Sequence[int], rank: int) -> DeviceMesh:
    """Return the mesh of all experts of a stage; the run decides which of the two axes varies faster."""
    sizes = {"ep": len(across), "etp": len(expert)}
    for outer, inner in (("ep", "etp"), ("etp", "ep")):
        if sizes["ep"] * sizes["etp"] == len(both):
            mesh = DeviceMesh((sizes[outer], sizes[inner]), (outer, inner), sorted(both))
            if tuple(expert) in mesh.groups("etp") and tuple(across) in mesh.groups("ep"):
                return mesh
    raise rank_error(
        rank,
        "Megatron's process groups of experts are not a grid",
        f"ranks {list(both)} of {list(expert)} and {list(across)}",
        "one rank for each pair of a place along etp and one along ep",
        "give mesh=",
    )


_OWN_LAYERS = {"output_size_per_partition": 0, "num_embeddings_per_partition": 0, "input_size_per_partition": 1}
"""Attribute of Megatron's parallel layers -> the dim of their weight that they cut. The weight has its own attributes
only if the layer initialized it: `perform_initialization=False` skips both."""

_PACKED = re.compile(r".*\b(?:linear_fc1|in_proj|conv1d)(?:_\w+)?\.(?:weight|bias)\d*", re.ASCII)
"""Modules of several projections side by side. A rank holds its part of each projection, so one cut along the dim would
mix them (megatron/core/transformer/mlp.py, ssm/mamba_mixer.py, ssm/gated_delta_net.py: sharded_state_dict)."""


class PartitionAttributes(Struct, frozen=True):
    """The cut of a parameter by its attributes."""

    dim: int | None
    """The dim that is cut; None for a whole parameter."""
    stride: int = 1
    """Number of pieces of the dim, end to end, each cut by itself."""


def rank_error(rank: int, problem: str, got: str, want: str, next_step: str) -> LayoutError:
    """Return the error for a rank whose module and mesh do not fit."""
    return LayoutError(problem, rank=rank, got=got, want=want, next_step=next_step)


_GIVE_MESH = "give the mesh of the run, with its axis ep"
_GIVE_RULE = "give layouts= with this tensor's rule"
_AS_MADE = "export the chunks as Megatron makes them"
_RECORDED = "export from a checkpoint of --ckpt-format torch_dist, which records it"


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


def _resolve_layout(
    part: _Part, mesh: MegatronMesh, rank: int, *, is_gated: bool, packed: TensorLayout | None
) -> TensorLayout:
    """Return the layout of a tensor over tp, etp and ep; `packed` is that from `layout_of_packed`."""
    name, value, is_expert, num_dims = part.name, part.value, part.is_expert, part.local.ndim
    at = Subject(name, rank)
    # `allreduce` is False on parameters whose gradients are one expert rank's own.
    mark, ways = getattr(value, "allreduce", None), mesh.lengths["ep"]
    if mark is False and (not is_expert or ways == 1):
        raise at.layout(
            "its attributes mark it as an expert's weight, but its name or the mesh does not",
            "allreduce=False" + ("" if is_expert else ", and a name that is not an expert's") + f", ep={ways}",
            "an expert's name, and a mesh with the axis ep",
            _GIVE_MESH,
        )
    if is_expert and ways > 1 and mark is not False and value.requires_grad:
        raise at.layout(
            "its attributes do not place it on one of several expert ranks",
            f"allreduce={mark}, ep={ways}",
            "allreduce=False, as Megatron marks experts over several ranks",
            "give the mesh of the run; without ep, where every rank holds all experts",
        )
    marked = read_partition(value, part.owner)
    layout = packed or layout_of(name, is_gated=is_gated)
    if layout is None:
        has_no_dim = getattr(value, "partition_dim", -1) < 0
        is_marked = marked is None and has_no_dim and getattr(value, "tensor_model_parallel", False)
        if is_expert or is_marked or (marked is not None and marked.dim is not None and _PACKED.fullmatch(name)):
            raise at.layout(
                "it is unknown how Megatron splits a tensor of this name",
                f"a part of shape {list(value.shape)}"
                + (f", cut along dim {marked.dim}" if marked else ", tensor_model_parallel" if is_marked else ""),
                "a name that xrank's table has, or a rule of layouts=",
                "give layouts= with this tensor's rule, on the axes tp, etp and ep",
            )
        return plain_layout(num_dims) if marked is None else plain_layout(num_dims, marked.dim, marked.stride)
    if len(layout.dims) != num_dims:
        problem = "it does not have the dims of Megatron's tensor of this name"
        raise at.layout(problem, f"shape {list(value.shape)}", str(layout), _GIVE_RULE)
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
        raise at.layout(
            "its attributes contradict how Megatron cuts a tensor of this name",
            "whole on every rank" if marked.dim is None else f"partition_dim {marked.dim}, stride {marked.stride}",
            f"{layout}: " + ("whole" if wanted is None else f"partition_dim {wanted}, stride {stride}"),
            f"set the attributes that Megatron's layers set, or {_GIVE_RULE}",
        )
    return layout


CONFIG_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
"""Axis -> its name in Megatron's configs (megatron/core/model_parallel_config.py)."""


def configs_of(chunks: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the Megatron configs of the chunks that have one."""
    return [chunk.config for chunk in chunks if hasattr(getattr(chunk, "config", None), CONFIG_SIZES["tp"])]


def num_experts(chunk: torch.nn.Module, names: Mapping[str, object], mesh: MegatronMesh, rank: int) -> int:
    """Return the number of experts that this rank holds in each layer, counting those with a number in their names."""
    for name in names:
        try:
            expert_in(name)
        except ValueError:
            raise Subject(name, rank).layout(
                "it is unknown how an expert's tensor of this name is split",
                "experts without a number in their name",
                "a name that xrank's table has",
                _RECORDED,
            ) from None
    try:
        count = count_experts(names)
    except ValueError as error:
        problem = f"rank {rank}'s experts have gaps, or differ between layers"
        want = "experts counted from 0 on, as many in each layer"
        raise rank_error(rank, problem, str(error), want, _AS_MADE) from None
    total = next((getattr(config, "num_moe_experts", None) for config in configs_of([chunk])), None)
    ways = mesh.lengths["ep"]
    if count and type(total) is int and total != count * ways:
        raise rank_error(
            rank,
            f"rank {rank} does not hold its share of the experts",
            f"{count} experts, ep={ways}",
            f"{total} experts in all, as in the module's config",
            _GIVE_MESH,
        )
    return count


def first_layer(chunk: torch.nn.Module, names: Mapping[str, object], rank: int, *, is_whole: bool) -> int:
    """Return the number of the chunk's first layer in the whole model, from the layer_number of its layers."""
    stages = {name: found for name in names if (found := LAYER.fullmatch(name))}
    # Every stage numbers the layers of multi-token prediction and of a tower as the whole model does.
    odd = (name for name in names if ".layers." in name and name not in stages and not in_vision_tower(name))
    other = next((name for name in odd if not name.startswith("mtp.") and ".mtp." not in name), None)
    problem = "the number of this layer in the whole model is unknown"
    if other is not None and not is_whole:
        raise Subject(other, rank).layout(
            problem,
            "layers outside of decoder.layers, of a chunk of the model",
            "decoder.layers",
            "export the part that has a decoder of its own, as model.language_model",
        )
    modules = {int(found[1]): name[: found.end(1)] for name, found in stages.items()}
    layers = [(n, getattr(chunk.get_submodule(modules[n]), "layer_number", None)) for n in sorted(modules)]
    # Transformer layers are counted from 1 over all stages (megatron/core/transformer/transformer_layer.py).
    firsts = {layer - 1 - number if type(layer) is int else None for number, layer in layers}
    # Layers that disagree about the first one give -1, which is refused below.
    first = firsts.pop() if len(firsts) == 1 else (0 if not firsts else -1)
    if first is None and is_whole:
        return 0
    if first is None or first < 0:
        raise Subject(modules[min(modules)], rank).layout(
            problem,
            f"layer_number {', '.join(str(layer) for _, layer in layers)}",
            "rising by 1, counted from 1 over all stages",
            "set layer_number on each module of decoder.layers, as Megatron's TransformerLayer does",
        )
    return first


_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class _Part(Struct, frozen=True, eq=False):
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
    A rule of `layouts`, for a tensor that is cut in another way, overrides everything else.
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
                raise Subject(part.name, rank).layout(
                    "this rank holds it twice",
                    f"{tuple(known.value.shape)} and {tuple(part.value.shape)}",
                    "one tensor per name",
                    "give each chunk once, with layer_number as Megatron's layers have it",
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
            packed = layout_of_packed(name, local_shapes, mesh.lengths["tp"])
            is_gated = gating.get(stack_of(name), False)
            layout = _resolve_layout(part, mesh, rank, is_gated=is_gated, packed=packed)
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
        key = (own.axis_names, own.shape, own.ranks)
        records[name] = replace(given, mesh=meshes.setdefault(key, len(meshes)))
    return LocatedTensors(found.local, tuple(meshes), records)


def _unwrap(chunk: Any) -> Any:
    """Return the module inside wrappers without parameters, such as DistributedDataParallel and Float16Module."""
    while list(getattr(chunk, "_modules", {})) == ["module"] and not chunk._parameters:
        chunk = chunk._modules["module"]
    return chunk


def _check_sizes(chunks: Sequence[torch.nn.Module], mesh: MegatronMesh, rank: int) -> None:
    """Check the caller's mesh against the modules' config."""
    for config in configs_of(chunks):
        for axis, length in mesh.lengths.items():
            size = getattr(config, CONFIG_SIZES[axis], None)
            # Without experts, nothing is cut over etp.
            is_used = axis != "etp" or getattr(config, "num_moe_experts", None)
            if type(size) is int and size != length and is_used:
                raise rank_error(
                    rank,
                    f"mesh= does not match the module's config: {CONFIG_SIZES[axis]} differs",
                    f"{axis}={length}",
                    f"{axis}={size}",
                    "give the mesh of the run, or none if Megatron's process groups are initialized",
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
            raise Subject(name, rank).layout(
                "it is a DTensor in a module that Megatron cuts",
                "a DTensor",
                "plain tensors",
                "give a state dict of DTensors whose placements describe every cut",
            )
        local = _split_experts(name, value, owner, rank)
        yield _Part(name, is_expert or local is not value, value, local, owner)


def _split_experts(name: str, value: torch.Tensor, owner: torch.nn.Module, rank: int) -> torch.Tensor:
    """Return GroupedMLP's weight with its experts as the first dim; other tensors unchanged."""
    number = getattr(owner, "num_local_experts", 0)
    try:
        shape = shape_of_grouped(name, tuple(value.shape), number if type(number) is int else 0)
    except ValueError as error:
        raise Subject(name, rank).layout(
            "its shape does not fit the number of experts in its module",
            str(error),
            "a matrix of num_local_experts matrices",
            "set num_local_experts on the module, as Megatron's GroupedMLP does",
        ) from None
    if shape is None:
        return value
    if not value.is_contiguous():
        problem = "it is not a plain matrix, so its experts cannot be separated"
        got, want = f"strides {value.stride()}", "a contiguous parameter"
        raise Subject(name, rank).layout(problem, got, want, "make it contiguous")
    return value.detach().view(shape)


def _find_gating(chunks: Sequence[torch.nn.Module], parts: Mapping[str, _Part], rank: int) -> dict[str, bool]:
    """Return stack of layers -> whether linear_fc1 is gate and up; config, attributes and shapes must agree."""
    interleaved = next((n for c in configs_of(chunks) if (n := getattr(c, "moe_mlp_glu_interleave_size", None))), None)
    if interleaved:
        problem = "the experts have alternating gate and up rows, which are not supported here"
        raise rank_error(rank, problem, f"moe_mlp_glu_interleave_size {interleaved}", "halves", _RECORDED)
    stacks: dict[str, dict[str, _Part]] = {}
    for name, part in parts.items():
        stacks.setdefault(stack_of(name), {})[name] = part
    own = {config.gated_linear_unit for config in configs_of(chunks) if hasattr(config, "gated_linear_unit")}
    # A chunk's config is that of its language model.
    return {stack: _is_gated(of_stack, set() if "vision" in stack else own, rank) for stack, of_stack in stacks.items()}


def _is_gated(parts: Mapping[str, _Part], answers: set[bool], rank: int) -> bool:
    """Return whether linear_fc1 is gate and up in a stack of layers, for which a config may have answers."""
    # Each source gives an answer, and all must be the same: halves that are taken for one matrix would be cut wrongly.
    weights = {name: part for name, part in parts.items() if is_projection(name)}
    strides = {cut.stride for part in weights.values() if (cut := read_partition(part.value, part.owner)) is not None}
    answers = answers | {True} if 2 in strides else set(answers)
    for name, rows, columns in projections({name: tuple(part.local.shape) for name, part in parts.items()}):
        if rows not in (columns, 2 * columns):
            raise Subject(name, rank).layout(
                "its shape is not that of projections to linear_fc2",
                f"{rows} rows, for {columns} columns of linear_fc2",
                f"{columns}, or {2 * columns} of gate and up",
                "check that linear_fc1 and linear_fc2 are cut over the same ranks",
            )
        answers.add(rows == 2 * columns)
        if len(answers) > 1:
            raise Subject(name, rank).layout(
                "config, partition_stride and shapes disagree whether it is gate and up halves",
                f"{rows} rows, for {columns} columns of linear_fc2; partition_stride {sorted(strides)}",
                "one kind in all layers, as in config.gated_linear_unit",
                "check config.gated_linear_unit and the modules' sizes",
            )
    if weights and not answers:
        raise Subject(next(iter(weights)), rank).layout(
            "it is unknown whether it is gate and up halves",
            "no linear_fc2 beside it",
            "config.gated_linear_unit, or linear_fc2",
            _AS_MADE,
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
    return mesh.submesh(**{axis: mesh.coordinate(rank)[axis] for axis in apart})
