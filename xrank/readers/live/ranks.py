"""Describes a live model: its pieces lie in ranks' memory, and each rank has told what it holds.

What `xrank.readers.live.local_model.LocalModel.described` says of every rank becomes a `StoredModel`. Its record i is
one rank's view, and its files stand for the ranks' memories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from xrank.dtypes import by_torch_name
from xrank.errors import ContradictionError
from xrank.formats.rank_state import RankRecord, TensorRecord
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray, int_array
from xrank.layout.nests import row_major
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel
from xrank.readers.base import Hints
from xrank.readers.held_tensor import HeldTensor, replicated
from xrank.readers.placement import place_all

__all__ = ["LiveModel", "held_in_memory", "read_ranks"]


@dataclass(frozen=True, slots=True, eq=False)
class LiveModel:
    """A model in ranks' memory; its i-th file stands for that of the i-th rank that told."""

    stored: StoredModel
    rank: IntArray
    """Record -> the rank whose memory it lies in."""
    view: IntArray
    """Record -> its index among that rank's views."""


def read_ranks(descriptions: Sequence[str], *, ranks: Sequence[int] | None = None) -> LiveModel:
    """Return where every tensor's pieces lie.

    A plain tensor for which nothing says how it is cut is held whole by every rank that has it: replicas, whose values
    the caller must compare, for a cut one would pass for such.

    Args:
        descriptions: what each rank told.
        ranks: whose they are; None: of all ranks in their order.

    Raises:
        ContradictionError, IncompleteError, LayoutError: as `place_all`.
    """
    told = [json.loads(text) for text in descriptions]
    ranks = range(len(told)) if ranks is None else ranks
    world_size = max(ranks) + 1
    records = [RankRecord.from_json(one["record"], file=_memory(r)) for r, one in zip(ranks, told, strict=True)]
    held: dict[str, list[HeldTensor]] = {}
    rank_of: list[int] = []
    view_of: list[int] = []
    nbytes: list[int] = []
    for rank, one, record in zip(ranks, told, records, strict=True):
        if record.rank != rank or record.world_size < world_size:
            raise ContradictionError(
                f"rank {rank} takes itself for rank {record.rank} of {record.world_size}",
                rank=rank,
                got=f"rank {record.rank} of {record.world_size}",
                want=f"rank {rank} of {world_size}",
            )
        first = len(rank_of)
        rank_of += [rank] * len(one["views"])
        view_of += range(len(one["views"]))
        nbytes += one["views"]
        meshes = [DeviceMesh(shape, names, ranks) for names, shape, ranks in record.meshes]
        for name, (dtype, shape, view) in one["tensors"].items():
            known = record.tensors.get(name, TensorRecord())
            held.setdefault(name, []).append(held_in_memory(rank, first + view, dtype, tuple(shape), known, meshes))
    placement = place_all(_with_replicas(held), Hints(), world_size=len(told))
    sizes = [sum(one["views"]) for one in told]
    files = tuple(SourceFile(_memory(r), size, inode=r, mtime_ns=0) for r, size in zip(ranks, sizes, strict=True))
    count = len(rank_of)
    file = np.repeat(np.arange(len(told)), [len(one["views"]) for one in told])
    return LiveModel(
        StoredModel(
            format="memory",
            path="memory",
            files=files,
            records=RecordTable(file, np.zeros(count, np.int64), int_array(nbytes), np.full(count, NO_CHECKSUM)),
            shards=placement.shards,
            absent=placement.absent,
            aliases=_aliases([one["tensors"] for one in told], {shard.name for shard in placement.shards}),
            world_size=len(told),
            nbytes=sum(nbytes),
        ),
        int_array(rank_of),
        int_array(view_of),
    )


def _memory(rank: int) -> str:
    return f"the memory of rank {rank}"


def held_in_memory(
    rank: int, record: int, dtype: str, shape: tuple[int, ...], known: TensorRecord, meshes: Sequence[DeviceMesh]
) -> HeldTensor:
    """Return what a rank holds of a tensor, with the meshes of the rank's record."""
    return HeldTensor(
        rank=rank,
        file=_memory(rank),
        record=record,
        dtype=by_torch_name(dtype).name,
        shape=shape,
        strides=row_major(shape),
        storage_offset=0,
        layout=known.layout,
        mesh=None if known.mesh is None else meshes[known.mesh],
        view=None if known.view is None else meshes[known.view],
        pattern=known.name,
        global_shape=known.shape,
    )


def _with_replicas(held: Mapping[str, Sequence[HeldTensor]]) -> dict[str, list[HeldTensor]]:
    """Return the same with a layout, whole on each rank that has it, for what no rank says a cut of."""
    found: dict[str, list[HeldTensor]] = {}
    for name, tensors in held.items():
        is_told = any(tensor.layout is not None for tensor in tensors)
        found[name] = list(tensors) if is_told else _replicas(tensors)
    return found


def _replicas(tensors: Sequence[HeldTensor]) -> list[HeldTensor]:
    mesh = DeviceMesh((len(tensors),), ("rank",), tuple(tensor.rank for tensor in tensors))
    return [replace(replicated(tensor, mesh), global_shape=tensor.shape) for tensor in tensors]


def _aliases(tensors: Sequence[Mapping[str, Any]], shards: set[str]) -> dict[str, str]:
    """Return tied name -> name, of those that are one view on every rank that has the first.

    In whatever order each rank has them: of names that are tied both ways, the one that the first rank has first stays.
    """
    order: dict[str, int] = {}
    alone: set[str] = set()
    mates: dict[str, frozenset[str]] = {}
    kept: dict[frozenset[str], frozenset[str]] = {}  # so that equal sets are one object, and cost nothing
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
                    common &= its
                    mates[name] = kept.setdefault(common, common)

    def place(name: str) -> tuple[int, int]:
        # Whoever is tied to a name is tied to all that this one is tied to: the last of them has the fewest mates.
        return (1 if name in alone else len(mates[name])), order[name]

    targets = {its: min(its, key=place) for its in set(mates.values())}
    found = {}
    for name, its in mates.items():
        target = targets[its]
        if name != target and name not in alone and {name, target} <= shards:
            found[name] = target
    return found
