"""Modules whose parameters frameworks have flattened and cut between ranks: DeepSpeed's ZeRO-3, and torch's FSDP1.

Each rank holds ranges of parameters end to end, as the notation's ``flat(...)`` describes. They are read in place from
attributes of the frameworks' parameters: nothing is gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from xrank.errors import LayoutError, UsageError
from xrank.layout import DeviceMesh, LayoutMap
from xrank.readers.wrapper_names import plain_names

if TYPE_CHECKING:
    import torch

_CHECKPOINT = "save a checkpoint and gather that: xrank gather"


@dataclass(frozen=True, slots=True, eq=False)
class FlatModule:
    """The tensors that one rank holds of a flattened module."""

    tensors: dict[str, torch.Tensor]
    """This rank's ranges of flat buffers, and whole tensors, by name."""
    layouts: LayoutMap
    """Layouts of the buffers, which name the parameters in them."""
    aliases: dict[str, str]
    """Tied name -> name."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """Parameters end to end, of which each rank holds a range."""

    members: Sequence[tuple[str, Sequence[int]]]
    """Name and shape of each parameter."""
    local: torch.Tensor
    """This rank's range."""
    sizes: Sequence[int] | None
    """Elements of each rank's range; None: an even cut, padded at its end."""


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """The facts that a framework's attributes record."""

    buffers: Sequence[_Buffer]
    ties: dict[str, str]
    """Tied name -> name."""
    managed: frozenset[int]
    """``id`` of each parameter that the buffers contain."""
    mesh: DeviceMesh
    """Its last axis, ``shard``, cuts the buffers."""


def read_flat_module(module: Any, world_size: int) -> FlatModule | None:
    """Return the tensors of a module that ZeRO-3 or FSDP1 has flattened; None for other models.

    Args:
        module: any model.
        world_size: the number of ranks.

    Raises:
        UsageError: a parameter is not in memory as plain elements.
        LayoutError: the ranks that hold a parameter are not a row of the world's ranks.
    """
    import torch

    if not isinstance(module, torch.nn.Module):
        return None
    # Within deepspeed.zero.GatheredParameters all parameters are whole, and the caller may have changed them.
    if any(_is_partitioned(parameter) for parameter in module.parameters()):
        found = _read_zero3(module, world_size)
    elif units := _list_units(module):
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
        cut = (
            "" if count == 1 else "/shard" if buffer.sizes is None else f"/shard{{{','.join(map(str, buffer.sizes))}}}"
        )
        # The buffer's own name is shown where it has no other: with its first parameter it is found in the module.
        name = f"flat parameters from {plain[buffer.members[0][0]]}"
        layouts[name] = f"flat({members}{pad}){cut}"
        tensors[name] = buffer.local
    return FlatModule(tensors, layouts, {plain[name]: plain[target] for name, target in found.ties.items()})


def _is_partitioned(parameter: Any) -> bool:
    return hasattr(parameter, "ds_tensor") and tuple(parameter.shape) != tuple(parameter.ds_shape)


def _list_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters and persistent buffers in place, tied ones under each name; no hook of a state dict runs."""
    for prefix, child in module.named_modules(remove_duplicate=False):
        kept = {
            name: tensor for name, tensor in child._buffers.items() if name not in child._non_persistent_buffers_set
        }
        for name, tensor in {**child._parameters, **kept}.items():
            if tensor is not None:
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
            raise UsageError(
                f"the part of {name} that ZeRO-3 holds on this rank is not in memory as plain elements",
                tensor=name,
                got="quantized" if hasattr(part, "ds_quant_scale") else "on a disk (offload_param: nvme)",
                want="plain elements in memory",
                next_step=_CHECKPOINT,
            )
        ranks = _same_ranks(name, ranks, _ranks_of(one.ds_process_group))
        buffers.append(_Buffer([(name, tuple(one.ds_shape))], part.detach().flatten(), None))
    assert ranks is not None
    return _Found(buffers, ties, frozenset(first_name), _mesh_of(ranks, (), world_size))


def _list_units(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Return the modules that FSDP1 wraps, by name."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    if fsdp is None:
        return []
    return [(name, child) for name, child in module.named_modules() if isinstance(child, fsdp)]


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
            raise LayoutError(
                f"{names[0]} is cut by tensor parallelism inside an FSDP1 module",
                tensor=names[0],
                got="FSDP1 over DTensors",
                want="fully_shard (FSDP2) over DTensors, or FSDP1 alone",
                next_step=_CHECKPOINT,
            )
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
    import torch.distributed

    distributed: Any = torch.distributed
    return list(distributed.get_process_group_ranks(group))


def _own_rank() -> int:
    import torch.distributed

    distributed: Any = torch.distributed
    return int(distributed.get_rank())


def _same_ranks(name: str, known: list[int] | None, ranks: list[int]) -> list[int]:
    if known is None or known == ranks:
        return ranks
    raise LayoutError(
        f"{name} is cut between other ranks than the parameters before it",
        tensor=name,
        got=f"ranks {ranks}",
        want=f"ranks {known}",
        next_step=_CHECKPOINT,
    )


def _mesh_of(ranks: Sequence[int], copies: Sequence[int], world_size: int) -> DeviceMesh:
    """Return the mesh of the ranks between which a module is cut, and of those that hold copies of the ranges."""
    count, low = len(ranks), ranks[0]
    if count == 1:
        return DeviceMesh((world_size, 1), ("replica", "shard"))
    if len(copies) < 2:
        return DeviceMesh((1, count), ("replica", "shard"), tuple(ranks))
    own = _own_rank()
    if list(ranks) != list(range(low, low + count)) or list(copies) != list(range(own % count, world_size, count)):
        raise LayoutError(
            "FSDP's groups are not rows of the world's ranks",
            got=f"cut between ranks {list(ranks)}, copied on ranks {list(copies)}",
            want="ranks in a row, and the same place in each row",
            next_step=_CHECKPOINT,
        )
    return DeviceMesh((len(copies), count), ("replica", "shard"))
