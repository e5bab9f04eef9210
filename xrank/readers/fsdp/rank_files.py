"""Reads one rank's file: DTensors, ShardedTensors, plain tensors and other values, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xrank.formats.regular_file import Origin, quote
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert
from xrank.readers.fsdp.dtensors import DTensorPart, DTensors
from xrank.readers.fsdp.pickled import read_wrapper, unwrap_parameter
from xrank.readers.fsdp.sharded_tensors import ShardedPart, read_sharded_part

__all__ = ["FsdpRankFile", "read_rank_file"]


@dataclass(frozen=True, slots=True)
class FsdpRankFile:
    """One rank's file, read from its metadata alone."""

    rank: int
    archive: TorchArchive
    dtensors: Mapping[str, DTensorPart]
    sharded: Mapping[str, ShardedPart]
    plain: Mapping[str, ArchivedTensor]
    others: tuple[str, ...]
    """Names of plain values that are not tensors."""

    @property
    def origin(self) -> Origin:
        """Makes the errors that name the file."""
        return Origin(self.archive.path, self.rank)


def read_rank_file(path: str, rank: int) -> FsdpRankFile:
    """Return the content of a rank's file.

    Raises:
        IncompleteError: the file is missing.
        ContradictionError: it is another rank's.
        CorruptError, UnsafeError: it is damaged, or contains more than tensors by name.
        LayoutError: the notation cannot express a DTensor's placements.
    """
    archive = read_archive(path, rank=rank)
    origin = Origin(path, rank)
    state = archive.value
    if not isinstance(state, dict):
        refuse_inert(state, path, rank)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise origin.corrupt("is not a state dict", got=type(state).__name__, want="a dict of tensors by name")
    reader = DTensors(archive, rank)
    dtensors: dict[str, DTensorPart] = {}
    sharded: dict[str, ShardedPart] = {}
    plain: dict[str, ArchivedTensor] = {}
    others: list[str] = []
    for name, saved in state.items():
        value = unwrap_parameter(saved)
        wrapper = read_wrapper(value, origin)
        if isinstance(value, ArchivedTensor):
            plain[name] = value
        elif wrapper is not None and wrapper.kind == "DTensor":
            part = reader.read_part(name, wrapper)
            if part is not None:
                dtensors[name] = part
        elif wrapper is not None and wrapper.kind == "ShardedTensor":
            sharded[name] = read_sharded_part(name, wrapper, origin)
        elif wrapper is not None:
            raise origin.unsafe(f"{quote(name)} is an unknown kind of tensor", got=quote(wrapper.kind))
        else:
            refuse_inert(value, path, rank)
            others.append(name)
    return FsdpRankFile(rank, archive, dtensors, sharded, plain, tuple(others))
