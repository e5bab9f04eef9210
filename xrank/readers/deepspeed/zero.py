"""The fp32 weights of a ZeRO checkpoint: all ranks' partitions, checked against each other and the shapes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from xrank.errors import ContradictionError, IncompleteError
from xrank.plan.source import StoredShard
from xrank.readers.copies import CopiedValues
from xrank.readers.deepspeed.agreement import Agreement
from xrank.readers.deepspeed.flat_rows import FlatRows, FlatTensors
from xrank.readers.deepspeed.partitions import (
    locate_interleaved,
    locate_successive,
    partition_numel,
    piece_numel,
    stretches,
)
from xrank.readers.deepspeed.slices import check_slices
from xrank.readers.deepspeed.states import Partition, Shapes, read_partition
from xrank.readers.records import Records
from xrank.stores import places
from xrank.words import ranks_text


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of all ranks."""

    all: tuple[Partition, ...]
    flats: FlatTensors

    @property
    def is_interleaved(self) -> bool:
        """Whether they are cut as in stage 3."""
        return self.all[0].is_interleaved

    @property
    def stage(self) -> int | None:
        """The stage that they record, if any."""
        return self.all[0].stage

    def of(self, ranks: Sequence[int]) -> Partitions:
        """Return the partitions of some of the ranks, as those of a group of their own."""
        return Partitions(tuple(self.all[rank] for rank in ranks), self.flats.of(ranks))


def read_partitions(
    folder: str, paths: Mapping[int, str], records: Records, agreement: Agreement, *, num_ranks: int | None = None
) -> Partitions:
    """Return the partitions of all ranks of one data-parallel group.

    Args:
        folder: the checkpoint's folder.
        paths: their files, by rank.
        records: collects the files.
        agreement: collects their facts.
        num_ranks: number of ranks if the model has experts, whose groups have fewer partitions.

    Raises:
        IncompleteError: a rank's file is missing.
        ContradictionError: ranks disagree, or a file is another rank's.
        CorruptError, UnsafeError, UsageError: as `read_partition`.
    """
    # Every partition records the number of ranks, so a missing rank 0 can still be reported.
    start = min(paths)
    first = read_partition(paths[start], start)
    has_experts, num_ranks = num_ranks is not None, num_ranks or max(first.counts)
    # Before the others are read: the names of the files already show a missing rank.
    check_ranks(folder, paths, num_ranks, "optim_states")
    if any(num_ranks % count if has_experts else count != num_ranks for count in first.counts):
        raise first.origin.corrupt(
            "its groups have different numbers of partitions", got=ascii(first.counts)[:200], want=str(num_ranks)
        )
    partitions = []
    rows = FlatRows([f"fp32 group {number}" for number in range(len(first.flats))], num_ranks)
    for rank in range(num_ranks):
        partition = first if rank == start else read_partition(paths[rank], rank)
        if (partition.is_interleaved, len(partition.flats)) != (first.is_interleaved, len(first.flats)):
            raise ContradictionError(
                partition.origin.locate("has other groups than rank 0"),
                rank=rank,
                file=partition.origin.path,
                got=f"{len(partition.flats)} groups",
                want=f"{len(first.flats)} groups, as in {first.origin.path}",
                next_step="all files must come from one save of one run; copy them again",
            )
        agreement.add(partition.facts, partition.origin)
        rows.add(rank, partition.flats, records.add_archive(partition.archive), partition.origin)
        partitions.append(partition)
    return Partitions(tuple(partitions), rows.table())


def check_ranks(folder: str, found: Mapping[int, str], num_ranks: int, kind: str) -> None:
    """Check that exactly the ranks of the run wrote a file.

    Raises:
        IncompleteError: ranks are missing.
        ContradictionError: there are files of ranks beyond the run's.
    """
    beyond = [rank for rank in found if rank >= num_ranks]
    if beyond:
        raise ContradictionError(
            f"{found[beyond[0]]} belongs to rank {beyond[0]}, but the checkpoint has {num_ranks} partitions",
            rank=beyond[0],
            file=found[beyond[0]],
            got=f"files of {ranks_text(found)}",
            want=f"ranks 0-{num_ranks - 1}",
            next_step="move the files of a run with more ranks to another folder; runs with MiCS, whose partitions "
            "repeat, are not read",
        )
    missing = [rank for rank in range(num_ranks) if rank not in found]
    if missing:
        file = _file_name(list(found.values()), missing[0], kind)
        text = ranks_text(missing)
        raise IncompleteError(
            f"{text} of {num_ranks} left no {file if len(missing) == 1 else f'*_{kind}.pt'} in {folder}",
            rank=missing[0],
            file=os.path.join(folder, file),
            got=f"files of {ranks_text(found)}" if found else "none",
            want=f"one of each of {num_ranks} ranks",
            next_step=f"copy {text}'s *_{kind}.pt into the folder; nodes without a shared disk keep their own files",
        )


def _file_name(others: Sequence[str], rank: int, kind: str) -> str:
    """Return the name of a rank's file from those of other ranks, which differ in precision and model-parallel rank."""
    name = os.path.basename(others[0]) if others else f"zero_pp_rank_0_mp_rank_00_{kind}.pt"
    return re.sub(r"(?<=zero_pp_rank_)\d+", str(rank), name)


def locate_trained(partitions: Partitions, groups: Sequence[Shapes]) -> dict[str, StoredShard]:
    """Return every tensor in the partitions.

    Args:
        partitions: the partitions of all ranks.
        groups: whole shapes by group, in the partitions' order.

    Raises:
        ContradictionError: the partitions' sizes do not match the shapes.
    """
    if partitions.is_interleaved:
        return _locate_interleaved_shards(partitions, groups)
    if len(groups) != len(partitions.all[0].flats):
        raise _size_error(
            partitions.all[0], f"{len(partitions.all[0].flats)} groups", f"{len(groups)}, of param_shapes"
        )
    found: dict[str, StoredShard] = {}
    for number, shapes in enumerate(groups):
        found.update(locate_group(partitions, number, shapes))
    check_copies(partitions)
    return found


def check_copies(partitions: Partitions) -> None:
    """Check that no partition of stages 1 and 2 is a copy of another rank's.

    Raises:
        ContradictionError: one is.
    """
    copies = CopiedValues()
    for rank, partition in enumerate(partitions.all):
        copies.add(partition.archive, partition.flats, int(partitions.flats.length[rank].sum()), partition.origin)


def _locate_interleaved_shards(partitions: Partitions, groups: Sequence[Shapes]) -> dict[str, StoredShard]:
    flats, num_ranks, copies = partitions.flats, len(partitions.all), CopiedValues()
    shapes = {name: shape for group in groups for name, shape in group.items()}
    numels = np.array([prod(shape) for shape in shapes.values()], dtype=np.int64)
    sizes = -(-numels // num_ranks)
    wanted = int(sizes.sum())
    for rank, partition in enumerate(partitions.all):
        if int(flats.length[rank].sum()) != wanted:
            raise _size_error(
                partition, f"{int(flats.length[rank].sum()):,} elements", f"{wanted:,}, by the shapes of all parameters"
            )
        # `locate_interleaved` finds every rank's piece at the borders of rank 0's sub-groups.
        if (flats.length[rank] != flats.length[0]).any():
            group = int(np.flatnonzero(flats.length[rank] != flats.length[0])[0])
            raise _size_error(
                partition,
                f"{int(flats.length[rank, group]):,} elements in sub-group {group}",
                f"{int(flats.length[0, group]):,}, as on rank 0",
            )
        # Pieces end in padding, which may be equal on all ranks, so it does not count.
        count = int(np.clip(numels - rank * sizes, 0, sizes).sum())
        copies.add(partition.archive, partition.flats, count, partition.origin)
    if len(set(flats.dtypes)) > 1 or (shapes and not flats.dtypes):
        raise _size_error(partitions.all[0], "weights of " + " and ".join(sorted(set(flats.dtypes))), "one type")
    ends = np.concatenate(([0], np.cumsum(flats.length[0])))
    found, position = {}, 0
    for name, shape in shapes.items():
        size = piece_numel(prod(shape), num_ranks)
        # The sub-groups that contain the piece: one in today's DeepSpeed, or several.
        low = max(int(np.searchsorted(ends, position, side="right")) - 1, 0)
        high = int(np.searchsorted(ends, position + size, side="left"))
        # A tensor without elements at the stream's end lies behind the last sub-group: it gets that one.
        columns = list(range(min(low, len(ends) - 2), max(high, low + 1))) or [0]
        found[name] = locate_interleaved(name, shape, flats, columns, position - int(ends[columns[0]]))
        position += size
    return found


def locate_group(partitions: Partitions, number: int, shapes: Shapes) -> dict[str, StoredShard]:
    """Return every tensor of a group in stages 1 and 2; arguments and errors as `locate_trained`."""
    first = partitions.all[0]
    # A record of too few groups gets an empty list here, which the check below refuses.
    paddings = None if first.alignments is None else (*first.alignments, *[()] * len(first.flats))[number]
    if paddings is not None and len(paddings) != len(shapes):
        raise _size_error(first, f"{len(paddings)} paddings in group {number}", f"{len(shapes)}, one per parameter")
    spans = stretches(list(shapes.values()), paddings)
    total = max((end for _, end in spans), default=0) + (paddings[-1] if paddings else 0)
    lengths = partitions.flats.length[:, number].tolist()
    size = partition_numel(total, lengths)
    if size is None:
        raise _length_error(partitions, number, total, lengths)
    for rank, partition in enumerate(partitions.all):
        _check_paddings(partition, number, lengths[rank], size)
    check_slices(partitions.all, number, shapes, spans, size)
    return {
        name: locate_successive(name, shape, partitions.flats, number, size, first_element)
        for (name, shape), (first_element, _) in zip(shapes.items(), spans, strict=True)
    }


def _length_error(partitions: Partitions, number: int, total: int, lengths: Sequence[int]) -> ContradictionError:
    num_ranks = len(lengths)
    size = 2 * -(-total // (2 * num_ranks))
    lean = [max(0, min(size, total - rank * size)) for rank in range(num_ranks)]
    rank = next(rank for rank in range(num_ranks) if lengths[rank] != lean[rank])
    return _size_error(
        partitions.all[rank],
        f"{lengths[rank]:,} elements in group {number}",
        f"{lean[rank]:,}, of the {total:,} that the shapes give the group",
    )


def _size_error(partition: Partition, got: str, want: str) -> ContradictionError:
    folder = os.path.dirname(partition.origin.path)
    swapped = (
        " (NVMe offload keeps weights outside the files)" if "offloaded_tensors" in places.list_names(folder) else ""
    )
    return ContradictionError(
        partition.origin.locate(f"its fp32 weights do not fit the model states{swapped}"),
        rank=partition.origin.rank,
        file=partition.origin.path,
        got=got,
        want=want,
        next_step="all files must come from one save of one run; copy them again from where they were saved",
    )


def _check_paddings(partition: Partition, number: int, length: int, size: int) -> None:
    if partition.paddings is None or length == size:  # BF16_Optimizer stores its padding
        return
    padding = partition.paddings[number] if number < len(partition.paddings) else 0
    if length + padding != size:
        raise _size_error(partition, f"{length:,} and {padding:,} of padding in group {number}", f"{size:,} together")
