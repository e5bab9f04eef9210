"""A live model on one rank: its tensors, those of FSDP1's flat parameters, and their places in the whole model."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from msgspec import Struct

from xrank.dtypes import by_torch_name
from xrank.errors import LayoutError, UsageError
from xrank.formats.rank_state import MeshRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import base_layout, inline_base
from xrank.layout.notation import size_names_of
from xrank.layout.tensor_layout import flat_of
from xrank.layout.tensor_name import TensorName, name_table
from xrank.ranks.memory import check_dense
from xrank.readers.names import plain_names
from xrank.readers.records import Subject

if TYPE_CHECKING:
    import torch


class LocatedTensors(Struct, frozen=True, eq=False):
    """A rank's tensors, not copied, and their places."""

    local: dict[str, torch.Tensor]
    """Tensors by name; for a DTensor its local tensor."""
    meshes: tuple[MeshRecord, ...]
    records: dict[str, TensorRecord]
    """Records of the tensors with a known place."""


def locate_tensors(weights: object, layouts: LayoutMap | None, rank: int) -> LocatedTensors:
    """Return a rank's local tensors and their places.

    A DTensor becomes its local tensor and brings its layout. If its mesh does not contain this rank, it is left out,
    because the rank holds no part of it. `layouts` are those of the plain tensors.
    """
    if not isinstance(weights, Mapping):
        raise UsageError(f"the weights are a {type(weights).__name__}", want="a dict from names to tensors")
    places = _Places(layouts, rank)
    local: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise UsageError(f"the weights have the name {name!r}", got=type(name).__name__, want="texts for names")
        # A plain text: a subclass would be pickled as a class; and not by str(), which gives an enum's label.
        plain = str.__str__(name)
        try:
            part = places.locate(plain, tensor)
        except (UsageError, LayoutError) as error:
            error.about("" if error.tensor == plain else plain, tensor=plain)
            raise
        if part is not None:
            local[plain] = part
    return LocatedTensors(local, tuple(places.meshes), places.tensors)


def view_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for tied names, that is for tensors that are the same view of one storage."""
    # The storage's identity, not the address: every empty tensor has address 0.
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.is_conj(),
        tensor.is_neg(),
    )


class _Places:
    """Checks tensors one by one, and collects their places."""

    def __init__(self, layouts: LayoutMap | None, rank: int) -> None:
        self.layouts = layouts
        self.rank = rank
        self.meshes: dict[MeshRecord, int] = {}
        self.tensors: dict[str, TensorRecord] = {}
        self._cuts: dict[tuple[Any, ...], tuple[str, DeviceMesh]] = {}

    def locate(self, name: str, tensor: object) -> torch.Tensor | None:
        """Return the plain tensor to keep under that name, or None if this rank holds no part of it."""
        # Importing the module costs seconds; as long as it is not imported, no tensor can be a DTensor.
        module = sys.modules.get("torch.distributed.tensor")
        if module is None or not isinstance(tensor, module.DTensor):
            local = _check_tensor(name, tensor)
            if self.layouts is not None:
                self._locate_plain(name, local, self.layouts)
            return local
        # A model has thousands of tensors but few combinations of mesh and placements.
        order = getattr(tensor._spec, "shard_order", None)
        kind = (tensor.device_mesh, tensor.placements, tensor.ndim, repr(order))
        if kind not in self._cuts:
            self._cuts[kind] = _cut_of(tensor, order)
        layout, mesh = self._cuts[kind]
        import torch

        with torch.no_grad():
            local = _check_tensor(name, tensor.to_local())
        if tensor.device_mesh.get_coordinate() is None:
            return None
        self.tensors[name] = TensorRecord(layout, self._mesh(mesh), tuple(tensor.shape))
        return local

    def _locate_plain(self, name: str, local: torch.Tensor, layouts: LayoutMap) -> None:
        layout = layouts[name]
        companion_rule = None if layout is not None else layouts.companion_rule_for(name)
        companion = None if companion_rule is None else layouts.companions[companion_rule]
        if companion is not None:
            layout = base_layout(companion, layouts)
        if layout is None:
            return
        mesh = layout.device_mesh or layouts.device_mesh
        if len(layout.axes) != local.ndim:
            what = f"its layout {layout} has {len(layout.axes)} dims, but the tensor has {local.ndim}"
            raise LayoutError(what, got=f"shape {tuple(local.shape)}", next_step="correct the layout map")
        # The state is read without the map, so the text contains the sizes.
        sized = layout.with_sizes(layouts.sizes)
        rule = layouts.rule_for(name) or companion_rule
        pattern = None if rule is None else layouts.name_of(rule)
        if mesh is not None:
            mesh.coordinate(self.rank)
        if pattern is not None:
            pattern = pattern.with_sizes(layouts.sizes)
            _check_name(name, pattern, sized, mesh, self.rank)
        # A flat buffer's layout gives the members' shapes, which the buffer itself does not contain.
        for member in flat.members if (flat := flat_of(sized)) is not None else ():
            unknown = [size for dim in member.dims for size in size_names_of(dim)]
            if unknown:
                what = f"the shape of {member.name}, a member of the buffer, is unknown"
                step = f"set layouts.sizes[{unknown[0]!r}]"
                raise LayoutError(what, got=f"no number for {unknown[0]!r}", next_step=step)
        # The global size of a sharded dim is the sum over the ranks' parts, which may be unequal: one rank does not
        # know it. Nor does a padded part determine the whole shape.
        shape = None if any(layout.axes) or layout.has_pads else tuple(local.shape)
        self.tensors[name] = TensorRecord(
            str(sized if companion is None else inline_base(companion, sized.tree)),
            None if mesh is None else self._mesh(mesh),
            shape,
            None if layout.view_mesh is None else self._mesh(layout.view_mesh),
            None if pattern is None else str(pattern),
        )

    def _mesh(self, mesh: Any) -> int:
        record = (tuple(mesh.axis_names), tuple(mesh.shape), tuple(int(rank) for rank in mesh.ranks))
        return self.meshes.setdefault(record, len(self.meshes))


def _cut_of(tensor: Any, order: Any) -> tuple[str, DeviceMesh]:
    """Return a DTensor's layout and mesh; `order` of its cuts is a private attribute of torch that older ones lack."""
    from xrank.layout.terms.tensors import describe_mesh, from_placements

    mesh = describe_mesh(tensor.device_mesh)
    layout = from_placements(mesh, tensor.placements, tensor.ndim, order)
    if layout.tree.sums:
        raise LayoutError(
            f"the ranks along {layout.tree.sums[0]!r} hold partial sums, not parts or replicas",
            got=str(tensor.placements),
            next_step="reduce the tensor before you save it: redistribute it to Replicate or Shard",
        )
    return str(layout), mesh


def _check_name(name: str, pattern: TensorName, layout: TensorLayout, mesh: DeviceMesh | None, rank: int) -> None:
    """Check that the rank's name for a tensor matches the pattern with dims."""
    if mesh is None:
        what = f"its name has dims, {pattern}, but no mesh counts them"
        raise LayoutError(what, got=str(layout), next_step="give the LayoutMap a mesh")
    table = name_table(pattern, layout, mesh, mesh.coordinate(rank))
    if table is None:
        step = "correct it, or leave the tensor out on this rank"
        raise LayoutError(f"the layout {layout} leaves rank {rank} out", next_step=step)
    table.global_name(name)


def _check_tensor(name: str, tensor: object) -> torch.Tensor:
    import torch

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        kind, want = type(tensor), "a plain tensor, a Parameter or a DTensor"
        what = f"{name} is a {kind.__module__}.{kind.__qualname__}"
        raise UsageError(what, tensor=name, got=kind.__qualname__, want=want)
    assert isinstance(tensor, torch.Tensor)
    check_dense(tensor, name, name=name)
    by_torch_name(str(tensor.dtype).removeprefix("torch."))
    return tensor


FilledModule: TypeAlias = "torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any]"
"""A module, Megatron's chunks of one, or a state dict."""


def check_model(model: object) -> None:
    """Check that the argument is a model."""
    import torch

    is_chunks = isinstance(model, list | tuple) and all(isinstance(chunk, torch.nn.Module) for chunk in model)
    if isinstance(model, torch.nn.Module | Mapping) or (is_chunks and model):
        return
    what = f"an empty {type(model).__name__}" if is_chunks else f"a {type(model).__name__}"
    if isinstance(model, list | tuple) and model:
        what += " of " + " and ".join(f"{name}s" for name in sorted({type(element).__name__ for element in model}))
    want = "a module, tensors by name, or Megatron's chunks of one module"
    raise UsageError(f"the model is {what}", got=what, want=want, next_step="give the module, or its state dict")


def check_materialized(module: FilledModule) -> None:
    """Check that a module has memory to fill."""
    check_model(module)
    for name, tensor in list_tensors(module):
        if tensor.device.type == "meta":
            raise Subject(name).make(
                UsageError,
                "it is on the meta device, so it has no memory to fill",
                "a tensor without values",
                "a tensor in memory, whatever its values",
                'materialize the module first: module.to_empty(device="cpu"), or on its final device',
            )


def names_left_out(module: FilledModule) -> list[str]:
    """Return the names of buffers that no state dict contains."""
    return [] if isinstance(module, Mapping) else [name for chunk in _chunks(module) for name in _list_left_out(chunk)]


def count_changes(module: FilledModule, views: Sequence[torch.Tensor]) -> None:
    """Inform autograd that all tensors were changed in place; a DTensor and its local tensor count separately."""
    import torch

    changed = [*(tensor for _, tensor in list_tensors(module)), *views]
    # Inference tensors have no version to count.
    torch.autograd.graph.increment_version([tensor for tensor in changed if not tensor.is_inference()])


def list_tensors(module: FilledModule) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that checkpoints contain, with their names: parameters and persistent buffers."""
    import torch

    if isinstance(module, Mapping):
        return [(name, tensor) for name, tensor in module.items() if isinstance(tensor, torch.Tensor)]
    found: list[tuple[str, torch.Tensor]] = []
    for chunk in _chunks(module):
        left_out = set(_list_left_out(chunk))
        found += chunk.named_parameters()
        found += ((name, buffer) for name, buffer in chunk.named_buffers() if name not in left_out)
    return found


def _chunks(module: torch.nn.Module | Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    import torch

    return [module] if isinstance(module, torch.nn.Module) else module


def _list_left_out(module: torch.nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules():
        for name in sorted(child._non_persistent_buffers_set):
            if child._buffers.get(name) is not None:
                yield f"{prefix}.{name}" if prefix else name


_CHECKPOINT = "save a checkpoint and gather that: xrank gather"


def _cut_error(problem: str, got: str, want: str) -> LayoutError:
    """Return the error for parameters of FSDP1 whose cut a layout cannot describe."""
    return LayoutError(problem, got=got, want=want, next_step=_CHECKPOINT)


class FlatModule(Struct, frozen=True, eq=False):
    """The tensors that one rank holds of a flattened module."""

    tensors: dict[str, torch.Tensor]
    """This rank's ranges of flat buffers, and whole tensors, by name."""
    layouts: LayoutMap
    """Layouts of the buffers, which name the parameters in them."""
    aliases: dict[str, str]
    """Tied name -> name."""


class _Buffer(Struct, frozen=True, eq=False):
    """Parameters end to end, of which each rank holds a range."""

    members: Sequence[tuple[str, Sequence[int]]]
    """Name and shape of each parameter."""
    local: torch.Tensor
    """This rank's range."""
    sizes: Sequence[int] | None
    """Elements of each rank's range; None: an even cut, padded at its end."""


class _Found(Struct, frozen=True, eq=False):
    """The facts that a framework's attributes record."""

    buffers: Sequence[_Buffer]
    ties: dict[str, str]
    """Tied name -> name."""
    managed: frozenset[int]
    """``id`` of each parameter that the buffers contain."""
    mesh: DeviceMesh
    """Its last axis, ``shard``, cuts the buffers."""


def read_flat_module(module: Any, world_size: int) -> FlatModule | None:
    """Return the tensors of a module that ZeRO-3 or FSDP1 has flattened; None for other models."""
    import torch

    if not isinstance(module, torch.nn.Module):
        return None
    # Within deepspeed.zero.GatheredParameters all parameters are whole, and the caller may have changed them.
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    parameters: list[Any] = list(module.parameters())
    if any(hasattr(one, "ds_tensor") and tuple(one.shape) != tuple(one.ds_shape) for one in parameters):
        found = _read_zero3(module, world_size)
    elif fsdp is not None and any(isinstance(child, fsdp) for child in module.modules()):
        units = [(name, child) for name, child in module.named_modules() if isinstance(child, fsdp)]
        found = _read_fsdp1(units, world_size)
    else:
        return None
    whole = {name: tensor for name, tensor in _list_tensors(module) if id(tensor) not in found.managed}
    names = [*whole, *found.ties, *(name for buffer in found.buffers for name, _ in buffer.members)]
    plain = plain_names(names) or {name: name for name in names}
    tensors, layouts = {plain[name]: tensor.detach() for name, tensor in whole.items()}, LayoutMap(found.mesh)
    count = found.mesh.shape[-1]
    for buffer in found.buffers:
        members = ", ".join(f"{plain[name]} {list(shape)}" for name, shape in buffer.members)
        pad = f", pad {buffer.local.numel() * count}" if buffer.sizes is None else ""
        sizes = "" if buffer.sizes is None else f"{{{','.join(map(str, buffer.sizes))}}}"
        cut = "" if count == 1 else f"/shard{sizes}"
        # The buffer's own name is shown where it has no other: with its first parameter it is found in the module.
        name = f"flat parameters from {plain[buffer.members[0][0]]}"
        layouts[name] = f"flat({members}{pad}){cut}"
        tensors[name] = buffer.local
    return FlatModule(tensors, layouts, {plain[name]: plain[target] for name, target in found.ties.items()})


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers in place, tied ones under each name; no hook of a state dict runs."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, tensor in {**child._parameters, **child._buffers}.items():
            if tensor is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def _read_zero3(module: torch.nn.Module, world_size: int) -> _Found:
    """Read the attributes that deepspeed/runtime/zero/partition_parameters.py gives parameters."""
    buffers: list[_Buffer] = []
    ties: dict[str, str] = {}
    first_name: dict[int, str] = {}
    ranks = None
    for name, parameter in _list_tensors(module):
        one: Any = parameter
        if not hasattr(one, "ds_shape"):
            continue
        if id(one) in first_name:
            ties[name] = first_name[id(one)]
            continue
        first_name[id(one)] = name
        part = one.ds_tensor
        # _partition_param: a part may lie on a disk, or be quantized, and hpZ keeps a second one.
        if part.status.name != "AVAILABLE" or hasattr(part, "ds_quant_scale"):
            raise Subject(name).make(
                UsageError,
                "its part that ZeRO-3 holds on this rank is not in memory as plain elements",
                "quantized" if hasattr(part, "ds_quant_scale") else "on a disk (offload_param: nvme)",
                "plain elements in memory",
                _CHECKPOINT,
            )
        ranks = _same_ranks(name, ranks, _ranks_of(one.ds_process_group))
        buffers.append(_Buffer([(name, tuple(one.ds_shape))], part.detach().flatten(), None))
    assert ranks is not None
    return _Found(buffers, ties, frozenset(first_name), _mesh_of(ranks, (), world_size))


def _read_fsdp1(units: Sequence[tuple[str, Any]], world_size: int) -> _Found:
    """Read the attributes of torch/distributed/fsdp/_flat_param.py: FlatParameter."""
    buffers: list[_Buffer] = []
    ties: dict[str, str] = {}
    managed: set[int] = set()
    ranks: list[int] | None = None
    copies: Sequence[int] = ()
    for prefix, unit in units:
        handle = unit._handle
        if handle is None:  # it wraps no parameters of its own
            continue
        flat, inner = handle.flat_param, f"{prefix}._fsdp_wrapped_module" if prefix else "_fsdp_wrapped_module"
        names = [f"{inner}.{name}" for name in flat._fqns]
        if any(one is not None for one in flat._param_extensions):
            problem = f"{names[0]} is cut by tensor parallelism inside an FSDP1 module"
            raise _cut_error(problem, "FSDP1 over DTensors", "fully_shard (FSDP2) over DTensors, or only FSDP1")
        managed |= {id(flat), *map(id, flat._params or ()), *map(id, flat._shared_params or ())}
        # NO_SHARD keeps the buffer whole on every rank.
        group = _ranks_of(handle.process_group)
        of_unit = group if handle.uses_sharded_strategy else [group[0]]
        ranks = _same_ranks(names[0], ranks, of_unit)
        inter = getattr(unit, "_inter_node_pg", None)
        copies = _ranks_of(inter) if handle.uses_sharded_strategy and inter is not None else ()
        # Before the first forward the parameter itself is the range.
        local = getattr(flat, "_local_shard", flat) if handle.uses_sharded_strategy else flat
        position = group.index(_own_rank()) if handle.uses_sharded_strategy else 0
        buffers += _split(flat, names, local.detach().flatten(), len(of_unit), position)
        for name, _, inside, target, _, target_inside in flat._shared_param_infos:
            ties[".".join(filter(None, (inner, inside, name)))] = ".".join(filter(None, (inner, target_inside, target)))
    assert ranks is not None, "FSDP wraps a parameter"
    return _Found(buffers, ties, frozenset(managed), _mesh_of(ranks, copies, world_size))


def _split(flat: Any, names: Sequence[str], local: torch.Tensor, count: int, position: int) -> Iterator[_Buffer]:
    """Yield the parts of a flat parameter between paddings: one, unless a parameter ends off a multiple of 16 bytes."""
    pieces: list[list[tuple[str, Sequence[int]]]] = [[]]
    starts, at, known = [0], 0, iter(zip(names, flat._shapes, strict=True))
    for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        at += numel
        if not is_padding:
            pieces[-1].append(next(known))
        elif pieces[-1]:
            pieces.append([])
            starts.append(at)
        else:
            starts[-1] = at
    filled = [(start, members) for start, members in zip(starts, pieces, strict=True) if members]
    if len(filled) == 1 and filled[0][0] == 0:
        yield _Buffer(filled[0][1], local, None)
        return
    size = local.numel()
    for start, members in filled:
        stop = start + sum(prod(shape) for _, shape in members)
        ends = [min(max(edge * size, start), stop) for edge in range(count + 1)]
        low, high = ends[position], ends[position + 1]
        own = local[low - position * size : high - position * size] if low < high else local[:0]
        yield _Buffer(members, own, [high - low for low, high in pairwise(ends)])


def _ranks_of(group: Any) -> list[int]:
    return list(sys.modules["torch.distributed"].get_process_group_ranks(group))


def _own_rank() -> int:
    return int(sys.modules["torch.distributed"].get_rank())


def _same_ranks(name: str, known: list[int] | None, ranks: list[int]) -> list[int]:
    if known is None or known == ranks:
        return ranks
    problem = f"{name} is split between different ranks than the parameters before it"
    raise _cut_error(problem, f"ranks {ranks}", f"ranks {known}")


def _mesh_of(ranks: Sequence[int], copies: Sequence[int], world_size: int) -> DeviceMesh:
    """Return the mesh of the ranks between which a module is cut, and of those that hold copies of the ranges."""
    count, low = len(ranks), ranks[0]
    if count == 1:
        return DeviceMesh((world_size, 1), ("replica", "shard"))
    if len(copies) < 2:
        return DeviceMesh((1, count), ("replica", "shard"), tuple(ranks))
    own = _own_rank()
    if list(ranks) != list(range(low, low + count)) or list(copies) != list(range(own % count, world_size, count)):
        got = f"cut between ranks {list(ranks)}, copied on ranks {list(copies)}"
        want = "consecutive ranks, with copies at the same position of each row"
        raise _cut_error("FSDP's groups are not rows of the world's ranks", got, want)
    return DeviceMesh((len(copies), count), ("replica", "shard"))
