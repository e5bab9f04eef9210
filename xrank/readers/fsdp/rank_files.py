"""What one rank's file holds, by name: DTensors, ShardedTensors, plain tensors, and what is no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from xrank.formats.regular_file import Origin, shown
from xrank.formats.torch_archive import ArchivedTensor, TorchArchive, read_archive, refuse_inert
from xrank.readers.fsdp.dtensors import DTensorPart, DTensors
from xrank.readers.fsdp.pickled import unwrapped, wrapper_of
from xrank.readers.fsdp.sharded_tensors import ShardedPart, sharded_part

__all__ = ["RankFile", "read_rank_file"]


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's file, read by its metadata alone."""

    rank: int
    archive: TorchArchive
    dtensors: Mapping[str, DTensorPart]
    sharded: Mapping[str, ShardedPart]
    plain: Mapping[str, ArchivedTensor]
    others: tuple[str, ...]
    """Names of plain values that are no tensors."""

    @property
    def origin(self) -> Origin:
        """Makes the errors that name the file."""
        return Origin(self.archive.path, self.rank)


def read_rank_file(path: str, rank: int) -> RankFile:
    """Return what a rank's file holds.

    Raises:
        IncompleteError: there is no such file.
        ContradictionError: it is another rank's.
        CorruptError, UnsafeError: it is damaged, or more than tensors by name.
        LayoutError: a DTensor's placements are none that a layout can say.
    """
    archive = read_archive(path, rank=rank)
    origin = Origin(path, rank)
    state = archive.value
    if not isinstance(state, dict):
        refuse_inert(state, path, rank)
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise origin.corrupt("holds no state dict", got=type(state).__name__, want="a dict of tensors by name")
    reader = DTensors(archive, rank)
    dtensors: dict[str, DTensorPart] = {}
    sharded: dict[str, ShardedPart] = {}
    plain: dict[str, ArchivedTensor] = {}
    others: list[str] = []
    for name, saved in state.items():
        value = unwrapped(saved)
        wrapper = wrapper_of(value, origin)
        if isinstance(value, ArchivedTensor):
            plain[name] = value
        elif wrapper is not None and wrapper.kind == "DTensor":
            part = reader.part(name, wrapper)
            if part is not None:
                dtensors[name] = part
        elif wrapper is not None and wrapper.kind == "ShardedTensor":
            sharded[name] = sharded_part(name, wrapper, origin)
        elif wrapper is not None:
            raise origin.unsafe(f"{shown(name)} is of a kind of tensor that is not known", got=shown(wrapper.kind))
        else:
            refuse_inert(value, path, rank)
            others.append(name)
    return RankFile(rank, archive, dtensors, sharded, plain, tuple(others))
