"""A live model: each rank's own part, the part's description for other ranks, and the model that all of them describe.

In the stored model that `read_ranks` returns, each record is one rank's view, and each file stands for one rank's
memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.dtypes import by_torch_name
from xrank.errors import ContradictionError, CorruptError, LayoutError, UsageError
from xrank.formats.pickles import is_extra_state
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nest_table import IntArray, int_array
from xrank.layout.nests import row_major
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.readers.base import Hints
from xrank.readers.live.modules import LocatedTensors, check_model, locate_tensors, read_flat_module, view_key
from xrank.readers.megatron.live import is_megatron, megatron_mesh, megatron_tensors
from xrank.readers.placement import HeldTensor, memory_of, place_all, replicate, shared_mesh
from xrank.readers.records import Subject
from xrank.storage.entries import Entry
from xrank.system import host_name

if TYPE_CHECKING:
    import torch


class LocalModel(Struct, frozen=True, eq=False):
    """A rank's part of a model; nothing is copied."""

    tensors: Mapping[str, torch.Tensor]
    """Local parts by name, detached, with any device and strides."""
    views: tuple[torch.Tensor, ...]
    """The same parts, each once; tied names share one."""
    view_of: Mapping[str, int]
    """Name -> index in `views`."""
    record: RankRecord
    """The rank, and the places of its parts."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Tied name -> name, of parameters inside flat buffers; others are tied by a common view."""

    def find_global_shapes(self, *, has_layouts: bool) -> dict[str, tuple[int, ...] | None]:
        """Return the global shape of each tensor; None where this rank does not know it.

        If layouts located the tensors, plain ones may be parts.
        """
        found: dict[str, tuple[int, ...] | None] = {}
        for name, tensor in self.tensors.items():
            known = self.record.tensors.get(name)
            is_plain = not has_layouts and (known is None or known.layout is None)
            found[name] = tuple(tensor.shape) if is_plain else None if known is None else known.shape
        return found

    def select(self, names: Collection[str]) -> LocalModel:
        """Return the part with these tensors only."""
        tensors = {name: tensor for name, tensor in self.tensors.items() if name in names}
        views = list(dict.fromkeys(self.view_of[name] for name in tensors))
        return LocalModel(
            tensors,
            tuple(self.views[view] for view in views),
            {name: views.index(self.view_of[name]) for name in tensors},
            replace(self.record, tensors={name: one for name, one in self.record.tensors.items() if name in names}),
            {name: target for name, target in self.aliases.items() if name in names and target in names},
        )

    def describe(self) -> str:
        """Return everything except the values, as text for `read_ranks`."""
        return json.dumps(
            {
                "record": self.record.to_json(),
                "aliases": dict(self.aliases),
                "views": [view.numel() * view.element_size() for view in self.views],
                "tensors": {
                    name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), self.view_of[name]]
                    for name, tensor in self.tensors.items()
                },
            },
            separators=(",", ":"),
        )


def local_model(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    rank: int,
    world_size: int,
    is_read: bool = False,
) -> LocalModel:
    """Return this rank's part of a module, or of a state dict.

    A module's tensors have its plain names, without the parts that wrappers add (DistributedDataParallel,
    torch.compile, checkpoint_wrapper). Values that are not tensors (``_extra_state``) are left out. For a module that
    Megatron cut, or a list of its chunks, the names are the whole model's, and `mesh` is the layout of its ranks
    (`xrank.readers.megatron.live`). A plain tensor without a layout is whole on every rank that has it.

    If the tensors are read, not filled (`is_read`), parameters that ZeRO-3 or FSDP1 has flattened are read where they
    are. A module that is filled must not have them, as an optimizer holds further copies.
    """
    import torch

    # DeepSpeed's engine is a module without names of its own.
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", None)
    model = model.module if engine is not None and isinstance(model, engine) else model
    check_model(model)
    flat = read_flat_module(model, world_size) if is_read else None
    located: LocatedTensors | None
    if flat is not None:
        located = locate_tensors(flat.tensors, flat.layouts, rank)
    else:
        _check_zero3(model)
        located = _megatron_tensors(model, layouts, mesh, rank, world_size) if is_megatron(model) else None
    if located is None:
        named = _state_dict(model) if isinstance(model, torch.nn.Module) else model
        if isinstance(named, Mapping):
            named = {name: value for name, value in named.items() if not is_extra_state(name)}
        located = locate_tensors(named, layouts, rank)
    views: list[torch.Tensor] = []
    view_of: dict[str, int] = {}
    known: dict[Hashable, int] = {}
    for name, tensor in located.local.items():
        # Tied names share one view, which is how other ranks learn of the tie.
        key = view_key(tensor)
        if key not in known:
            known[key] = len(views)
            views.append(tensor.detach())
        view_of[name] = known[key]
    record = RankRecord(
        run_id=None,
        attempt=None,
        step=None,
        rank=rank,
        world_size=world_size,
        host=host_name(),
        meshes=located.meshes,
        tensors=located.records,
    )
    tensors = {name: views[view_of[name]] for name in located.local}
    return LocalModel(tensors, tuple(views), view_of, record, {} if flat is None else flat.aliases)


def _megatron_tensors(
    model: Any, layouts: LayoutMap | None, mesh: Any, rank: int, world_size: int
) -> LocatedTensors | None:
    """Return the tensors of a module that Megatron cut, and their places; None if the map describes every tensor."""
    found = megatron_mesh(mesh, rank, world_size)
    if found is not None:
        return megatron_tensors(model, found, layouts=layouts, rank=rank)
    if layouts is not None and not isinstance(model, list | tuple):
        return None
    raise LayoutError(
        "Megatron sharded the module, but the mesh of its ranks is unknown",
        rank=rank,
        got=f"{world_size} ranks, no mesh",
        want="a mesh with axes among tp, pp, ep, etp, dp and cp",
        next_step='give mesh=, such as DeviceMesh.parse_grid("pp=2 dp=1 tp=2")',
    )


def _check_zero3(model: Any) -> None:
    """Refuse parameters that ZeRO-3 has partitioned: they have no elements left, and only an attribute records that."""
    import torch

    for chunk in model if isinstance(model, list | tuple) else [model]:
        is_module = isinstance(chunk, torch.nn.Module)
        for name, tensor in chunk.named_parameters() if is_module else getattr(chunk, "items", tuple)():
            # deepspeed/runtime/zero/partition_parameters.py: _convert_to_deepspeed_param
            whole = getattr(tensor, "ds_shape", None)
            if whole is not None and tuple(tensor.shape) != tuple(whole):
                raise Subject(name).make(
                    UsageError,
                    "it is a placeholder of DeepSpeed's ZeRO-3, whose values are partitioned",
                    f"shape {tuple(tensor.shape)}",
                    f"shape {tuple(whole)}",
                    "give the module itself to export_model or iter_model; for other calls, make them within "
                    "deepspeed.zero.GatheredParameters(list(module.parameters()))",
                )


def _state_dict(module: torch.nn.Module) -> dict[str, Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    flat = getattr(fsdp, "FullyShardedDataParallel", None)
    if flat is not None and any(isinstance(child, flat) for child in module.modules()):
        raise UsageError(
            "the module is an FSDP1 module, which gathers itself whole on every rank",
            got="FullyShardedDataParallel",
            want="a module of fully_shard (FSDP2), or a state dict",
            next_step="make FSDP with device_mesh=, and give its SHARDED_STATE_DICT, which then contains DTensors: "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model)",
        )
    if next(module.parameters(), None) is None and not module.state_dict():
        return {}  # such as a pipeline stage without weights, for which the function below raises
    # This function removes the wrappers' names and gathers nothing.
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return dict(get_model_state_dict(module))


_UNKNOWN = TensorRecord()


class LiveModel(Struct, frozen=True, eq=False):
    """A model in ranks' memory; its i-th file stands for the memory of the i-th described rank."""

    stored: StoredModel
    rank: IntArray
    """Record -> the rank whose memory contains it."""
    view: IntArray
    """Record -> its index in that rank's views."""


def read_ranks(descriptions: Sequence[str], *, ranks: Sequence[int] | None = None) -> LiveModel:
    """Return where every tensor's pieces lie.

    A plain tensor without a layout on any rank is taken as whole on every rank that has it. The caller must compare the
    values of these replicas, because a cut tensor would look the same.
    """
    ranks = range(len(descriptions)) if ranks is None else ranks
    parsed = [_parse(text, rank) for rank, text in zip(ranks, descriptions, strict=True)]
    world_size = max(ranks) + 1
    records = [RankRecord.from_json(one["record"], file=memory_of(r)) for r, one in zip(ranks, parsed, strict=True)]
    held: dict[str, list[HeldTensor]] = {}
    rank_of: list[int] = []
    view_of: list[int] = []
    nbytes: list[int] = []
    for rank, one, record in zip(ranks, parsed, records, strict=True):
        if record.rank != rank or record.world_size < world_size:
            got, want = f"rank {record.rank} of {record.world_size}", f"rank {rank} of {world_size}"
            step = "give all ranks the same process group"
            raise ContradictionError(
                f"rank {rank} describes itself as {got}", rank=rank, got=got, want=want, next_step=step
            )
        first = len(rank_of)
        rank_of += [rank] * len(one["views"])
        view_of += range(len(one["views"]))
        nbytes += one["views"]
        meshes = [shared_mesh(shape, axes, members) for axes, shape, members in record.meshes]
        for name, (dtype, shape, view) in one["tensors"].items():
            known = record.tensors.get(name, _UNKNOWN)
            held.setdefault(name, []).append(make_held_tensor(rank, first + view, dtype, tuple(shape), known, meshes))
    flat_ties = {name: target for one in parsed for name, target in one["aliases"].items()}
    for name, parts in held.items():
        # Without a layout on any rank, the tensor is whole on each.
        if all(part.layout is None for part in parts):
            whole = shared_mesh((len(parts),), ("rank",), tuple(part.rank for part in parts))
            held[name] = [replace(replicate(part, whole), global_shape=part.shape) for part in parts]
    placement = place_all(held.items, Hints(), world_size=len(parsed))
    # The tied tensors of flat buffers have the pieces of their targets, under their own names.
    by_name = {shard.name: shard for shard in placement.shards}
    ties = [(name, target) for name, target in flat_ties.items() if target in by_name and name not in by_name]
    tied = [replace(by_name[target], name=name) for name, target in ties]
    sizes = [sum(one["views"]) for one in parsed]
    files = tuple(SourceFile(memory_of(r), size, inode=r, mtime_ns=0) for r, size in zip(ranks, sizes, strict=True))
    count = len(rank_of)
    file = np.repeat(np.arange(len(parsed)), [len(one["views"]) for one in parsed])
    return LiveModel(
        StoredModel(
            format="memory",
            path="memory",
            files=files,
            records=RecordTable(file, np.zeros(count, np.int64), int_array(nbytes), np.full(count, NO_CHECKSUM)),
            shards=(*placement.shards, *tied),
            absent=placement.absent,
            aliases=_aliases([one["tensors"] for one in parsed], by_name) | flat_ties,
            world_size=len(parsed),
            nbytes=sum(nbytes),
        ),
        int_array(rank_of),
        int_array(view_of),
    )


def _parse(text: str, rank: int) -> dict[str, Any]:
    """Return a rank's description, of which each part has its type."""

    def fail(fault: str) -> CorruptError:
        return CorruptError(
            f"rank {rank} sent no valid description of its tensors",
            rank=rank,
            got=fault,
            want="a record, views, tensors and aliases",
            next_step="use the same version of xrank on all ranks",
        )

    whole = Entry.parse(text, fail, is_bounded=False)
    views, tensors = whole["views"].counts(), whole["tensors"]
    aliases = {name: target.text() for name, target in whole["aliases"].items()}
    for name, value in tensors.table().items():
        if (  # plain checks: all ranks have up to a million of these
            type(value) is not list
            or len(value) != 3
            or type(value[0]) is not str
            or type(value[1]) is not list
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in value[1])
            or type(value[2]) is not int
            or not 0 <= value[2] < len(views)
        ):
            tensors.at(name).refuse("a type, a shape and the number of a view")
    return {"record": whole["record"].text(), "views": views, "tensors": tensors.value, "aliases": aliases}


def make_held_tensor(
    rank: int, record: int, dtype: str, shape: tuple[int, ...], known: TensorRecord, meshes: Sequence[DeviceMesh]
) -> HeldTensor:
    """Return a rank's part of a tensor, with the meshes of the rank's record."""
    own = HeldTensor(rank, memory_of(rank), record, by_torch_name(dtype).name, shape, row_major(shape), 0)
    return own.as_recorded(known, meshes)


def _aliases(tensors: Sequence[Mapping[str, Any]], shards: Collection[str]) -> dict[str, str]:
    """Return tied name -> name, for names that share one view on every rank that has the first.

    Ranks may have them in any order. If names are tied both ways, the one that occurs first stays.
    """
    if all(len({view for _, _, view in rank.values()}) == len(rank) for rank in tensors):
        return {}
    order: dict[str, int] = {}
    alone: set[str] = set()
    mates: dict[str, frozenset[str]] = {}
    kept: dict[frozenset[str], frozenset[str]] = {}  # makes equal sets one object, to save memory
    for rank in tensors:
        by_view: dict[int, list[str]] = {}
        for name, (_, _, view) in rank.items():
            by_view.setdefault(view, []).append(name)
            order.setdefault(name, len(order))
        for names in by_view.values():
            if len(names) == 1:
                alone.add(names[0])
                continue
            its = frozenset(names)
            its = kept.setdefault(its, its)
            for name in names:
                common = mates.setdefault(name, its)
                if common is not its:
                    # A rank may tie more names than another; only ties on all ranks hold.
                    common &= its
                    mates[name] = kept.setdefault(common, common)

    def place(name: str) -> tuple[int, int]:
        # A name tied to another is tied to all of that one's mates, too, so the last target has the fewest mates.
        return (1 if name in alone else len(mates[name])), order[name]

    targets = {its: min(its, key=place) for its in set(mates.values())}
    found = {}
    for name, its in mates.items():
        target = targets[its]
        if name != target and name not in alone and name in shards and target in shards:
            found[name] = target
    return found
