"""An engine rank that lends the step it holds to other engines, such as one that starts while the trainer is busy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from math import prod
from time import monotonic
from typing import Any

import numpy as np
import xxhash

from xrank import dtypes
from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError, UsageError
from xrank.formats.entries import Entry
from xrank.layout.nest_table import NestTable, int_array
from xrank.layout.nests import Nest, canonical, row_major
from xrank.plan.executor import Budget
from xrank.plan.output import OutputTensor
from xrank.plan.planner import Plan
from xrank.plan.replicas import spread_copies
from xrank.plan.source import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.loans import MemoryOffer, PeerSource
from xrank.ranks.peer_memory import LendingEndedError, UnreadableMemoryError, memory_at
from xrank.ranks.tensor_bytes import LocalBytes, local_bytes
from xrank.readers.live.ranks import LiveModel
from xrank.recipes.options import default_workers
from xrank.refit.directory import Address, Card, TrainerModel
from xrank.refit.peers import PeerRank, Phase, Status
from xrank.refit.targets import Filling, Target, Transfer, make_transfer

DIGEST_NBYTES = 16
_CHUNK_NBYTES = 1 << 20


class Relay:
    """Lends an engine rank's tensors from the first step on; its status shows which step they hold.

    Args:
        place: the address.
        engine: name of the engine.
        rank: this rank.
        ranks: all ranks of the engine.
        status: description of the offer that contains this rank's status.
    """

    def __init__(self, place: Address, engine: str, rank: int, ranks: Sequence[int], status: dict[str, Any]) -> None:
        self._place, self._engine, self._rank = place, engine, rank
        self._content = {"engine": engine, "rank": rank, "ranks": list(ranks), "status": status}
        self._loan = ExitStack()
        self._filling: Filling | None = None
        self._views: list[LocalBytes] = []
        self._digests = np.zeros((0, DIGEST_NBYTES), np.uint8)

    def record(self, filling: Filling) -> None:
        """Record the digests of the present values; new tensors are lent first.

        Args:
            filling: the tensors that hold a step, after they were filled.
        """
        if filling is not self._filling:
            self._lend(filling)
        for digest, view in zip(self._digests, self._views, strict=True):
            digest[:] = np.frombuffer(digest_bytes(view), np.uint8)

    def close(self) -> None:
        """Stop lending."""
        self._loan.close()
        self._filling = None

    def _lend(self, filling: Filling) -> None:
        self.close()
        self._views = [local_bytes(tensor) for tensor in filling.tensors]
        self._digests = np.zeros((len(self._views), DIGEST_NBYTES), np.uint8)
        offer = MemoryOffer([*self._views, _ArrayBytes(self._digests)], across_hosts=True)
        self._loan.callback(offer.close)
        tensors = [
            _describe(one.output, one.source_dtype != one.output.dtype or one.output.name in filling.cast)
            for one in filling.plan.tensors
        ]
        content = {**self._content, "offer": offer.describe(), "tensors": tensors}
        card = self._place.write_relay(self._engine, self._rank, content)
        self._loan.callback(self._place.remove, card)
        self._filling = filling


class _ArrayBytes:
    """The bytes of an array as `LocalBytes`."""

    def __init__(self, array: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
        self._array, self.nbytes = array, array.nbytes
        self.address: int | None = array.ctypes.data if array.nbytes else None

    def find_row(self, start: int, nbytes: int) -> memoryview | None:
        """Return the bytes from `start` on in place."""
        return memory_at(self._array.ctypes.data + start, nbytes)

    def read_into(self, start: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `start` on."""
        into[:] = memory_at(self._array.ctypes.data + start, len(into))


def digest_bytes(view: LocalBytes) -> bytes:
    """Return the digest of a tensor's bytes."""
    digest, staging = xxhash.xxh3_128(), memoryview(bytearray(min(view.nbytes, _CHUNK_NBYTES)))
    for start in range(0, view.nbytes, _CHUNK_NBYTES):
        nbytes = min(_CHUNK_NBYTES, view.nbytes - start)
        row = view.find_row(start, nbytes)
        if row is None:
            row = staging[:nbytes]
            view.read_into(start, row)
        digest.update(row)
    return digest.digest()


def _describe(output: OutputTensor, is_cast: bool) -> list[Any]:
    nests = None if output.part is None else [[nest.x, nest.y, *map(list, nest.loops)] for nest in output.part.nests]
    return [output.name, output.dtype, list(output.global_shape), list(output.shape), nests, is_cast]


_OWN = -1
"""Rank of this process among the other engine's: none of them."""
_GRACE_SECONDS = 0.2
_SILENT_SECONDS = 1.5


class EngineGoneError(Exception):
    """Another engine cannot be read; `failure` names its rank."""

    def __init__(self, failure: RankFailedError | RankTimeoutError) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True, slots=True, eq=False)
class EngineCopy:
    """A step that was copied from another engine and is not committed yet."""

    step: int
    number: int
    """Number of the trainer's offer of the step."""
    filling: Filling
    transfer: Transfer
    moved_nbytes: int
    copy_seconds: float
    plan_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class RelayedEngine:
    """The ranks of an engine that lends its step."""

    name: str
    cards: tuple[Card, ...]
    peers: tuple[PeerRank, ...]

    def read(self) -> tuple[Status, ...]:
        """Return the statuses of all ranks; errors as `PeerRank.read`."""
        return tuple(peer.read() for peer in self.peers)

    def _read_model(self) -> TrainerModel:
        """Return the step's tensors as the engine's ranks hold them.

        Raises:
            CorruptError: a card does not describe them.
        """
        shards: dict[str, StoredShard] = {}
        owners: list[int] = []
        views: list[int] = []
        nbytes: list[int] = []
        for position, card in enumerate(self.cards):
            tensors = card.describe("an engine's tensors", "names, types, shapes and pieces")["tensors"]
            for view, one in enumerate(tensors.entries()):
                piece, shape = _read_piece(one, position, len(owners))
                shards[piece.name] = _join(shards[piece.name], piece) if piece.name in shards else piece
                owners.append(position)
                views.append(view)
                nbytes.append(prod(shape) * dtypes.dtype(piece.dtype).nbytes)
        file = int_array(owners)
        count = len(owners)
        stored = StoredModel(
            format="memory",
            path="memory",
            files=tuple(
                SourceFile(f"the memory of engine rank {peer.rank}", int(sum(nbytes)), inode=i, mtime_ns=0)
                for i, peer in enumerate(self.peers)
            ),
            records=RecordTable(file, np.zeros(count, np.int64), int_array(nbytes), np.full(count, NO_CHECKSUM)),
            shards=tuple(shards.values()),
            world_size=len(self.cards),
            nbytes=sum(nbytes),
        )
        return TrainerModel(LiveModel(stored, file, int_array(views)), stored, None, frozenset())

    @property
    def _cast(self) -> frozenset[str]:
        """Names of tensors whose values the engine has cast from the trainer's."""
        return frozenset(str(one[0]) for card in self.cards for one in card.content["tensors"] if one[5])

    def copy_into(
        self,
        target: Target,
        own: MemoryOffer,
        begin: Callable[[Filling, int], object],
        check: Callable[[], object],
        *,
        max_memory_nbytes: int,
        number: int,
        held_step: int | None,
    ) -> EngineCopy | None:
        """Fill a target from the step that all ranks hold, and compare the bytes with their digests.

        Args:
            target: the tensors.
            own: this rank's own offer.
            begin: called with the filling and the number of the trainer's offer before the first byte is written.
            check: raises if a rank of this engine has failed.
            max_memory_nbytes: bytes of buffers.
            number: of this rank among its engine's.
            held_step: a step that is not to be taken, nor any before; None: all steps are new.

        Returns:
            None if there is no newer step, or the engine has begun an update meanwhile.

        Raises:
            EngineGoneError: a rank of the engine ended, or cannot be read.
            ContradictionError: a tensor has changed since the engine took the step.
            XrankError: as `Target.plan`.
        """
        with self._naming_failures(check):
            before = self.read()
        step, offer = before[0].step, before[0].offer
        if not _is_steady(before) or (held_step is not None and step <= held_step):
            return None
        started = monotonic()
        model = self._read_model()
        filling = replace(target.plan(model), cast=self._cast)
        _check_casts(filling)
        with closing(self._open_source(own, model, check)) as source:
            budget = Budget.from_memory(max_memory_nbytes, default_workers())
            transfer = make_transfer(spread_copies(filling.plan, number), filling.tensors, source, budget)
            planned = monotonic()
            begin(filling, offer)
            with self._naming_failures(check):
                moved = transfer.run(check)
                copied = monotonic()
                changed = self._find_changed(filling.plan, model, source, check)
                if not _is_same(before, self.read()):
                    return None
        if changed is not None:
            raise changed
        return EngineCopy(step, offer, filling, transfer, moved, copied - planned, planned - started)

    @contextmanager
    def _naming_failures(self, check: Callable[[], object]) -> Iterator[None]:
        try:
            yield
        except (LendingEndedError, UnreadableMemoryError, RankFailedError, RankTimeoutError) as error:
            check()  # it raises if a rank of this engine has failed
            try:
                self.read()
            except (RankFailedError, RankTimeoutError) as failure:
                raise EngineGoneError(failure) from None
            raise EngineGoneError(self.peers[0].make_error(f"its memory cannot be read: {error}")) from None

    def _open_source(self, own: MemoryOffer, model: TrainerModel, check: Callable[[], object]) -> PeerSource:
        """Return a source of the engine's tensors; behind their records, one for each rank's digests."""
        return PeerSource(
            own,
            _OWN,
            {position: card.content["offer"] for position, card in enumerate(self.cards)},
            [*model.live.rank.tolist(), *range(len(self.cards))],
            [*model.live.view.tolist(), *(len(card.content["tensors"]) for card in self.cards)],
            check=check,
            timeout_seconds=_SILENT_SECONDS,
            grace_seconds=_GRACE_SECONDS,
        )

    def _find_changed(
        self, plan: Plan, model: TrainerModel, source: PeerSource, check: Callable[[], object]
    ) -> ContradictionError | None:
        """Return the error for a tensor whose bytes are not those of the digest; None if all are."""
        for one in plan.tensors:
            for record in np.unique(one.copies.record).tolist():
                position, view = int(model.live.rank[record]), int(model.live.view[record])
                want = bytearray(DIGEST_NBYTES)
                source.read_into(len(model.live.rank) + position, DIGEST_NBYTES * view, memoryview(want))
                got = _digest_record(source, record, int(model.source.records.nbytes[record]), check)
                if got != bytes(want):
                    peer = self.peers[position]
                    return ContradictionError(
                        f"{one.output.name} has changed on {peer.role} since it took the step",
                        tensor=one.output.name,
                        rank=peer.rank,
                        got=f"digest {got.hex()}",
                        want=f"digest {want.hex()}",
                        next_step="take the trainer's next step, and find what changes the engine's weights",
                    )
        return None

    def close(self) -> None:
        """Close all connections."""
        for peer in self.peers:
            peer.close()


def _is_steady(statuses: Sequence[Status]) -> bool:
    """Return whether all ranks of an engine hold one step, and write to no tensor."""
    first = statuses[0]
    return first.step >= 0 and all(
        status.phase in (Phase.CLOSED, Phase.WAITING) and (status.step, status.offer) == (first.step, first.offer)
        for status in statuses
    )


def _is_same(before: Sequence[Status], now: Sequence[Status]) -> bool:
    """Return whether no rank has begun to write between two looks at an engine that was steady."""
    return _is_steady(now) and all(
        (a.generation, a.step, a.offer) == (b.generation, b.step, b.offer) for a, b in zip(before, now, strict=True)
    )


def _check_casts(filling: Filling) -> None:
    """Refuse tensors that another engine holds in a smaller type than the trainer, and that become a third type.

    Raises:
        UsageError: it names the tensor.
    """
    for one in filling.plan.tensors:
        if one.output.name in filling.cast and one.output.dtype != one.source_dtype:
            raise UsageError(
                f"{one.output.name}: the other engine has cast it from the trainer's type",
                tensor=one.output.name,
                got=f"{one.source_dtype} there, {one.output.dtype} here",
                want="one type in both engines",
                next_step="take the step from the trainer, or from an engine with the same types",
            )


def _read_piece(one: Entry, position: int, record: int) -> tuple[StoredShard, tuple[int, ...]]:
    """Return a piece of a tensor, and the shape of its memory."""
    name, dtype, whole, own, nests, is_cast = one.entries(length=6)
    is_cast.flag()
    if dtype.text() not in dtypes.DTYPES:
        dtype.refuse("an element type")
    shape, global_shape = own.counts(), whole.counts()
    if prod(shape) >= 1 << 59 or prod(global_shape) >= 1 << 59:
        one.refuse("a tensor that fits into memory")
    if nests.value is None:
        loops = tuple((n, s, s) for n, s in zip(shape, row_major(shape), strict=True) if n != 1)
        table = NestTable.from_nests([canonical(Nest(0, 0, loops))])
    else:
        table = NestTable.from_nests([_read_nest(nest) for nest in nests.entries()])
    count = len(table)
    shard = StoredShard(
        name.text(),
        dtype.text(),
        global_shape,
        np.full(count, position, np.int64),
        np.full(count, record, np.int64),
        table,
    )
    return shard, shape


def _read_nest(nest: Entry) -> Nest:
    parts = nest.entries()
    if len(parts) < 2:
        nest.refuse("a start in each memory, and loops")
    loops = [loop.counts() for loop in parts[2:]]
    if any(len(loop) != 3 for loop in loops):
        nest.refuse("loops of a count and two strides")
    return Nest(parts[0].count(), parts[1].count(), tuple((n, xs, ys) for n, xs, ys in loops))


def _join(a: StoredShard, b: StoredShard) -> StoredShard:
    depth = max(a.nests.loops.shape[1], b.nests.loops.shape[1])
    x, y = a.nests.with_depth(depth), b.nests.with_depth(depth)
    return StoredShard(
        a.name,
        a.dtype,
        a.shape,
        np.concatenate((a.rank, b.rank)),
        np.concatenate((a.record, b.record)),
        NestTable(*(np.concatenate((getattr(x, key), getattr(y, key))) for key in NestTable.__slots__)),
    )


def _digest_record(source: PeerSource, record: int, nbytes: int, check: Callable[[], object]) -> bytes:
    digest, staging = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, _CHUNK_NBYTES)))
    for start in range(0, nbytes, _CHUNK_NBYTES):
        check()
        part = staging[: min(_CHUNK_NBYTES, nbytes - start)]
        source.read_into(record, start, part)
        digest.update(part)
    return digest.digest()


class RelayedEngines:
    """The engines at an address that lend their steps; connections are kept, so that a stopped rank is noticed.

    Args:
        place: the address.
        loan: closes the connections.
        own: name of an engine that is left out.
    """

    def __init__(self, place: Address, loan: ExitStack, own: str) -> None:
        self._place, self._loan, self._own = place, loan, own
        self._known: dict[tuple[str, ...], RelayedEngine] = {}
        """Ids of the ranks' cards -> the engine."""

    def find(self) -> tuple[list[RelayedEngine], RankFailedError | RankTimeoutError | None]:
        """Return the engines of which all ranks lend a step, the one with the newest first, and another's failure."""
        by_engine: dict[str, dict[int, Card]] = {}
        ranks_of: dict[str, tuple[int, ...]] = {}
        for card in self._place.read_relays():
            content = card.describe("an engine's rank", "engine, rank and all ranks")
            name, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
            by_engine.setdefault(name, {})[rank] = card
            ranks_of.setdefault(name, content["ranks"].counts(below=1 << 31))
        found: list[tuple[int, RelayedEngine]] = []
        failure: RankFailedError | RankTimeoutError | None = None
        for name, cards in by_engine.items():
            ranks = ranks_of[name]
            if name == self._own or set(ranks) != set(cards):
                continue  # a rank has not taken a step yet, or has ended
            try:
                engine = self._connect(name, [cards[rank] for rank in ranks])
                found.append((min(status.step for status in engine.read()), engine))
            except (RankFailedError, RankTimeoutError) as error:
                failure = error
        return [engine for _, engine in sorted(found, key=lambda one: -one[0])], failure

    def _connect(self, name: str, cards: Sequence[Card]) -> RelayedEngine:
        ids = tuple(card.id for card in cards)
        if ids not in self._known:
            self._known[ids] = _connect(name, cards)
            self._loan.callback(self._known[ids].close)
        return self._known[ids]


def _connect(name: str, cards: Sequence[Card]) -> RelayedEngine:
    with ExitStack() as loan:
        peers = []
        for card in cards:
            content = card.describe("an engine's rank", "the description of its status")
            rank, status = content["rank"].count(below=1 << 31), content["status"].table()
            try:
                peers.append(PeerRank(f"engine rank {rank} ({name})", rank, status))
            except CorruptError as error:
                content["status"].refuse(f"the description of a status ({error.got})")
            loan.callback(peers[-1].close)
        loan.pop_all()
        return RelayedEngine(name, tuple(cards), tuple(peers))
    raise AssertionError
