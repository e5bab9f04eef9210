"""Collects the ranks' parts of each tensor from their files: parts with layouts, and parts with boxes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from xrank.dialects.boxes import box_nests
from xrank.errors import ContradictionError
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout import DeviceMesh
from xrank.plan.source import StoredShard
from xrank.readers.base import Hints
from xrank.readers.fsdp.flat_parameters import FlatPieces, Index, is_flat, make_nameless_error
from xrank.readers.fsdp.rank_files import FsdpRankFile
from xrank.readers.fsdp.sharded_tensors import ShardedPart
from xrank.readers.held_tensor import HeldTensor, pieces_of, replicate

_AGAIN = "all files must come from one save of one run; copy them again"


def check_kinds(files: Sequence[FsdpRankFile]) -> None:
    """Check that each name is one kind of tensor on all ranks.

    Raises:
        ContradictionError: it is not.
    """
    kinds: dict[str, tuple[FsdpRankFile, str]] = {}
    for file in files:
        for kind, names in (("DTensor", file.dtensors), ("ShardedTensor", file.sharded), ("plain tensor", file.plain)):
            for name in names:
                first, before = kinds.setdefault(name, (file, kind))
                if before != kind:
                    raise ContradictionError(
                        f"{name}: it is a {before} on rank {first.rank} and a {kind} on rank {file.rank}",
                        tensor=name,
                        rank=file.rank,
                        file=file.archive.path,
                        got=kind,
                        want=before,
                        next_step=_AGAIN,
                    )


def collect_parts(
    files: Sequence[FsdpRankFile], indexes: Mapping[int, Index], pieces: FlatPieces, world_size: int, hints: Hints
) -> dict[str, list[HeldTensor]]:
    """Return the ranks' parts of each tensor that a layout places, by name and rising rank.

    Beside DTensors and ShardedTensors, plain tensors are replicas, because torch saves cut tensors as one of those two.
    If no file contains either, hints place the plain tensors.

    Raises:
        LayoutError: a flat parameter records no names, and the caller gives no layout for it.
    """
    held: dict[str, list[HeldTensor]] = {}
    are_replicas = any(file.dtensors or file.sharded for file in files)
    world = DeviceMesh((world_size,), ("rank",))
    for file in files:
        index = indexes[file.rank]
        for name, part in file.dtensors.items():
            plain = _part_of(file, part.local, index)
            held.setdefault(name, []).append(
                replace(plain, layout=part.layout, mesh=part.mesh, global_shape=part.shape)
            )
        for name, tensor in file.plain.items():
            if name in pieces.by_name:
                continue
            plain = _part_of(file, tensor, index)
            # A rule of the layout file overrides this assumption.
            if are_replicas and not _has_rule(hints, name):
                plain = replicate(plain, world)
            held.setdefault(name, []).append(plain)
        for name in pieces.nameless:
            if name not in file.sharded:
                continue
            if not _has_rule(hints, name):
                raise make_nameless_error(name, file)
            held.setdefault(name, []).extend(_part_of(file, tensor, index) for _, tensor in file.sharded[name].shards)
    return held


def _has_rule(hints: Hints, name: str) -> bool:
    return hints.layouts is not None and hints.layouts.rule_for(name) is not None


def _part_of(file: FsdpRankFile, tensor: ArchivedTensor, index: Index) -> HeldTensor:
    return HeldTensor.from_archive(tensor, rank=file.rank, file=file.archive.path, record=index(tensor.key))


def locate_boxed_shards(files: Sequence[FsdpRankFile], indexes: Mapping[int, Index]) -> list[StoredShard]:
    """Return every ShardedTensor that is not a flat parameter, with all its boxes.

    Raises:
        ContradictionError: ranks disagree about a tensor.
    """
    shards = []
    for name in dict.fromkeys(name for file in files for name in file.sharded if not is_flat(name)):
        parts = [(file, file.sharded[name]) for file in files if name in file.sharded]
        _, first = parts[0]
        held, nests = [], []
        for file, part in parts:
            _check_same(name, file, part, first)
            for box, tensor in part.shards:
                held.append(_part_of(file, tensor, indexes[file.rank]))
                nests.append(box_nests(box, part.shape))
        if held:
            shards.append(pieces_of(name, held, first.shape, nests))
        elif first.boxes:
            file = parts[0][0]
            raise ContradictionError(
                f"{name}: no rank holds any of it",
                tensor=name,
                file=file.archive.path,
                got="no shard",
                want=f"{len(first.boxes)} shards",
                next_step=_AGAIN,
            )
    return shards


def _check_same(name: str, file: FsdpRankFile, part: ShardedPart, first: ShardedPart) -> None:
    got, want = (f"{p.dtype} {list(p.shape)} in {len(p.boxes)} shards" for p in (part, first))
    if (part.dtype, part.shape, part.boxes) != (first.dtype, first.shape, first.boxes):
        raise ContradictionError(
            f"{name}: ranks disagree about its type, shape or shards",
            tensor=name,
            rank=file.rank,
            file=file.archive.path,
            got=got,
            want=want,
            next_step=_AGAIN,
        )
