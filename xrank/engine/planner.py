"""The plan of a conversion: for each output tensor the copies that make it, proven to cover it exactly once.

Everything here follows from metadata; no byte of a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.casts import LowRank
from xrank.errors import AGAIN, ContradictionError, IncompleteError, UsageError, XrankError, option
from xrank.layout.coverage import CoverageFault, contains, destination_keys, find_fault, first_of_equal, range_text
from xrank.layout.nest_table import IntArray, NestTable, int_array
from xrank.layout.nests import Nest, intersect, swap
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import StoredModel, StoredShard
from xrank.words import ranks_text


def compose(pieces: NestTable, part: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    """Return the pieces of a part, sorted by y: for each its row in `pieces` and its nest.

    Args:
        pieces: x is an address in a record, y in the tensor.
        part: canonical; x is an address in the part, y in the tensor.

    Returns:
        Rows, and nests from the records' addresses to the part's.

    Raises:
        LayoutError: two cuts have strides that do not divide each other, and would make too many pieces.
    """
    return _compose(_PieceKey(pieces.x, pieces), part)


@lru_cache(maxsize=1024)
def _compose(pieces: _PieceKey, part: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    starts, ends = pieces.nests.y, pieces.nests.y_ends
    found: list[tuple[int, Nest]] = []
    for nest in part:
        to_part = swap(nest)
        end = nest.y + sum((n - 1) * ys for n, _, ys in nest.loops) + 1
        # Only pieces whose address range meets the nest's can intersect it.
        for row in np.flatnonzero((starts < end) & (ends > nest.y)).tolist():
            found += [(row, piece) for piece in intersect(pieces.nests[row], to_part)]
    # They were found piece by piece of the source; `Copies` has them by rising destination.
    found.sort(key=lambda item: item[1].y)
    return int_array(row for row, _ in found), NestTable.from_nests([nest for _, nest in found])


class Copies(Struct, frozen=True, eq=False):
    """Pieces of one tensor; row i copies from the x side of nest i, in that record, to the tensor's y addresses."""

    rank: IntArray
    record: IntArray
    nests: NestTable
    """Sorted by y."""

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, rows: IntArray) -> Copies:
        """Return these rows."""
        return Copies(self.rank[rows], self.record[rows], self.nests.take(rows))


class TensorPlan(Struct, frozen=True, eq=False):
    """How one output tensor is made."""

    output: OutputTensor
    source_dtype: str
    copies: Copies
    """Cover every element exactly once."""
    replicas: Copies
    """Repeat elements of `copies`; compared with them, never written."""
    tied: Mapping[int, str] = field(default_factory=dict)
    """Record -> name of the tied tensor it belongs to, for replicas of another tensor."""
    update: UpdatePlan | None = None
    """Update that is added to the tensor before it is cast and written."""
    changed: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Record -> `StoredShard.factor` and `StoredShard.added` of its elements; others are taken as they are."""

    @property
    def read(self) -> Iterable[Copies]:
        """All copies that are read for the tensor, those of its update too."""
        yield from (self.copies, self.replicas)
        if self.update is not None:
            yield from (*self.update.a.read, *self.update.b.read)

    @property
    def compared(self) -> Iterable[Copies]:
        """Replicas among the copies that are read."""
        yield self.replicas
        if self.update is not None:
            yield from (self.update.a.replicas, self.update.b.replicas)


class UpdatePlan(Struct, frozen=True, eq=False):
    """How the two tensors of a `LowRank` are made; each is read whole, and checked as any other."""

    a: TensorPlan
    b: TensorPlan
    rule: LowRank


class FilePlan(Struct, frozen=True, eq=False):
    """An output file and how its tensors are made, in the file's order."""

    output: OutputFile
    tensors: tuple[TensorPlan, ...]


class Plan(Struct, frozen=True, eq=False):
    """A whole conversion: its source and its output files."""

    source: StoredModel
    files: tuple[FilePlan, ...]

    @property
    def tensors(self) -> Iterable[TensorPlan]:
        """Every tensor's plan, file by file."""
        return (tensor for file in self.files for tensor in file.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all output files."""
        return sum(file.output.nbytes for file in self.files)


def make_plan(
    source: StoredModel,
    files: Sequence[OutputFile],
    *,
    tied: Mapping[str, Sequence[str]] | None = None,
    updates: Mapping[str, LowRank] | None = None,
) -> Plan:
    """Plan how the output files are made of the source's shards, and prove each tensor covered exactly once.

    Args:
        source: the stored model of a reader.
        files: the output files, which depend on names, dtypes and shapes alone.
        tied: output tensor -> names of source tensors that must have the same values; they are compared, not written.
        updates: output tensor, written whole -> update that is added to it.

    Raises:
        IncompleteError: no rank holds some elements of a tensor.
        ContradictionError: elements are held twice in different cuts, or lie outside the tensor.
    """
    shards = {shard.name: shard for shard in source.shards}
    whole: dict[str, tuple[Copies, Copies, dict[int, str]]] = {}

    def plan_tensor(output: OutputTensor) -> TensorPlan:
        shard = shards[output.name]
        ties = [shards[name] for name in (tied or {}).get(output.name, ())]
        _check_types(shard, output)
        if output.name not in whole:
            copies, replicas = divide_replicas(shard, source)
            others: dict[int, str] = {}
            for other in ties:
                replicas = _join_copies(replicas, _collect_tied_copies(shard, other, source))
                others.update((record, other.name) for record in other.record.tolist())
            for record in shard.record.tolist():
                others.pop(record, None)  # one storage under both names cannot differ
            whole[output.name] = copies, replicas, others
        copies, replicas, others = whole[output.name]
        if output.part is not None:
            copies, replicas = _part_of(copies, output.part.nests), _part_of(replicas, output.part.compared)
            _check_part(output, copies)
        update = (updates or {}).get(output.name)
        return TensorPlan(
            output,
            shard.dtype,
            copies,
            replicas,
            others,
            None if update is None else plan_update(update),
            {
                record: (part.factor, part.added)
                for part in reversed([shard, *ties])
                if (part.factor, part.added) != (1.0, 0)
                for record in part.record.tolist()
            },
        )

    def plan_update(update: LowRank) -> UpdatePlan:
        a, b = (
            plan_tensor(OutputTensor(name, shards[name].dtype, shards[name].shape)) for name in (update.a, update.b)
        )
        return UpdatePlan(a, b, update)

    return Plan(source, tuple(FilePlan(file, tuple(map(plan_tensor, file.tensors))) for file in files))


def select_tensors(plan: Plan, tensors: Iterable[TensorPlan]) -> Plan:
    """Return a plan of some tensors of another plan, each as a bare file of its own."""
    files = ((OutputFile.bare(tensor.output), tensor) for tensor in tensors)
    return Plan(plan.source, tuple(FilePlan(f, (replace(tensor, output=f.tensors[0]),)) for f, tensor in files))


def _part_of(copies: Copies, part: tuple[Nest, ...]) -> Copies:
    rows, nests = compose(copies.nests, part)
    return Copies(copies.rank[rows], copies.record[rows], nests)


def _check_part(output: OutputTensor, copies: Copies) -> None:
    """Prove on the destination, once more, that the part is covered exactly once."""
    part = output.part
    assert part is not None
    wanted = NestTable.from_nests([swap(nest) for nest in part.nests])
    fault = _part_fault(_PieceKey(copies.rank, copies.nests), _PieceKey(wanted.x, wanted), output.num_elements)
    if fault is not None:
        where = range_text(output.shape, fault.address, fault.address)
        raise ContradictionError(
            f"{output.name}: a part of shape {list(output.shape)} is not covered exactly once",
            tensor=output.name,
            index_range=where,
            got=f"{fault.kind} at {where}",
            want="every element exactly once",
            next_step="report both layouts: this is a fault of xrank",
        )


def divide_replicas(shard: StoredShard, source: StoredModel) -> tuple[Copies, Copies]:
    """Return the pieces that make a tensor, proven to cover it exactly once, and the pieces that repeat them.

    Pieces with the same destination are replicas; the lowest rank's piece is copied.

    Raises:
        IncompleteError, ContradictionError: as `make_plan`.
    """
    num_elements = math.prod(shard.shape)
    first, others, fault = divide_pieces(shard.rank, shard.nests, num_elements)
    copies, replicas = (
        Copies(shard.rank[rows], shard.record[rows], shard.nests.take(rows)) for rows in (first, others)
    )
    if fault is not None:
        raise coverage_error(shard, copies, fault, num_elements, source)
    return copies, replicas


class _PieceKey:
    """Nests of pieces as a cache key, with their ranks or x sides; a model has some dozens of distinct ones at most."""

    def __init__(self, side: IntArray, nests: NestTable) -> None:
        self.side, self.nests = side, nests
        self._key = (side.tobytes(), nests.y.tobytes(), nests.loops.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _PieceKey) and self._key == other._key


def divide_pieces(
    rank: IntArray, nests: NestTable, num_elements: int
) -> tuple[IntArray, IntArray, CoverageFault | None]:
    """Return the rows of the first piece of each place, the rows that repeat them, both by rising y, and the fault.

    The lowest rank's piece of a place is first; the first pieces must cover [0, num_elements) exactly once.
    """
    return _divide_pieces(_PieceKey(rank, nests), num_elements)


@lru_cache(maxsize=256)
def _divide_pieces(pieces: _PieceKey, num_elements: int) -> tuple[IntArray, IntArray, CoverageFault | None]:
    # Stable by rank, so that the first of equal destinations is the lowest rank's on every rank that plans.
    by_rank = np.argsort(pieces.side, kind="stable")
    is_first = first_of_equal(destination_keys(pieces.nests)[by_rank])
    first, others = (
        rows[np.argsort(pieces.nests.y[rows], kind="stable")] for rows in (by_rank[is_first], by_rank[~is_first])
    )
    return first, others, find_fault(pieces.nests.take(first), num_elements)


@lru_cache(maxsize=1024)
def _part_fault(pieces: _PieceKey, wanted: _PieceKey, num_elements: int) -> CoverageFault | None:
    return find_fault(pieces.nests, num_elements, wanted.nests)


def _join_copies(a: Copies, b: Copies) -> Copies:
    if not len(a):
        return b
    # One by one, as tables may have loops of different depths; only tied tensors come here.
    nests = [table.nests[i] for table in (a, b) for i in range(len(table))]
    rank, record = np.concatenate((a.rank, b.rank)), np.concatenate((a.record, b.record))
    order = np.argsort(np.array([nest.y for nest in nests]), kind="stable")
    return Copies(rank[order], record[order], NestTable.from_nests([nests[i] for i in order]))


def _collect_tied_copies(shard: StoredShard, other: StoredShard, source: StoredModel) -> Copies:
    """Return all pieces of a tensor that is tied to `shard`, as replicas of `shard`."""
    if (shard.dtype, shard.shape) != (other.dtype, other.shape):
        raise ContradictionError(
            f"{other.name} is tied to {shard.name}, but they differ in kind",
            tensor=other.name,
            got=f"{other.dtype} {list(other.shape)}",
            want=f"{shard.dtype} {list(shard.shape)}",
            next_step="correct tie_word_embeddings in config.json, or the [alias] of the layout file",
        )
    copies, replicas = divide_replicas(other, source)
    return _join_copies(copies, replicas)


def _check_types(shard: StoredShard, output: OutputTensor) -> None:
    """Refuse to multiply or cast other elements than floating-point ones."""
    is_float = dtypes.dtype(shard.dtype).is_float
    if shard.factor != 1.0 and not is_float:
        what, want = "the recipe multiplies this tensor, which is not floating-point", "a floating-point type"
        next_step = f"keep the names with {option('recipe', 'none')}, or save the weights unquantized"
    elif shard.dtype != output.dtype and not (is_float and dtypes.dtype(output.dtype).is_float):
        what, want = f"no cast from {shard.dtype} to {output.dtype}", "a floating-point type on both sides"
        next_step = f"use {option('dtype', 'keep')}"
    else:
        return
    raise UsageError(f"{output.name}: {what}", tensor=output.name, got=shard.dtype, want=want, next_step=next_step)


_CHECK_LAYOUT = f"check the layout that the ranks recorded, or the one given by {option('layouts')}"


def coverage_error(
    shard: StoredShard, copies: Copies, fault: CoverageFault, num_elements: int, source: StoredModel
) -> XrankError:
    """Return the error that names a fault's tensor, range, ranks and files."""
    table = [copies.nests[i] for i in range(len(copies))]
    if fault.kind == "gap":
        # The gap ends where the next piece begins, which is exact for whole missing shards.
        later = [nest.y for nest in table if nest.y > fault.address]
        where = range_text(shard.shape, fault.address, min(later, default=num_elements) - 1)
        return IncompleteError(
            f"{shard.name}, {where}: no rank left these elements",
            tensor=shard.name,
            index_range=where,
            got=f"pieces of {ranks_text(shard.rank.tolist())}" if len(shard.rank) else "no piece at all",
            want="every element exactly once",
            next_step=f"let the missing rank write again, then {AGAIN}; nothing was written",
        )
    holders = [
        (int(copies.rank[i]), source.files[int(source.records.file[copies.record[i]])].path)
        for i, nest in enumerate(table)
        if contains(nest, fault.address)
    ]
    if fault.kind == "outside":
        return ContradictionError(
            f"{shard.name}: a rank holds elements outside the tensor",
            tensor=shard.name,
            rank=holders[0][0] if holders else None,
            file=holders[0][1] if holders else None,
            got=f"address {fault.address:,}",
            want=f"less than {num_elements:,}, the size of {list(shard.shape)}",
            next_step=_CHECK_LAYOUT,
        )
    where = range_text(shard.shape, fault.address, fault.address)
    return ContradictionError(
        f"{shard.name}, from {where} on: held twice, by {ranks_text(rank for rank, _ in holders)}, cut differently",
        tensor=shard.name,
        rank=holders[-1][0] if holders else None,
        file=holders[-1][1] if holders else None,
        index_range=where,
        got=", ".join(f"rank {rank} in {path}" for rank, path in holders),
        want="every element exactly once, or equal pieces as replicas",
        next_step=_CHECK_LAYOUT,
    )
