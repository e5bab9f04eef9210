"""Proof that an engine holds a trainer's values: both sides digest what they hold, and the engine's ranks compare.

Each rank lends a table: for each of its parts the tensor, a number for the part's set of elements, and its digest. The
trainer's parts are each element once, so their sums are those of the whole tensors. Among an engine's parts, equal sets
are replicas, and every replica is compared.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import sleep
from typing import TYPE_CHECKING, TypeAlias
from zlib import crc32

import numpy as np
from msgspec import Struct

from xrank import dtypes
from xrank.engine.planner import Alike, divide_replicas
from xrank.engine.value_digests import NUM_BLOCKS, DigestedPart, DigestRows, WordArray, digest_parts, digest_places
from xrank.errors import ContradictionError, UsageError
from xrank.layout.nest_table import NestTable
from xrank.layout.nests import Nest
from xrank.layout.stored_model import StoredShard
from xrank.ranks.memory import LocalBytes, MemoryBytes, kind_without_elements, local_bytes
from xrank.recipes.options import default_workers
from xrank.refit.directory import TrainerModel
from xrank.refit.peers import PAUSE_SECONDS, PeerRank
from xrank.refit.targets import Proof, TargetPlan
from xrank.words import likewise_text, list_text

if TYPE_CHECKING:
    import torch

TRAINER_VIEW, ENGINE_VIEW = -3, -2
"""Places of the table among the views that a rank lends: before the status and, in a trainer's rank, its outcome."""
_NBYTES = 64 << 20
"""Bytes of a table at most, enough for over 100,000 parts. Pages take memory once they are written."""
_HEAD = 5
"""Words before the rows: the checksum of all that follows, the `Stamp`, and the number of rows."""
Stamp: TypeAlias = tuple[int, int, int]
"""An engine's round and the trainer's offer, both 0 in a trainer's table; and the step."""


class HeldPart(Struct, frozen=True, eq=False):
    """A part of a tensor in this rank's memory, for its digest."""

    number: int
    """Of the tensor among those of the trainer; -1 if the part is not compared with them."""
    name: str
    part: DigestedPart
    places: int
    """See `digest_places`."""


def find_lent(model: TrainerModel, rank: int, views: Sequence[LocalBytes]) -> list[HeldPart]:
    """Return the parts of a trainer's tensors that this rank digests: each element once over all ranks."""
    found = []
    alike: Alike = {}
    for number, shard in enumerate(model.source.shards):
        copies, _ = divide_replicas(shard, model.source, alike)
        rows = DigestRows.of(shard.shape, dtypes.dtype(shard.dtype).nbytes)
        for record in np.unique(copies.record[model.live.rank[copies.record] == rank]).tolist():
            nests = copies.nests.take(np.flatnonzero(copies.record == record))
            part = DigestedPart(rows, nests, views[int(model.live.view[record])])
            found.append(HeldPart(number, shard.name, part, digest_places(part)))
    return found


class ProofPlan(Struct, frozen=True, eq=False):
    """What an engine rank digests after an update."""

    shards: Sequence[StoredShard]
    """The trainer's tensors."""
    parts: list[HeldPart]
    unproven: Mapping[str, str]
    """Tensor -> why it is not compared with the trainer's."""


def plan_proof(planned: TargetPlan, model: TrainerModel, *, is_compared: bool = True) -> ProofPlan:
    """Return the parts that an engine rank holds of a trainer's tensors, under the trainer's names."""
    numbers = {shard.name: number for number, shard in enumerate(model.source.shards)}
    shards = {shard.name: shard for shard in planned.plan.source.shards}
    found, unproven = [], dict.fromkeys(planned.whole, "the engine's loader gets the whole tensor")
    for one, tensor in zip(planned.plan.tensors, planned.tensors, strict=True):
        output, name = one.output, one.output.name
        if name in planned.whole:
            continue  # the loader changes it before the engine holds it
        if not is_compared:
            unproven[name] = "taken from another engine"
        elif one.source_dtype != output.dtype:
            unproven[name] = f"cast from {one.source_dtype} to {output.dtype}"
        elif one.changed or one.update is not None:
            unproven[name] = "computed from the trainer's values"
        elif name not in numbers or not _is_same(shards[name], model.source.shards[numbers[name]]):
            unproven[name] = "a tensor of the engine that is joined or split from the trainer's tensors"
        nests = None if output.part is None else output.part.nests
        part = _make_part(tensor, output.global_shape, dtypes.dtype(output.dtype).nbytes, nests)
        number = -1 if name in unproven else numbers[name]
        found.append(HeldPart(number, name, part, 0 if number < 0 else digest_places(part)))
    return ProofPlan(model.source.shards, found, unproven)


def _make_part(tensor: torch.Tensor, shape: Sequence[int], width: int, nests: Sequence[Nest] | None) -> DigestedPart:
    """Return a part of a tensor of that shape; without nests it is the whole."""
    table = NestTable.in_order(tensor.numel()) if nests is None else NestTable.from_nests(nests)
    return DigestedPart(DigestRows.of(shape, width), table, local_bytes(tensor))


def _is_same(one: StoredShard, other: StoredShard) -> bool:
    """Return whether two models have the same tensor: the same elements of the same records."""
    if one is other:
        return True
    pairs = ((one.record, other.record), *((getattr(each, axis) for each in (one.nests, other.nests)) for axis in "xy"))
    return one.shape == other.shape and all(np.array_equal(a, b) for a, b in pairs)


class DigestTable(MemoryBytes):
    """The digests of this rank's parts, for other ranks; shape [parts, 3]: tensor, set of elements, digest.

    Behind the rows it has the digests by block, which other ranks read where digests differ.
    """

    def __init__(self) -> None:
        super().__init__(memoryview(mmap.mmap(-1, _NBYTES)))
        self.words = np.frombuffer(self._content, np.uint64)

    def write(self, stamp: Stamp, parts: Sequence[HeldPart], blocks: WordArray) -> None:
        """Replace the digests by those of a step."""
        if (_HEAD + len(parts) * (3 + NUM_BLOCKS)) * 8 > self.nbytes:
            raise UsageError(
                f"this rank holds parts of {len(parts):,} tensors, too many for a proof",
                want=f"at most {(self.nbytes // 8 - _HEAD) // (3 + NUM_BLOCKS):,}",
                next_step="omit proof on both sides",
            )
        rows = np.empty((len(parts), 3), np.uint64)
        rows[:, 0], rows[:, 1] = [one.number for one in parts], [one.places for one in parts]
        rows[:, 2] = blocks.sum(axis=1)
        head, end = np.array([*stamp, len(parts)], np.uint64), _HEAD + rows.size
        self.words[0] = 0
        self.words[1:_HEAD], self.words[_HEAD:end] = head, rows.reshape(-1)
        self.words[end : end + blocks.size] = blocks.reshape(-1)
        self.words[0] = crc32(self.words[1:end].data)


class RankDigests(Struct, frozen=True, eq=False):
    """A table as another rank reads it."""

    role: str
    rank: int
    stamp: Stamp
    rows: WordArray
    read: Callable[[int, WordArray], object]
    """Fills an array from a word of the table on."""

    @classmethod
    def read_peer(cls, peer: PeerRank, view: int) -> RankDigests | None:
        """Return the table of another rank; None while it is written."""
        return cls.read_words(peer.role, peer.rank, lambda at, into: peer.read_view(view, 8 * at, into.data))

    @classmethod
    def read_words(cls, role: str, rank: int, read: Callable[[int, WordArray], object]) -> RankDigests | None:
        """Return the table whose words `read` brings; None while it is written."""
        head = np.empty(_HEAD, np.uint64)
        read(0, head)
        checksum, *stamp, count = head.tolist()
        if count > _NBYTES // 8 // 3:
            return None
        rows = np.empty((count, 3), np.uint64)
        if count:
            read(_HEAD, rows.reshape(-1))
        if crc32(rows.data, crc32(head[1:].data)) != checksum:
            return None
        return cls(role, rank, (stamp[0], stamp[1], stamp[2]), rows, read)

    def read_blocks(self, row: int) -> WordArray:
        """Return the digest of a part by block."""
        blocks = np.empty(NUM_BLOCKS, np.uint64)
        self.read(_HEAD + self.rows.size + row * NUM_BLOCKS, blocks)
        return blocks


class HeldDigests:
    """Digests of the values that parts had at one moment."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: Sequence[HeldPart] = ()
        self.blocks: WordArray = np.zeros((0, NUM_BLOCKS), np.uint64)

    def record(self, parts: Sequence[HeldPart]) -> None:
        """Digest the present values of these parts."""
        self.parts, self.blocks = parts, digest_parts([one.part for one in parts], default_workers())

    def find_changed(self, parts: Sequence[HeldPart] | None = None) -> list[tuple[str, str]]:
        """Return the tensors whose values have changed since, and where; `parts` are those in their places now."""
        parts = self.parts if parts is None else parts
        differs = digest_parts([one.part for one in parts], default_workers()) != self.blocks
        changed = zip(self.parts, differs, strict=True)
        return [
            (one.name, one.part.rows.describe_blocks(np.flatnonzero(its).tolist())) for one, its in changed if its.any()
        ]

    def check(self) -> tuple[int, int]:
        """Return the numbers of tensors and of bytes that are as they were; ContradictionError if values differ."""
        for name, where in (changed := self.find_changed()):
            raise ContradictionError(
                f"{name}: engine rank {self.rank} has different values than after its last update in {where}",
                tensor=name,
                rank=self.rank,
                index_range=where,
                got=f"other values{likewise_text([other for other, _ in changed[1:]])}",
                want="those of the last update",
                next_step="find what writes to the engine's weights, and call update again",
            )
        sizes = (int(one.part.nests.sizes.sum()) * one.part.rows.width for one in self.parts)
        return len({one.name for one in self.parts}), sum(sizes)


def whole_parts(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[HeldPart]:
    """Return an engine's own dense tensors as parts, which are compared with no trainer's."""
    return [
        HeldPart(-1, name, _make_part(tensor, tuple(tensor.shape), tensor.element_size(), None), 0)
        for name, tensor in tensors
        if kind_without_elements(tensor) is None
    ]


class EngineProof(HeldDigests):
    """An engine rank's digests of the step that it holds, and the table that its other ranks read."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.table = DigestTable()

    def show(self, stamp: Stamp) -> None:
        """Let the other ranks of the engine read the digests of the compared parts."""
        rows = [row for row, one in enumerate(self.parts) if one.number >= 0]
        self.table.write(stamp, [self.parts[row] for row in rows], self.blocks[rows])

    def read_own(self) -> RankDigests:
        """Return this rank's own table."""

        def read(start: int, into: WordArray) -> None:
            into[:] = self.table.words[start : start + into.size]

        own = RankDigests.read_words(f"engine rank {self.rank}", self.rank, read)
        assert own is not None
        return own


def wait_for_tables(peers: Sequence[PeerRank], stamp: Stamp, check: Callable[[], object]) -> list[RankDigests] | None:
    """Return the tables of this engine's other ranks for one step; None if a rank has a newer or another trainer's."""
    found: list[RankDigests] = []
    waiting = list(peers)
    while waiting:
        for peer in list(waiting):
            table = RankDigests.read_peer(peer, ENGINE_VIEW)
            if table is None or table.stamp[0] != stamp[0]:
                continue
            if table.stamp == stamp:
                found.append(table)
                waiting.remove(peer)
            elif table.stamp[1] != stamp[1] or table.stamp[2] > stamp[2]:
                return None
        if waiting:
            check()
            sleep(PAUSE_SECONDS)
    return found


def compare(plan: ProofPlan, trainer: Sequence[RankDigests], engine: Sequence[RankDigests]) -> Proof:
    """Compare all tables of an engine with those of the trainer.

    Raises:
        ContradictionError: the engine does not hold the trainer's values; it names tensor, rank and rows.
    """
    whole = np.zeros((len(plan.shards), 2), np.uint64)
    for one in trainer:
        np.add.at(whole, one.rows[:, 0].astype(np.int64), one.rows[:, 1:])
    held = np.concatenate([one.rows for one in engine])
    number, places, digest = held[:, 0].astype(np.int64), held[:, 1], held[:, 2]
    is_whole = places == whole[number, 0]
    # Equal sets of elements are replicas: the first of them counts for the sum, and the others must be equal to it.
    _, first, twin = np.unique(held[:, :2], axis=0, return_index=True, return_inverse=True)
    twin = first[twin.reshape(-1)]
    joined = np.zeros_like(whole)
    counted = first[~is_whole[first]]
    np.add.at(joined, number[counted], held[counted, 1:])
    is_joined, is_equal = (joined == whole).T
    is_right = np.where(is_whole, digest == whole[number, 1], is_equal[number] & (digest == digest[twin]))
    is_compared = is_whole | is_joined[number]
    wrong = np.flatnonzero(is_compared & ~is_right)
    if len(wrong):
        which = int(number[wrong[0]])
        its, others = wrong[number[wrong] == which].tolist(), counted[number[counted] == which].tolist()
        # Each wrong part, and those that make the tensor with it.
        sets = [(row, [] if is_whole[row] else [other for other in others if other != twin[row]]) for row in its]
        raise _make_error(plan.shards[which], which, trainer, engine, sets)
    names = [shard.name for shard in plan.shards]
    partial = dict.fromkeys(names[i] for i in np.unique(number[~is_compared]).tolist())
    unproven = {**dict.fromkeys(partial, "the engine's parts of it overlap, or are incomplete"), **plan.unproven}
    held_names = ((names[i], int(whole[i, 1])) for i in np.unique(number).tolist())
    return Proof({name: f"{digest:016x}" for name, digest in held_names if name not in unproven}, unproven)


def _make_error(
    shard: StoredShard,
    number: int,
    trainer: Sequence[RankDigests],
    engine: Sequence[RankDigests],
    sets: Sequence[tuple[int, Sequence[int]]],
) -> ContradictionError:
    """Return the error that names the ranks and the rows of a tensor's wrong parts, by their digests by block."""
    owners = [(one, row) for one in engine for row in range(len(one.rows))]
    lent = [(one, one.read_blocks(row)) for one in trainer for row in np.flatnonzero(one.rows[:, 0] == number).tolist()]
    want = np.sum([blocks for _, blocks in lent], axis=0, dtype=np.uint64)
    faults: list[tuple[RankDigests, WordArray]] = []
    for row, others in sets:
        own, *rest = (one.read_blocks(its) for one, its in (owners[i] for i in (row, *others)))
        differs = np.sum([own, *rest], axis=0, dtype=np.uint64) != want
        if own[differs].any():  # the rank has elements of these blocks
            faults.append((owners[row][0], differs))
    faults = faults or [(owners[row][0], np.ones(NUM_BLOCKS, bool)) for row, _ in sets]
    differs = np.any([blocks for _, blocks in faults], axis=0)
    rows = DigestRows.of(shard.shape, dtypes.dtype(shard.dtype).nbytes)
    where = rows.describe_blocks(np.flatnonzero(differs).tolist())
    ranks, lenders = (
        list_text(list(dict.fromkeys(roles)), 4)
        for roles in ([one.role for one, _ in faults], [one.role for one, blocks in lent if blocks[differs].any()])
    )
    return ContradictionError(
        f"{shard.name}: {ranks} does not hold the trainer's values in {where}",
        tensor=shard.name,
        rank=faults[0][0].rank,
        index_range=where,
        want=f"the values that {lenders} had at publish",
        next_step="call update again; if this happens again, check the memory and the network of both hosts",
    )
