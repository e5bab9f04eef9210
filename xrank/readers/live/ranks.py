"""Describes a live model from the ranks' descriptions of their parts, which lie in the ranks' memory.

It turns every rank's `xrank.readers.live.modules.LocalModel.describe` into one `StoredModel`. Each record is one
rank's view, and each file stands for one rank's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import by_torch_name
from xrank.errors import ContradictionError, CorruptError
from xrank.formats.rank_state import MeshRecord, RankRecord, TensorRecord
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray, int_array
from xrank.layout.nests import row_major
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.readers.base import Hints
from xrank.readers.claims import HeldTensor, memory_of, replicate
from xrank.readers.placement import place_all
from xrank.storage.entries import Entry

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
    known_meshes: dict[MeshRecord, DeviceMesh] = {}  # ranks share meshes, which are large
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
        meshes = []
        for key in record.meshes:
            if key not in known_meshes:
                known_meshes[key] = DeviceMesh(key[1], key[0], key[2])
            meshes.append(known_meshes[key])
        for name, (dtype, shape, view) in one["tensors"].items():
            known = record.tensors.get(name, _UNKNOWN)
            held.setdefault(name, []).append(make_held_tensor(rank, first + view, dtype, tuple(shape), known, meshes))
    flat_ties = {name: target for one in parsed for name, target in one["aliases"].items()}
    placement = place_all({name: _replicate(parts) for name, parts in held.items()}, Hints(), world_size=len(parsed))
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
            f"rank {rank} does not describe its tensors",
            rank=rank,
            got=fault,
            want="a record, views, tensors and aliases",
            next_step="give all ranks the same version of xrank",
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


def _replicate(tensors: list[HeldTensor]) -> list[HeldTensor]:
    """Return a tensor's parts; without a layout on any rank they get one that makes them whole on each rank."""
    if any(tensor.layout is not None for tensor in tensors):
        return tensors
    mesh = DeviceMesh((len(tensors),), ("rank",), tuple(tensor.rank for tensor in tensors))
    return [replace(replicate(tensor, mesh), global_shape=tensor.shape) for tensor in tensors]


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
