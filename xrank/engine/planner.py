"""The plan of a conversion: for each output tensor the copies that make it, proven to cover it exactly once.

Everything here follows from metadata; no byte of a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

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


class Pieces:
    """Pieces of a tensor as a cache key; `side` is their ranks or their x. A model has some dozens of distinct ones."""

    def __init__(self, side: IntArray, nests: NestTable) -> None:
        self.side, self.nests = side, nests
        self._key = (side.tobytes(), nests.y.tobytes(), nests.loops.tobytes())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pieces) and self._key == other._key


@lru_cache(maxsize=1024)
def compose(pieces: Pieces, part: tuple[Nest, ...]) -> tuple[IntArray, NestTable]:
    """Return the pieces of a part, sorted by y: for each its row in `pieces`, and the nest from its record to the part.

    The part is canonical; its x is an address in the part, its y in the tensor, as that of the pieces. LayoutError if
    two cuts have strides that do not divide each other, and would make too many pieces.
    """
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
    alike: Alike = {}

    def plan_tensor(output: OutputTensor) -> TensorPlan:
        shard = shards[output.name]
        ties = [shards[name] for name in (tied or {}).get(output.name, ())]
        _check_types(shard, output)
        if output.name not in whole:
            copies, replicas = divide_replicas(shard, source, alike)
            others: dict[int, str] = {}
            for other in ties:
                replicas = _join_copies(replicas, _collect_tied_copies(shard, other, source))
                others.update((record, other.name) for record in other.record.tolist())
            for record in shard.record.tolist() if others else ():
                others.pop(record, None)  # one storage under both names cannot differ
            whole[output.name] = copies, replicas, others
        copies, replicas, others = whole[output.name]
        if output.part is not None:
            part = output.part
            copies, replicas = (
                Copies(every.rank[rows], every.record[rows], nests)
                for every, wanted in ((copies, part.nests), (replicas, part.compared))
                for rows, nests in [compose(Pieces(every.nests.x, every.nests), wanted)]
            )
            _check_part(output, copies, NestTable.from_nests([swap(nest) for nest in part.nests]))
        changed = {
            record: (part.factor, part.added)
            for part in reversed([shard, *ties])
            if (part.factor, part.added) != (1.0, 0)
            for record in part.record.tolist()
        }
        update = None
        if rule := (updates or {}).get(output.name):
            pair = (OutputTensor(name, shards[name].dtype, shards[name].shape) for name in (rule.a, rule.b))
            a, b = map(plan_tensor, pair)
            update = UpdatePlan(a, b, rule)
        return TensorPlan(output, shard.dtype, copies, replicas, others, update, changed)

    return Plan(source, tuple(FilePlan(file, tuple(map(plan_tensor, file.tensors))) for file in files))


def select_tensors(plan: Plan, tensors: Iterable[TensorPlan]) -> Plan:
    """Return a plan of some tensors of another plan, each as a bare file of its own."""
    files = ((OutputFile.bare(tensor.output), tensor) for tensor in tensors)
    return Plan(plan.source, tuple(FilePlan(f, (replace(tensor, output=f.tensors[0]),)) for f, tensor in files))


def _check_part(output: OutputTensor, copies: Copies, wanted: NestTable) -> None:
    """Prove on the destination, once more, that the part is covered exactly once."""
    fault = _part_fault(Pieces(copies.rank, copies.nests), Pieces(wanted.x, wanted), output.num_elements)
    if fault is not None:
        where = range_text(output.shape, fault.address, fault.address)
        raise ContradictionError(
            f"{output.name}: a part of shape {list(output.shape)} is not covered exactly once",
            tensor=output.name,
            index_range=where,
            got=f"{fault.kind} at {where}",
            want=_ONCE,
            next_step="report both layouts: this is a bug in xrank",
        )


Alike: TypeAlias = dict[tuple[int, int, tuple[int, ...]], tuple[Copies, Copies, CoverageFault | None]]
"""Copies, replicas and fault of tensors with the same tables, by these tables' ids; a row stands for its record."""


def divide_replicas(shard: StoredShard, source: StoredModel, alike: Alike | None = None) -> tuple[Copies, Copies]:
    """Return the pieces that make a tensor, proven to cover it exactly once, and the pieces that repeat them.

    If several ranks hold a piece for the same place, the lowest rank's is copied. `alike` keeps what further tensors of
    the source have in common with this one. Errors as `make_plan`.
    """
    whole, is_lost = shard, source.records.is_lost(shard.record)
    if is_lost.any():  # a table of its own, which `alike` must not mistake for another tensor's
        rows, alike = np.flatnonzero(~is_lost), None
        shard = replace(whole, rank=whole.rank[rows], record=whole.record[rows], nests=whole.nests.take(rows))
    alike, kind = {} if alike is None else alike, (id(shard.rank), id(shard.nests), shard.shape)
    if kind not in alike:
        first, others, fault = divide_pieces(Pieces(shard.rank, shard.nests), math.prod(shard.shape))
        every = Copies(shard.rank, np.arange(len(shard.rank)), shard.nests)
        alike[kind] = every.take(first), every.take(others), fault
    first_rows, other_rows, fault = alike[kind]
    copies, replicas = (Copies(one.rank, shard.record[one.record], one.nests) for one in (first_rows, other_rows))
    if fault is not None:
        lost = find_lost_parts(whole, source)[0] if is_lost.any() else None
        raise coverage_error(shard, copies, fault, math.prod(shard.shape), source, lost)
    return copies, replicas


def find_lost_parts(shard: StoredShard, source: StoredModel) -> list[tuple[int, str]]:
    """Return (rank, file) of a tensor's pieces whose bytes are lost, by rising rank."""
    rows = np.flatnonzero(source.records.is_lost(shard.record))
    files = source.records.file[shard.record[rows]].tolist()
    return sorted(
        {(rank, source.files[file].path) for rank, file in zip(shard.rank[rows].tolist(), files, strict=True)}
    )


@lru_cache(maxsize=256)
def divide_pieces(pieces: Pieces, num_elements: int) -> tuple[IntArray, IntArray, CoverageFault | None]:
    """Return the rows of the first piece of each place, the rows that repeat them, both by rising y, and the fault.

    The lowest rank's piece of a place is first; the first pieces must cover [0, num_elements) exactly once.
    """
    # Stable by rank, so that the first of equal destinations is the lowest rank's on every rank that plans.
    by_rank = np.argsort(pieces.side, kind="stable")
    is_first = first_of_equal(destination_keys(pieces.nests)[by_rank])
    parts = (by_rank[is_first], by_rank[~is_first])
    first, others = (rows[np.argsort(pieces.nests.y[rows], kind="stable")] for rows in parts)
    return first, others, find_fault(pieces.nests.take(first), num_elements)


@lru_cache(maxsize=1024)
def _part_fault(pieces: Pieces, wanted: Pieces, num_elements: int) -> CoverageFault | None:
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
        what = f"{other.name} is tied to {shard.name}, but they differ in kind"
        got, want = (f"{one.dtype} {list(one.shape)}" for one in (other, shard))
        next_step = "correct tie_word_embeddings in config.json, or the [alias] of the layout file"
        raise ContradictionError(what, tensor=other.name, got=got, want=want, next_step=next_step)
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
_ONCE = "every element exactly once"


def coverage_error(
    shard: StoredShard,
    copies: Copies,
    fault: CoverageFault,
    num_elements: int,
    source: StoredModel,
    lost: tuple[int, str] | None,
) -> XrankError:
    """Return the error that names a fault's tensor, range, ranks and files; `lost` is the rank and file of a part."""
    name, table = shard.name, [copies.nests[i] for i in range(len(copies))]
    if fault.kind == "gap":
        # The gap ends where the next piece begins, which is exact for whole missing shards.
        end = min((nest.y for nest in table if nest.y > fault.address), default=num_elements)
        where = range_text(shard.shape, fault.address, end - 1)
        what = f"{name}, {where}: no rank wrote these elements"
        got = f"pieces of {ranks_text(shard.rank.tolist())}" if len(shard.rank) else "no piece at all"
        next_step = f"let the missing rank write again, then {AGAIN}; nothing was written"
        facts: dict[str, Any] = {"tensor": name, "index_range": where}
        if lost is not None:
            facts["rank"], facts["file"] = lost
            what, got = f"{name}, {where}: rank {lost[0]}'s part is damaged or missing", f"its file: {lost[1]}"
            next_step = f"restore {lost[1]}, then {AGAIN}; xrank inspect lists all that is missing"
        return IncompleteError(what, got=got, want=_ONCE, next_step=next_step, **facts)
    holders = [
        (int(copies.rank[i]), source.files[int(source.records.file[copies.record[i]])].path)
        for i, nest in enumerate(table)
        if contains(nest, fault.address)
    ]
    holder: tuple[int, str] | tuple[None, None] = (None, None)
    if fault.kind == "outside":
        holder, at = holders[0] if holders else holder, None
        what, got = f"{name}: a rank holds elements outside the tensor", f"address {fault.address:,}"
        want = f"less than {num_elements:,}, the size of {list(shard.shape)}"
    else:
        holder, at = holders[-1] if holders else holder, range_text(shard.shape, fault.address, fault.address)
        what = f"{name}, from {at} on: held twice, by {ranks_text(rank for rank, _ in holders)}, in different parts"
        got = ", ".join(f"rank {rank} in {path}" for rank, path in holders)
        want = f"{_ONCE}, or equal pieces as replicas"
    facts = {"tensor": name, "rank": holder[0], "file": holder[1], "index_range": at}
    return ContradictionError(what, got=got, want=want, next_step=_CHECK_LAYOUT, **facts)
