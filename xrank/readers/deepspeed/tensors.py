"""The tensors of a DeepSpeed checkpoint: the fp32 weights in ZeRO's partitions, and those in the model states."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank.dtypes import dtype
from xrank.errors import ContradictionError
from xrank.formats.pickles import new_families
from xrank.formats.torch_archive import ArchivedTensor
from xrank.layout.nest_table import IntArray, NestTable
from xrank.layout.stored_model import StoredShard
from xrank.readers.base import RAISING, Faults, drop_outvoted
from xrank.readers.deepspeed.files import (
    Agreement,
    ModelState,
    Partition,
    Shape,
    Shapes,
    read_model_state,
    read_partition,
)
from xrank.readers.placement import HeldTensor, pieces_of, whole
from xrank.readers.records import CopiedValues, Records, absent_rank_error, index_lost
from xrank.storage import places
from xrank.storage.regular_file import Origin, quote
from xrank.words import ranks_text


class FlatTensors(Struct, frozen=True, eq=False):
    """One-dimensional tensors that every rank has; each array is [ranks, tensors]."""

    record: IntArray
    start: IntArray
    """Index of the first element, counted from the record's start."""
    length: IntArray
    """Number of elements."""
    dtypes: tuple[str, ...]


class FlatRows:
    """Collects one-dimensional tensors, rank by rank, into their table."""

    def __init__(self, names: Sequence[str], num_ranks: int) -> None:
        self._names = names
        self._record, self._start, self._length = (np.zeros((num_ranks, len(names)), dtype=np.int64) for _ in range(3))
        self._dtypes: tuple[str, ...] | None = None

    def add(self, rank: int, tensors: Sequence[ArchivedTensor], index: Callable[[str], int], origin: Origin) -> None:
        """Add a rank's tensors, in the order of the names."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        self._dtypes = self._dtypes or dtypes
        for column, tensor in enumerate(tensors):
            name = self._names[column]
            if len(tensor.shape) != 1 or (tensor.shape[0] > 1 and tensor.strides != (1,)):
                got = f"shape {quote(tensor.shape)}"
                raise origin.corrupt(f"{name} is not a row of elements", got, "one dimension")
            if tensor.dtype != self._dtypes[column]:
                problem = f"{name} has a different type than on earlier ranks"
                raise origin.contradiction(problem, tensor.dtype, self._dtypes[column])
            self._record[rank, column] = index(tensor.key)
            self._start[rank, column], self._length[rank, column] = tensor.storage_offset, tensor.shape[0]

    def table(self) -> FlatTensors:
        """Return the table of all ranks."""
        return FlatTensors(self._record, self._start, self._length, self._dtypes or ())


def piece_numel(numel: int, num_ranks: int) -> int:
    """Return the number of elements, with padding, that each rank has of a tensor in stage 3."""
    return -(-numel // num_ranks)


def locate_interleaved(
    name: str, shape: tuple[int, ...], flats: FlatTensors, columns: Sequence[int], offset: int = 0
) -> StoredShard:
    """Return a tensor of stage 3. It is padded to a multiple of the ranks; each rank's stream has an equal piece.

    The stream is made of the sub-groups `columns`, in order, each of equal length on all ranks; the tensor's piece
    begins at its element `offset`.
    """
    num_ranks, numel = len(flats.record), prod(shape)
    piece = piece_numel(numel, num_ranks)
    ranks = np.arange(num_ranks, dtype=np.int64)
    parts: list[tuple[IntArray, ...]] = []
    begin, dtype = 0, None
    for column in columns:
        end = begin + int(flats.length[0, column])
        # A piece may cross the border of two sub-groups: take the part of it in this one.
        low, high = max(begin, offset), min(end, offset + piece)
        if low < high:
            dtype = dtype or flats.dtypes[column]
            y = ranks * piece + (low - offset)
            # Elements past the tensor's end are padding.
            count = np.minimum(numel - y, high - low)
            parts.append((ranks, flats.record[:, column], flats.start[:, column] + (low - begin), y, count))
        begin = end
    dtype = dtype or flats.dtypes[columns[0]]
    return _shard(name, dtype, shape, parts)


def partition_numel(total: int, lengths: Sequence[int | None]) -> int | None:
    """Return the elements of a rank's partition of a group in stages 1 and 2; None if the lengths fit no rule.

    A group is padded to a multiple of twice the ranks (before version 0.3.16: of the ranks) and cut into equal
    partitions. Newer versions leave the padding at its end out of the file; `BF16_Optimizer` still stores it. The
    length of a lost partition is None.
    """
    num_ranks = len(lengths)
    for factor in (2, 1):
        size = factor * -(-total // (factor * num_ranks))
        # Without stored padding the last ranks' partitions are shorter, down to empty.
        lean = [max(0, min(size, total - rank * size)) for rank in range(num_ranks)]
        for wanted in (lean, [size] * num_ranks):
            if all(length in (None, want) for length, want in zip(lengths, wanted, strict=True)):
                return size
    return None


def stretches(shapes: Sequence[tuple[int, ...]], paddings: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return (first element, one past the last) of each tensor of a group in stages 1 and 2."""
    found, position = [], 0
    for number, shape in enumerate(shapes):
        found.append((position, position + prod(shape)))
        position = found[-1][1] + (paddings[number] if paddings is not None else 0)
    return found


def undo_dealing(shapes: Mapping[str, tuple[int, ...]], num_ranks: int) -> dict[str, tuple[int, ...]]:
    """Return a group's shapes in the order before `DEALS` (stage_1_and_2.py: _round_robin_reorder)."""
    # Rank r was dealt parameters r, r + ranks, r + 2 * ranks, ...
    dealt = [number for rank in range(num_ranks) for number in range(rank, len(shapes), num_ranks)]
    return {name: shape for _, (name, shape) in sorted(zip(dealt, shapes.items(), strict=True))}


def locate_successive(
    name: str, shape: tuple[int, ...], flats: FlatTensors, column: int, size: int, first: int
) -> StoredShard:
    """Return a tensor of stages 1 and 2: one range of a group's flat buffer, which is cut into equal partitions."""
    end = first + prod(shape)
    if first == end:
        return _shard(name, flats.dtypes[column], shape, [])
    # Only the partitions that the range touches: thousands of ranks times thousands of tensors would be too many.
    ranks = np.arange(first // size, (end - 1) // size + 1, dtype=np.int64)
    low = np.maximum(ranks * size, first)
    count = np.minimum((ranks + 1) * size, end) - low
    x = flats.start[ranks, column] + (low - ranks * size)
    return _shard(name, flats.dtypes[column], shape, [(ranks, flats.record[ranks, column], x, low - first, count)])


def _shard(name: str, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[IntArray, ...]]) -> StoredShard:
    empty = np.zeros(0, dtype=np.int64)
    rank, record, x, y, count = (
        np.concatenate([part[column] for part in parts]) if parts else empty for column in range(5)
    )
    # A rank that has only padding of the tensor counts zero or less.
    real = count > 0
    count = count[real]
    loops = np.stack((count, np.ones_like(count), np.ones_like(count)), axis=1)
    # A single element has no loop, and this row is `NestTable`'s filler for one.
    loops[count == 1] = (1, 0, 0)
    nests = NestTable(x[real], y[real], loops[:, None, :])
    return StoredShard(name, dtype, shape, rank[real], record[real], nests)


def shapes_of_slices(partitions: Sequence[Partition], number: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a group in the order of its flat buffer, where no model state records them."""
    numels: dict[str, int] = {}
    for partition in partitions:
        recorded = partition.slices[number] if partition.slices and number < len(partition.slices) else None
        if recorded is None:
            raise partition.origin.usage(
                "does not record the names of the fp32 weights",
                "no param_slice_mappings, and no param_shapes in the model states",
                next_step="save again with a newer DeepSpeed, or with a stage of ZeRO",
            )
        for name, (_, numel) in recorded.items():
            numels[name] = numels.get(name, 0) + numel
    origin = partitions[0].origin
    for name, numel in numels.items():
        shape = shapes.get(name)
        if shape is None or prod(shape) != numel:
            raise origin.contradiction(
                f"the size of {name} in its partition differs from the model states",
                f"{numel:,} elements",
                "a tensor in the model states" if shape is None else f"{prod(shape):,}, of {list(shape)}",
                tensor=name,
            )
    return {name: shapes[name] for name in numels}


def check_slices(every: Partitions, number: int, shapes: Shapes, places: Sequence[tuple[int, int]], size: int) -> None:
    """Check each partition's record of its parameters; it identifies the rank, unless one tensor fills several."""
    partitions = every.all
    recorded = [
        dict(partition.slices[number]) if partition.slices is not None and number < len(partition.slices) else None
        for partition in partitions
    ]
    ranks = range(len(recorded))
    expected = [_expect_slices(shapes, places, size, rank) for rank in ranks]
    if all(found in (None, want) for found, want in zip(recorded, expected, strict=True)):
        return
    # With round_robin_gradients DeepSpeed records the places of the undealt parameters (stage_1_and_2.py:
    # _link_all_hp_params).
    before = undo_dealing(shapes, len(recorded))
    ends = stretches(list(before.values()), None)
    if all(found in (None, _expect_slices(before, ends, size, rank)) for rank, found in enumerate(recorded)):
        return
    for rank, found in enumerate(recorded):
        if found in (None, expected[rank]):
            continue
        owner = next((partitions[other].origin.rank for other in ranks if expected[other] == found), None)
        whose = f"rank {owner}'s partition" if owner is not None else "parameters of no rank's partition"
        origin = partitions[rank].origin
        error = origin.contradiction(
            f"holds {whose} of group {number}",
            ascii(found)[:200],
            ascii(expected[rank])[:200],
            f"copy rank {origin.rank}'s file again from where it was saved",
        )
        every.faults.lose(error, origin.path)


def _expect_slices(
    shapes: Shapes, places: Sequence[tuple[int, int]], size: int, rank: int
) -> dict[str, tuple[int, int]]:
    low, high = rank * size, (rank + 1) * size
    ends = np.array([end for _, end in places], dtype=np.int64)
    names = list(shapes)
    found: dict[str, tuple[int, int]] = {}
    # Start at the first parameter that ends behind `low`: for each rank to pass all parameters would be quadratic.
    for at in range(int(np.searchsorted(ends, low, side="right")), len(places)):
        first, end = places[at]
        if first >= high:
            break
        if max(first, low) < min(end, high):
            found[names[at]] = (max(first, low) - low, min(end, high) - max(first, low))
    return found


class Partitions(Struct, frozen=True):
    """The partitions of all ranks."""

    all: tuple[Partition, ...]
    flats: FlatTensors
    faults: Faults = RAISING

    def of(self, ranks: Sequence[int]) -> Partitions:
        """Return the partitions of some of the ranks, as those of a group of their own."""
        rows, flats = list(ranks), self.flats
        own = FlatTensors(flats.record[rows], flats.start[rows], flats.length[rows], flats.dtypes)
        return Partitions(tuple(self.all[rank] for rank in ranks), own, self.faults)


def groups_of_slices(partitions: Partitions, shapes: Mapping[str, Shape]) -> tuple[Shapes, ...]:
    """Return the shapes of the fp32 weights by group, where no model state records them."""
    numbers = range(len(partitions.all[0].flats))
    return tuple(shapes_of_slices(partitions.all, number, shapes) for number in numbers)


def read_partitions(
    folder: str,
    paths: Mapping[int, str],
    records: Records,
    agreement: Agreement,
    *,
    num_ranks: int | None = None,
    faults: Faults = RAISING,
) -> Partitions:
    """Return the partitions of all ranks of one data-parallel group.

    `num_ranks` is given if the model has experts, whose groups have fewer partitions than there are ranks.
    """
    # Every partition records the number of ranks, so a missing rank 0 can still be reported.
    families = new_families()
    read: dict[int, Partition] = {}
    for rank in [min(paths)] if faults.raises else sorted(paths):
        with faults.losing(paths[rank]):
            read[rank] = read_partition(paths[rank], rank, families)
    read = drop_outvoted(read, _shared_facts, faults)
    if not read:
        raise faults.errors[0]
    first = read[min(read)]
    has_experts, num_ranks = num_ranks is not None, num_ranks or max(first.counts)
    # Before the others are read: the names of the files already show a missing rank.
    check_ranks(folder, paths, num_ranks, "optim_states", faults)
    if any(num_ranks % count if has_experts else count != num_ranks for count in first.counts):
        problem = "its groups have different numbers of partitions"
        raise first.origin.corrupt(problem, ascii(first.counts)[:200], str(num_ranks))
    partitions = []
    rows = FlatRows([f"fp32 group {number}" for number in range(len(first.flats))], num_ranks)
    for rank in range(num_ranks):
        path = paths.get(rank) or _path_of(folder, paths, rank, "optim_states")
        if rank not in read and path not in faults.files:
            read[rank] = read_partition(path, rank, families)
        partition = read.get(rank)
        if partition is None:
            origin, index = Origin(path, rank), index_lost(path, records)
            partitions.append(replace(first, origin=origin, slices=None, paddings=None, is_lost=True))
            rows.add(rank, first.flats, index, origin)
            continue
        if (partition.is_interleaved, len(partition.flats)) != (first.is_interleaved, len(first.flats)):
            got, want = f"{len(partition.flats)} groups", f"{len(first.flats)} groups, as in {first.origin.path}"
            raise partition.origin.contradiction("has different groups than rank 0", got, want)
        agreement.add(partition.facts, partition.origin)
        rows.add(rank, partition.flats, records.add_archive(partition.archive), partition.origin)
        partitions.append(partition)
    return Partitions(tuple(partitions), rows.table(), faults)


def _shared_facts(partition: Partition) -> dict[str, object]:
    """Return what is equal in the partitions of one save."""
    lengths = [flat.shape for flat in partition.flats] if partition.is_interleaved else len(partition.flats)
    return {**partition.facts, "partition_count": partition.counts, "lengths of the weights": lengths}


def _path_of(folder: str, found: Mapping[int, str], rank: int, kind: str) -> str:
    """Return the path of a rank's file that is missing."""
    # The names of other ranks' files differ in precision and model-parallel rank.
    name = os.path.basename(next(iter(found.values()), f"zero_pp_rank_0_mp_rank_00_{kind}.pt"))
    return os.path.join(folder, re.sub(r"(?<=zero_pp_rank_)\d+", str(rank), name))


def check_ranks(folder: str, found: Mapping[int, str], num_ranks: int, kind: str, faults: Faults = RAISING) -> None:
    """Check that exactly the ranks of the run wrote a file."""
    for rank in (rank for rank in found if rank >= num_ranks):
        error = Origin(found[rank], rank).contradiction(
            f"belongs to rank {rank}, but the checkpoint has {num_ranks} partitions",
            f"files of {ranks_text(found)}",
            f"ranks 0-{num_ranks - 1}",
            "move the files of a run with more ranks to another folder; runs with MiCS, whose partitions "
            "repeat, are not read",
        )
        faults.lose(error, found[rank])
    missing = [rank for rank in range(num_ranks) if rank not in found]
    for group in [missing] if faults.raises and missing else [[rank] for rank in missing]:
        file, who = _path_of(folder, found, group[0], kind), ranks_text(group)
        got = f"files of {ranks_text(found)}" if found else "none"
        step = f"copy *_{kind}.pt of {who} into the folder; nodes without a shared disk keep their own files"
        faults.lose(absent_rank_error(folder, file, group[0], num_ranks, who=who, got=got, next_step=step), file)


def locate_trained(partitions: Partitions, groups: Sequence[Shapes]) -> dict[str, StoredShard]:
    """Return every tensor in the partitions."""
    if partitions.all[0].is_interleaved:
        return _locate_interleaved_shards(partitions, groups)
    if len(groups) != len(partitions.all[0].flats):
        first = partitions.all[0]
        raise _size_error(first, f"{len(first.flats)} groups", f"{len(groups)}, of param_shapes")
    found: dict[str, StoredShard] = {}
    for number, shapes in enumerate(groups):
        found.update(locate_group(partitions, number, shapes))
    check_copies(partitions)
    return found


def check_copies(partitions: Partitions) -> None:
    """Check that no partition of stages 1 and 2 is a copy of another rank's."""
    copies = CopiedValues(partitions.faults)
    for rank, partition in enumerate(partitions.all):
        if not partition.is_lost:
            copies.add(partition.archive, partition.flats, int(partitions.flats.length[rank].sum()), partition.origin)


def _locate_interleaved_shards(partitions: Partitions, groups: Sequence[Shapes]) -> dict[str, StoredShard]:
    flats, num_ranks, copies = partitions.flats, len(partitions.all), CopiedValues(partitions.faults)
    shapes = {name: shape for group in groups for name, shape in group.items()}
    numels = np.array([prod(shape) for shape in shapes.values()], dtype=np.int64)
    sizes = -(-numels // num_ranks)
    wanted = int(sizes.sum())
    for rank, partition in enumerate(partitions.all):
        held = int(flats.length[rank].sum())
        if held != wanted:
            raise _size_error(partition, f"{held:,} elements", f"{wanted:,}, from the shapes of all parameters")
        # `locate_interleaved` finds every rank's piece at the borders of rank 0's sub-groups.
        if (flats.length[rank] != flats.length[0]).any():
            group = int(np.flatnonzero(flats.length[rank] != flats.length[0])[0])
            got = f"{int(flats.length[rank, group]):,} elements in sub-group {group}"
            raise _size_error(partition, got, f"{int(flats.length[0, group]):,}, as on rank 0")
        # Pieces end in padding, which may be equal on all ranks, so it does not count.
        count = int(np.clip(numels - rank * sizes, 0, sizes).sum())
        if not partition.is_lost:
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
    size = partition_numel(
        total, [None if one.is_lost else length for one, length in zip(partitions.all, lengths, strict=True)]
    )
    if size is None:
        num_ranks = len(lengths)
        wanted = 2 * -(-total // (2 * num_ranks))
        lean = [max(0, min(wanted, total - rank * wanted)) for rank in range(num_ranks)]
        rank = next(rank for rank in range(num_ranks) if lengths[rank] != lean[rank])
        want = f"{lean[rank]:,}, of the {total:,} that the shapes give the group"
        raise _size_error(partitions.all[rank], f"{lengths[rank]:,} elements in group {number}", want)
    for partition, length in zip(partitions.all, lengths, strict=True):
        if partition.paddings is None or length == size:  # BF16_Optimizer stores its padding
            continue
        padding = partition.paddings[number] if number < len(partition.paddings) else 0
        if length + padding != size:
            got = f"{length:,} and {padding:,} of padding in group {number}"
            raise _size_error(partition, got, f"{size:,} together")
    check_slices(partitions, number, shapes, spans, size)
    return {
        name: locate_successive(name, shape, partitions.flats, number, size, first_element)
        for (name, shape), (first_element, _) in zip(shapes.items(), spans, strict=True)
    }


def _size_error(partition: Partition, got: str, want: str) -> ContradictionError:
    problem = "its fp32 weights do not fit the model states"
    if "offloaded_tensors" in places.list_names(os.path.dirname(partition.origin.path)):
        problem += " (NVMe offload keeps weights outside the files)"
    step = "all files must come from one save of one run; copy them again from where they were saved"
    return partition.origin.contradiction(problem, got, want, step)


class Modules(Struct, frozen=True):
    """The model states of all ranks, combined."""

    state: ModelState
    """State of rank 0, or the only one."""
    shards: Mapping[str, StoredShard]
    """Buffers, and parameters outside the partitions."""
    shared: Mapping[str, str]
    """Alias -> the name that holds the data."""
    notes: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    """Names of all tensors of the state dict, in its order."""


def read_whole_modules(path: str, records: Records, agreement: Agreement) -> Modules:
    """Return the tensors of one file of whole modules: stages 0 to 2."""
    state = read_model_state(path)
    agreement.add(state.facts, state.origin)
    index = records.add_archive(state.archive)
    trained = {name for group in state.groups or () for name in group}
    shared = _ties(state, is_cut=False)
    shards, untrained = {}, 0
    for name, tensor in {**state.fragments, **state.module}.items():
        # Empty tensors share their (absent) storage, so they would all look tied.
        if name in trained or (name in shared and 0 not in tensor.shape):
            _check_shape(name, tensor, state, shared)
            continue
        shards[name] = _shard_of(name, [_part_of(tensor, state.origin, index, 0)])
        untrained += name not in state.buffer_names and name not in state.frozen
    for name, shape in state.frozen.items():
        if name in shards and shards[name].shape != shape:
            raise _shape_error(name, shards[name].shape, shape, state.origin)
    notes = []
    if untrained and trained:
        notes.append(("not-trained", f"{untrained} parameters have no fp32 weights; their stored values are used"))
    return Modules(state, shards, shared, (*notes, *_notes(state)), tuple(state.module))


def _ties(state: ModelState, *, is_cut: bool) -> dict[str, str]:
    """Return the ties among parameters: recorded ones, and names of the same memory.

    DeepSpeed records none in stage 0, and in no stage those of a module that its parent has under two names
    (engine.py: _get_shared_params).
    """
    held = {name for group in state.groups or () for name in group} | state.frozen.keys()
    names_of: dict[ArchivedTensor, list[str]] = {}
    for name, tensor in state.module.items():
        if name not in state.buffer_names and name not in state.shared and (is_cut or 0 not in tensor.shape):
            names_of.setdefault(tensor, []).append(name)
    found = dict(state.shared)
    for names in names_of.values():
        owners = [name for name in names if name in held]
        # With several owners of one memory it is open which of them the other names are tied to.
        if len(owners) == 1 or (not owners and not is_cut):
            owner = (owners or names)[0]
            found |= {name: owner for name in names if name != owner}
    return found


def _check_shape(name: str, tensor: ArchivedTensor, state: ModelState, shared: Mapping[str, str]) -> None:
    owner = shared.get(name, name)
    shapes = [group[owner] for group in state.groups or () if owner in group]
    if not shapes and owner in state.module:
        shapes = [state.module[owner].shape]
    if shapes and tensor.shape != shapes[0]:
        raise _shape_error(name, tensor.shape, shapes[0], state.origin)


def _shape_error(name: str, got: Shape, want: Shape, origin: Origin) -> ContradictionError:
    step = "copy the file again from where it was saved"
    return origin.contradiction(f"records two shapes of {name}", str(list(got)), str(list(want)), step, tensor=name)


def _notes(state: ModelState) -> list[tuple[str, str]]:
    notes = []
    if state.num_others:
        notes.append(("no-tensors", f"{state.num_others} entries of the state dict are not tensors, and are left out"))
    absent = [name for name in state.buffer_names if name not in state.module]
    if absent:
        notes.append(("absent-buffers", f"{len(absent)} buffers are in no state dict, such as {absent[0]}"))
    return notes


def read_rank_modules(
    folder: str,
    found: Mapping[int, str],
    num_ranks: int,
    records: Records,
    agreement: Agreement,
    faults: Faults = RAISING,
) -> Modules:
    """Return the tensors of all ranks' files in stage 3: a piece of each frozen parameter, and all buffers."""
    families = new_families()
    read: dict[int, ModelState] = {}
    for rank in [] if faults.raises else sorted(found):
        with faults.losing(found[rank]):
            read[rank] = read_model_state(found[rank], rank, families)
    read = drop_outvoted(read, _facts_alike, faults)
    check_ranks(folder, found, num_ranks, "model_states", faults)
    if not read and not faults.raises:
        raise faults.errors[0]
    paths = [found.get(rank) or _path_of(folder, found, rank, "model_states") for rank in range(num_ranks)]
    first: ModelState | None = read[min(read)] if read else None
    is_begun = False
    copies = CopiedValues(faults)
    buffers: dict[str, list[HeldTensor]] = {}
    wholes: dict[str, list[HeldTensor]] = {}
    names: list[str] = []
    known: set[str] = set()
    rows = FlatRows(names, len(paths))
    for rank, path in enumerate(paths):
        if faults.raises:
            state = read_model_state(path, rank, families)
        elif rank in read:
            state = read[rank]
        else:
            assert first is not None
            state = replace(first, origin=Origin(path, rank), is_lost=True)
        agreement.add(state.facts, state.origin)
        index = index_lost(path, records) if state.is_lost else records.add_archive(state.archive)
        # The first rank shows which frozen parameters are cut; `_check_alike` holds the other ranks to it.
        first = first or state
        if not is_begun:
            is_begun = True
            names = [name for name in first.frozen if not _is_whole(first, name, len(paths))]
            rows, known = FlatRows(names, len(paths)), set(names)
        _check_alike(first, state)
        for name in state.buffer_names:
            if name in state.module:
                buffer = state.module[name]
                buffers.setdefault(name, []).append(_part_of(buffer, state.origin, index, rank))
        for name, fragment in state.fragments.items():
            if name in state.frozen and name not in known:
                wholes.setdefault(name, []).append(_part_of(fragment, state.origin, index, rank))
        pieces = [_piece(state, name, len(paths)) for name in names]
        # The last ranks' pieces of a small tensor are padding alone, equal on these ranks without being copies.
        real = [piece for name, piece in zip(names, pieces, strict=True) if _numel_of(state, name, rank, len(paths))]
        count = sum(_numel_of(state, name, rank, len(paths)) for name in names)
        if not state.is_lost:
            copies.add(state.archive, real, count, state.origin)
        rows.add(rank, pieces, index, state.origin)
    assert first is not None
    shards = {name: _shard_of(name, held) for name, held in {**wholes, **buffers}.items()}
    flats = rows.table()
    for column, name in enumerate(names):
        shards[name] = locate_interleaved(name, first.frozen[name], flats, [column])
    return Modules(first, shards, _ties(first, is_cut=True), tuple(_notes(first)), tuple(first.module))


def _numel_of(state: ModelState, name: str, rank: int, num_ranks: int) -> int:
    """Return the number of a frozen parameter's elements in a rank's piece, without padding."""
    numel = prod(state.frozen[name])
    size = piece_numel(numel, num_ranks)
    return max(0, min(numel - rank * size, size))


def _is_whole(state: ModelState, name: str, num_ranks: int) -> bool:
    """Return whether a frozen parameter lies whole on every rank, because stage 3 was kept from cutting it."""
    shape, fragment = state.frozen[name], state.fragments.get(name)
    return fragment is not None and fragment.shape == shape != (piece_numel(prod(shape), num_ranks),)


def _piece(state: ModelState, name: str, num_ranks: int) -> ArchivedTensor:
    origin, shape, fragment = state.origin, state.frozen[name], state.fragments.get(name)
    if fragment is None:
        step = "save again with a newer DeepSpeed and without exclude_frozen_parameters"
        problem = f"contains no piece of the frozen parameter {name}"
        raise origin.contradiction(problem, None, "its piece among frozen_param_fragments", step, tensor=name)
    want = piece_numel(prod(shape), num_ranks)
    if fragment.shape != (want,):
        problem = f"contains a piece of {name} that does not fit {num_ranks} ranks"
        raise origin.contradiction(problem, str(list(fragment.shape)), f"[{want}], of {list(shape)}", tensor=name)
    # The placeholder has the type before quantization.
    placeholder = state.module.get(name)
    if placeholder is not None and dtype(placeholder.dtype).is_float and not dtype(fragment.dtype).is_float:
        step = "save again without zero_quantized_nontrainable_weights"
        problem = f"stores the frozen parameter {name} quantized"
        raise origin.usage(problem, fragment.dtype, placeholder.dtype, step)
    return fragment


def _facts_alike(state: ModelState) -> dict[str, object]:
    """Return what is equal in the model states of one save in stage 3."""
    shapes = state.groups, state.frozen, state.buffer_names, list(state.module)
    return {**state.facts, "shapes and names of parameters": shapes}


def _check_alike(first: ModelState, state: ModelState) -> None:
    for what, got, want in (
        ("the shapes of trained parameters", state.groups, first.groups),
        ("the shapes of frozen parameters", state.frozen, first.frozen),
        ("buffers", state.buffer_names, first.buffer_names),
        ("names", list(state.module), list(first.module)),
        ("ties", state.shared or first.shared, first.shared),  # only rank 0 records them
    ):
        if got != want:
            problem = f"differs from {first.origin.path} in {what}"
            raise state.origin.contradiction(problem, ascii(got)[:200], ascii(want)[:200])


def _part_of(tensor: ArchivedTensor, origin: Origin, index: Callable[[str], int], rank: int) -> HeldTensor:
    return HeldTensor.from_archive(tensor, rank=rank, file=origin.path, record=index(tensor.key))


def locate_whole(name: str, tensor: ArchivedTensor, origin: Origin, index: Callable[[str], int]) -> StoredShard:
    """Return a tensor that one file holds whole."""
    return _shard_of(name, [_part_of(tensor, origin, index, 0)])


def _shard_of(name: str, held: Sequence[HeldTensor]) -> StoredShard:
    first = held[0]
    for other in held:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            got, want = (f"{one.dtype} {list(one.shape)}" for one in (other, first))
            raise other.of(name).disagreement(first.rank, "type or shape", got, f"{want}, as in {first.file}")
    return pieces_of(name, held, first.shape, [whole(h.shape) for h in held])
