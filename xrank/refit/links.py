"""An engine rank's links: to a trainer, and to other engines that lend the step that they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from math import prod
from time import monotonic, sleep
from typing import Any

import numpy as np
import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.planner import Plan, TensorPlan
from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError, UsageError, option
from xrank.layout.nest_table import NestTable, int_array, join_rows
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.loans import LendingEndedError, MemoryOffer, MooncakeEngine, PeerSource, UnreadableMemoryError
from xrank.ranks.memory import LocalBytes, local_bytes, locate_elements
from xrank.readers.live.models import LiveModel
from xrank.refit.directory import Address, RankRegistration, TrainerModel, find_trainer_ranks, read_trainer_model
from xrank.refit.peers import (
    PAUSE_SECONDS,
    SILENT_SECONDS,
    Pause,
    PeerRank,
    Phase,
    RankStatus,
    check_phase,
    open_source,
)
from xrank.refit.targets import (
    MemoryPlaces,
    ModuleTarget,
    TargetPlan,
    Transfer,
    UpdateReport,
    make_report,
    make_transfer,
)
from xrank.storage.entries import Entry

LOOK_SECONDS = 0.25
"""Time between two looks for another trainer; also at all ranks of the trainer, while the first one shows no new step.
Hundreds of engine ranks may wait: if each looked at all ranks all the time, these would do little else than answer."""
_OWN = -1
"""Rank of this process among the trainer's: none of them."""


class TrainerLink(Struct, eq=False):
    """A trainer as this rank reads it; see `connect_trainer`."""

    registration: RankRegistration
    peers: list[PeerRank]
    planned: TargetPlan
    transfer: Transfer
    places: MemoryPlaces
    """The places of this rank's tensors that the plan has."""
    plan_seconds: float
    by_mooncake: bool
    loan: ExitStack
    held_step: int = -1
    """The last step taken from this trainer."""
    is_over: bool = False
    """Whether a rank has ended: another trainer may come, to which a new link is needed."""
    _reported: dict[int, int] = field(default_factory=dict)
    """Rank -> the generation whose failure was raised."""
    _next_look: float = 0.0

    @property
    def number(self) -> int:
        """Number of the offer in statuses."""
        return self.registration.number

    def read(self) -> list[RankStatus]:
        """Return the statuses of all ranks; raise a failure of a step once, the end of a rank always."""
        try:
            statuses = [peer.read() for peer in self.peers]
        except (RankFailedError, RankTimeoutError):
            self.is_over = not any(peer.may_return for peer in self.peers)
            raise
        for peer, status in zip(self.peers, statuses, strict=True):
            if status.phase is Phase.FAILED:
                if self._reported.get(peer.rank) == status.generation:
                    continue
                self._reported[peer.rank] = status.generation
            self.is_over = status.phase is Phase.ENDED
            check_phase(peer, status)
        return statuses

    def watch(self) -> None:
        """Read the statuses for a moment, after a read of memory has failed."""
        end = monotonic() + SILENT_SECONDS
        while monotonic() < end:
            self.read()
            sleep(PAUSE_SECONDS)

    def wait_for_step(
        self, place: Address, step: int | None, engine_step: int | None, check: Callable[[], object]
    ) -> list[RankStatus] | None:
        """Return the statuses once all ranks show one new step; None if another trainer has come to the address.

        With a step, no other one is waited for; without, any that is not `engine_step`, which the engine holds.
        """
        pause, next_look, seen = Pause(), 0.0, None

        def is_new(found: int) -> bool:
            return found == step or (step is None and (found > self.held_step or engine_step != found))

        while True:
            first = self.peers[0].try_read()  # `read` explains why it cannot be read
            if first is None or first != seen or is_new(first.step) or monotonic() >= next_look:
                statuses, seen, next_look = self.read(), first, monotonic() + LOOK_SECONDS
                newest = statuses[0].step
                if step is not None and any(
                    status.step > step or (status.step == step and status.phase is Phase.CLOSED) for status in statuses
                ):
                    raise UsageError(
                        f"step {step} is past",
                        got=f"step {max(status.step for status in statuses)} of the trainer",
                        want="a step that is visible or comes later, or None for the newest",
                    )
                if is_new(newest) and all(
                    status.phase in (Phase.OPEN, Phase.STEADY) and status.step == newest for status in statuses
                ):
                    return statuses
            check()
            if monotonic() >= self._next_look:
                self._next_look = monotonic() + LOOK_SECONDS
                if place.find_trainer_id() not in (None, self.registration.id):
                    return None
            pause()

    def wait_for_confirmation(self, before: Sequence[RankStatus], check: Callable[[], object]) -> bool:
        """Wait until all ranks confirm the bytes that were read; return False if they have closed the step."""
        first: list[RankStatus] | None = None
        pause = Pause()
        while True:
            statuses = self.read()
            if any(now.generation != then.generation for now, then in zip(statuses, before, strict=True)):
                return False
            first = first or statuses
            # A check may have begun before the reads ended, the one after it did not.
            if all(
                now.phase is Phase.STEADY or now.checks >= then.checks + 2
                for now, then in zip(statuses, first, strict=True)
            ):
                return True
            check()
            pause()

    def close(self) -> None:
        """Close all connections."""
        self.loan.close()


def connect_trainer(
    registration: RankRegistration,
    target: ModuleTarget,
    offer: MemoryOffer,
    max_memory_nbytes: int,
    check: Callable[[], object],
    number: int,
    *,
    by_mooncake: bool = False,
) -> TrainerLink:
    """Return a link to a trainer: its ranks answer, and the plan is proven.

    `number` is this rank's place among the engine's ranks: each of them reads other replicas than its neighbors.
    """
    offers = dict(find_trainer_ranks(registration))
    with ExitStack() as loan:
        peers = []
        for rank, description in offers.items():
            peers.append(PeerRank(f"trainer rank {rank}", rank, description))
            loan.callback(peers[-1].close)
        for peer in peers:
            peer.read()
        started = monotonic()
        model = read_trainer_model(registration)
        planned = target.plan(model)
        mooncake = _join_mooncake(offers, planned, loan) if by_mooncake else None
        source = open_source(
            offer, _OWN, offers, model.live.rank.tolist(), model.live.view.tolist(), check=check, mooncake=mooncake
        )
        loan.callback(source.close)
        transfer = make_transfer(planned, number, source, max_memory_nbytes)
        places, seconds = target.list_places(), monotonic() - started
        return TrainerLink(registration, peers, planned, transfer, places, seconds, by_mooncake, loan.pop_all())
    raise AssertionError


def _join_mooncake(offers: Mapping[int, Mapping[str, Any]], planned: TargetPlan, loan: ExitStack) -> MooncakeEngine:
    """Return an engine that has the tensors of this rank, if all trainer ranks lend by Mooncake."""
    for rank, description in offers.items():
        if description.get("mooncake") is None:
            raise UsageError(
                f"trainer rank {rank} does not lend its tensors by Mooncake",
                rank=rank,
                next_step=f"call offer_weights with {option('wire')}='mooncake', as this engine, or neither of both",
            )
    rows = [(locate_elements(tensor)[0], tensor.nbytes) for tensor in planned.tensors]
    engine = MooncakeEngine([(address, nbytes) for address, nbytes in rows if address])
    loan.callback(engine.close)
    return engine


_DIGEST_NBYTES = 16
_CHUNK_NBYTES = 1 << 20


class Relay:
    """Lends an engine rank's tensors from the first step on; its status shows which step they hold."""

    def __init__(self, place: Address, engine: str, rank: int, ranks: Sequence[int], status: dict[str, Any]) -> None:
        self._place, self._engine, self._rank = place, engine, rank
        self._content = {"ranks": list(ranks), "status": status}
        self._loan = ExitStack()
        self._planned: TargetPlan | None = None
        self._views: list[LocalBytes] = []
        self._digests = np.zeros((0, _DIGEST_NBYTES), np.uint8)

    def record(self, planned: TargetPlan) -> None:
        """Record the digests of the present values, after the tensors were filled; new tensors are lent first."""
        if planned is not self._planned:
            self._lend(planned)
        for digest, view in zip(self._digests, self._views, strict=True):

            def fetch(start: int, staging: memoryview, view: LocalBytes = view) -> memoryview:
                row = view.find_row(start, len(staging))
                if row is None:
                    view.read_into(start, staging)
                return staging if row is None else row

            digest[:] = np.frombuffer(_digest(view.nbytes, fetch), np.uint8)

    def close(self) -> None:
        """Stop lending."""
        self._loan.close()
        self._planned = None

    def _lend(self, planned: TargetPlan) -> None:
        import torch

        self.close()
        self._views = [local_bytes(tensor) for tensor in planned.tensors]
        self._digests = np.zeros((len(self._views), _DIGEST_NBYTES), np.uint8)
        offer = MemoryOffer([*self._views, local_bytes(torch.from_numpy(self._digests))], across_hosts=True)
        self._loan.callback(offer.close)
        tensors = [_describe(one, one.output.name in planned.cast) for one in planned.plan.tensors]
        content = {**self._content, "offer": offer.describe(), "tensors": tensors}
        self._loan.callback(self._place.remove, self._place.register("relay", self._engine, self._rank, content))
        self._planned = planned


def _digest(nbytes: int, fetch: Callable[[int, memoryview], memoryview]) -> bytes:
    """Return the digest of bytes: `fetch` returns those from a start on, in the staging that it gets or in place."""
    digest, staging = xxhash.xxh3_128(), memoryview(bytearray(min(nbytes, _CHUNK_NBYTES)))
    for start in range(0, nbytes, _CHUNK_NBYTES):
        digest.update(fetch(start, staging[: nbytes - start]))
    return digest.digest()


def _describe(one: TensorPlan, is_cast: bool) -> list[Any]:
    output, is_cast = one.output, is_cast or one.source_dtype != one.output.dtype
    nests = None if output.part is None else [[nest.x, nest.y, *map(list, nest.loops)] for nest in output.part.nests]
    return [output.name, output.dtype, list(output.global_shape), list(output.shape), nests, is_cast]


class EngineGoneError(Exception):
    """Another engine cannot be read; `failure` names its rank."""

    def __init__(self, failure: RankFailedError | RankTimeoutError) -> None:
        super().__init__(str(failure))
        self.failure = failure


class RelayedEngines:
    """The engines at an address that lend their steps; connections are kept, so that a stopped rank is noticed."""

    def __init__(self, place: Address, loan: ExitStack, own: str) -> None:
        self._place, self._loan, self._own = place, loan, own
        self._known: dict[tuple[str, ...], RelayedEngine] = {}
        """Ids of the ranks' registrations -> the engine."""

    def find(self) -> tuple[list[RelayedEngine], RankFailedError | RankTimeoutError | None]:
        """Return the engines of which all ranks lend a step, the one with the newest first, and another's failure."""
        by_engine: dict[str, dict[int, RankRegistration]] = {}
        ranks_of: dict[str, tuple[int, ...]] = {}
        for one in self._place.find_all("relay").values():
            content = one.describe("an engine's rank", "engine, rank and all ranks")
            name, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
            by_engine.setdefault(name, {})[rank] = one
            ranks_of.setdefault(name, content["ranks"].counts(below=1 << 31))
        found: list[tuple[int, RelayedEngine]] = []
        failure: RankFailedError | RankTimeoutError | None = None
        for name, its in by_engine.items():
            ranks = ranks_of[name]
            if name == self._own or set(ranks) != set(its):
                continue  # a rank has not taken a step yet, or has ended
            try:
                engine = self._connect(name, [its[rank] for rank in ranks])
                found.append((min(status.step for status in engine.read()), engine))
            except (RankFailedError, RankTimeoutError) as error:
                failure = error
        return [engine for _, engine in sorted(found, key=lambda one: -one[0])], failure

    def _connect(self, name: str, registrations: Sequence[RankRegistration]) -> RelayedEngine:
        ids = tuple(one.id for one in registrations)
        if ids not in self._known:
            with ExitStack() as loan:
                peers = []
                for one in registrations:
                    content = one.describe("an engine's rank", "the description of its status")
                    rank, status = content["rank"].count(below=1 << 31), content["status"].table()
                    try:
                        peers.append(PeerRank(f"engine rank {rank} ({name})", rank, status))
                    except CorruptError as error:
                        content["status"].refuse(f"the description of a status ({error.got})")
                    loan.callback(peers[-1].close)
                self._loan.push(loan.pop_all())
            self._known[ids] = RelayedEngine(tuple(registrations), tuple(peers))
        return self._known[ids]


class RelayedEngine(Struct, frozen=True, eq=False):
    """The ranks of an engine that lends its step."""

    registrations: tuple[RankRegistration, ...]
    peers: tuple[PeerRank, ...]

    def read(self) -> tuple[RankStatus, ...]:
        """Return the statuses of all ranks."""
        return tuple(peer.read() for peer in self.peers)

    def copy_into(
        self,
        target: ModuleTarget,
        own: MemoryOffer,
        begin: Callable[[TargetPlan, int, int], object],
        commit: Callable[[TargetPlan, int, int], bool],
        check: Callable[[], object],
        *,
        max_memory_nbytes: int,
        number: int,
        held_step: int | None,
    ) -> UpdateReport | None:
        """Fill a target from the step that all ranks hold, compare the bytes with their digests, and commit it.

        Return None if there is no newer step, or an engine has begun an update meanwhile.
        """
        with self._naming_failures(check):
            before = self.read()
        step, offer = before[0].step, before[0].offer
        if not _is_steady(before) or (held_step is not None and step <= held_step):
            return None
        started = monotonic()
        model = self._read_model()
        cast = frozenset(str(one[0]) for each in self.registrations for one in each.content["tensors"] if one[5])
        planned = replace(target.plan(model), cast=cast)
        for tensor in planned.plan.tensors:
            if tensor.output.name in cast and tensor.output.dtype != tensor.source_dtype:
                raise UsageError(
                    f"{tensor.output.name}: the other engine has cast it from the trainer's type",
                    tensor=tensor.output.name,
                    got=f"{tensor.source_dtype} there, {tensor.output.dtype} here",
                    next_step="take the step from the trainer, or from an engine with the same types",
                )
        with closing(self._open_source(own, model, check)) as source:
            transfer = make_transfer(planned, number, source, max_memory_nbytes)
            ready = monotonic()
            begin(planned, -1, offer)
            with self._naming_failures(check):
                moved = transfer.run(check)
                copied = monotonic()
                changed = self._find_changed(planned.plan, model, source, check)
                now = self.read()
        if not _is_steady(now) or any(
            (a.generation, a.step, a.offer) != (b.generation, b.step, b.offer) for a, b in zip(before, now, strict=True)
        ):
            return None  # a rank has begun to write meanwhile
        if changed is not None:
            raise changed
        if not commit(planned, step, offer):
            return None
        return make_report(step, planned, transfer, moved, (monotonic() - ready, copied - ready, ready - started))

    def _read_model(self) -> TrainerModel:
        """Return the step's tensors as the engine's ranks hold them; a `CorruptError` if none are described."""
        shards: dict[str, StoredShard] = {}
        owners: list[int] = []
        views: list[int] = []
        nbytes: list[int] = []
        for position, registration in enumerate(self.registrations):
            tensors = registration.describe("an engine's tensors", "names, types, shapes and pieces")["tensors"]
            for view, one in enumerate(tensors.entries()):
                piece, shape = _read_piece(one, position, len(owners))
                known = shards.get(piece.name)
                if known is not None:
                    piece = replace(
                        known,
                        rank=np.concatenate((known.rank, piece.rank)),
                        record=np.concatenate((known.record, piece.record)),
                        nests=join_rows([known.nests, piece.nests]),
                    )
                shards[piece.name] = piece
                owners.append(position)
                views.append(view)
                nbytes.append(prod(shape) * dtypes.dtype(piece.dtype).nbytes)
        file, count = int_array(owners), len(owners)
        stored = StoredModel(
            format="memory",
            path="memory",
            files=tuple(
                SourceFile(f"the memory of engine rank {peer.rank}", int(sum(nbytes)), inode=i, mtime_ns=0)
                for i, peer in enumerate(self.peers)
            ),
            records=RecordTable(file, np.zeros(count, np.int64), int_array(nbytes), np.full(count, NO_CHECKSUM)),
            shards=tuple(shards.values()),
            world_size=len(self.peers),
            nbytes=sum(nbytes),
        )
        return TrainerModel(LiveModel(stored, file, int_array(views)), stored, None, frozenset())

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
        return open_source(
            own,
            _OWN,
            {position: each.content["offer"] for position, each in enumerate(self.registrations)},
            [*model.live.rank.tolist(), *range(len(self.registrations))],
            [*model.live.view.tolist(), *(len(each.content["tensors"]) for each in self.registrations)],
            check=check,
        )

    def _find_changed(
        self, plan: Plan, model: TrainerModel, source: PeerSource, check: Callable[[], object]
    ) -> ContradictionError | None:
        """Return the error for a tensor whose bytes are not those of the digest; None if all are."""
        for one in plan.tensors:
            for record in np.unique(one.copies.record).tolist():
                position, view = int(model.live.rank[record]), int(model.live.view[record])
                want = bytearray(_DIGEST_NBYTES)
                source.read_into(len(model.live.rank) + position, _DIGEST_NBYTES * view, memoryview(want))

                def fetch(start: int, staging: memoryview, record: int = record) -> memoryview:
                    check()
                    source.read_into(record, start, staging)
                    return staging

                if _digest(int(model.source.records.nbytes[record]), fetch) != bytes(want):
                    peer = self.peers[position]
                    return ContradictionError(
                        f"{one.output.name} has changed on {peer.role} since it took the step",
                        tensor=one.output.name,
                        rank=peer.rank,
                        want=f"digest {want.hex()}",
                        next_step="take the trainer's next step, and find what changes the engine's weights",
                    )
        return None


def _is_steady(statuses: Sequence[RankStatus]) -> bool:
    """Return whether all ranks of an engine hold one step, and write to no tensor."""
    first = statuses[0]
    return first.step >= 0 and all(
        status.phase in (Phase.CLOSED, Phase.WAITING) and (status.step, status.offer) == (first.step, first.offer)
        for status in statuses
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
