"""Receive: an engine's ranks take the weights of a trainer of another job, or of another engine, step by step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from math import prod
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import xxhash
from msgspec import Struct, field
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.executor import Budget
from xrank.engine.planner import Plan, TensorPlan
from xrank.errors import (
    ContradictionError,
    CorruptError,
    IncompleteError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
    XrankError,
    names_own_arguments,
    option,
    require,
    require_linux,
)
from xrank.layout.nest_table import NestTable, int_array, join_rows
from xrank.layout.nests import Nest, canonical, row_major
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.ranks.failure import Deadline
from xrank.ranks.loans import (
    LendingEndedError,
    MemoryOffer,
    MooncakeEngine,
    PeerSource,
    UnreadableMemoryError,
    is_mooncake,
    share_offers,
)
from xrank.ranks.memory import LocalBytes, local_bytes, locate_elements
from xrank.ranks.team import find_group_team
from xrank.readers.live.models import LiveModel
from xrank.recipes.live_arguments import check_meeting
from xrank.recipes.options import default_workers, parse_size
from xrank.refit.directory import Address, RankRegistration, TrainerModel, find_trainer_ranks, read_trainer_model
from xrank.refit.peers import (
    PAUSE_SECONDS,
    SILENT_SECONDS,
    EngineRanks,
    Pause,
    PeerRank,
    Phase,
    RankStatus,
    StatusBlock,
    check_phase,
    open_siblings,
    open_source,
)
from xrank.refit.proof import (
    TRAINER_VIEW,
    EngineProof,
    ProofPlan,
    RankDigests,
    compare,
    plan_proof,
    wait_for_tables,
)
from xrank.refit.targets import (
    MemoryPlaces,
    ModuleTarget,
    Proof,
    TargetPlan,
    Transfer,
    UpdateReport,
    find_moved,
    make_report,
    make_transfer,
)
from xrank.storage.entries import Entry

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


LOOK_SECONDS = 0.25
"""Time between two looks for another trainer; also at all ranks of the trainer, while the first one shows no new step.
Hundreds of engine ranks may wait: if each looked at all ranks all the time, these would do little else than answer."""
_OWN = -1
"""Rank of this process among the trainer's: none of them."""


class TrainerLink(Struct, eq=False):
    """A trainer as this rank reads it."""

    registration: RankRegistration
    peers: list[PeerRank]
    planned: TargetPlan
    transfer: Transfer
    places: MemoryPlaces
    """The places of this rank's tensors that the plan has."""
    plan_seconds: float
    loan: ExitStack
    proof: ProofPlan | None
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
                        want="an offered or later step, or None for the newest",
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

    def read_digests(self, step: int) -> list[RankDigests]:
        """Return the digests that the trainer's ranks lend; the step's, unless they have closed it meanwhile."""
        found = [RankDigests.read_peer(peer, TRAINER_VIEW) for peer in self.peers]
        return [one for one in found if one is not None and one.stamp == (0, 0, step)]

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


def _join_mooncake(offers: Mapping[int, Mapping[str, Any]], planned: TargetPlan, loan: ExitStack) -> MooncakeEngine:
    """Return an engine that has the tensors of this rank, if all trainer ranks lend by Mooncake."""
    for rank, description in offers.items():
        if description.get("mooncake") is None:
            raise UsageError(
                f"trainer rank {rank} does not offer its tensors through Mooncake",
                rank=rank,
                next_step=f"call offer_weights with {option('wire')}='mooncake', as this engine does, or without it "
                f"on both sides",
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

    def read_model(self) -> TrainerModel:
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
    def naming_failures(self, check: Callable[[], object]) -> Iterator[None]:
        """Raise EngineGoneError with the reason if the memory of a rank cannot be read."""
        try:
            yield
        except (LendingEndedError, UnreadableMemoryError, RankFailedError, RankTimeoutError) as error:
            check()  # it raises if a rank of this engine has failed
            try:
                self.read()
            except (RankFailedError, RankTimeoutError) as failure:
                raise EngineGoneError(failure) from None
            raise EngineGoneError(self.peers[0].make_error(f"its memory cannot be read: {error}")) from None

    def open_source(self, own: MemoryOffer, model: TrainerModel, check: Callable[[], object]) -> PeerSource:
        """Return a source of the engine's tensors; behind their records, one for each rank's digests."""
        return open_source(
            own,
            _OWN,
            {position: each.content["offer"] for position, each in enumerate(self.registrations)},
            [*model.live.rank.tolist(), *range(len(self.registrations))],
            [*model.live.view.tolist(), *(len(each.content["tensors"]) for each in self.registrations)],
            check=check,
        )

    def find_changed(
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
                        f"{one.output.name} has changed on {peer.role} since it got the step",
                        tensor=one.output.name,
                        rank=peer.rank,
                        want=f"digest {want.hex()}",
                        next_step="update from the trainer's next step, and find what changes the engine's weights",
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


def take_into(
    make_target: Callable[[], ModuleTarget],
    address: str | os.PathLike[str],
    *,
    call: str,
    relay: bool = False,
    proof: bool,
    max_memory: str | int,
    wire: str | None = None,
    group: ProcessGroup | None,
    timeout_seconds: float,
) -> TakenWeights:
    """Prepare to take weights into a target; arguments and errors of `call` as of `take_weights`."""
    require("torch", call)
    require_linux(call)
    check_meeting(group, timeout_seconds)
    place = Address(address)
    team = find_group_team(group, os.path.join(place.path, "engine"), timeout_seconds=timeout_seconds, call=call)

    def read_arguments() -> tuple[ModuleTarget, int]:
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        is_mooncake(wire, call)
        return make_target(), nbytes

    def describe(made: tuple[ModuleTarget, int]) -> dict[str, str | None]:
        return {
            "call": call,
            "relay": str(relay),
            "proof": str(proof),
            "address": place.path,
            "max_memory": f"{made[1]:,} bytes",
            "wire": wire,
        }

    with ExitStack() as loan:
        with team.together():
            (made, nbytes), _ = team.agree("the arguments", read_arguments, describe, team.check_alike)
            block = StatusBlock()
            prover = EngineProof(team.rank) if proof else None
            views = [block] if prover is None else [prover.table, block]
            offer = MemoryOffer(views, across_hosts=True, secret=team.secret)
            loan.callback(offer.close)
            parts = share_offers(team, "the engine's ranks", offer, {})
            own = parts[team.position]["offer"]
            engine = team.broadcast("the engine's name", os.urandom(4).hex() if team.is_first else None)
            loan.callback(place.remove, place.register("engine", engine, team.rank, {"offer": own}))
        by_mooncake = is_mooncake(wire, call)
        lender = Relay(place, engine, team.rank, team.ranks, own) if relay else None
        ranks = EngineRanks(block, open_siblings("engine", team, parts))
        return TakenWeights(
            place, made, block, offer, ranks, loan.pop_all(), by_mooncake, nbytes, team.rank, engine, lender, prover
        )
    raise AssertionError


class CheckReport(Struct, frozen=True):
    """The result of `TakenWeights.check` on one engine rank."""

    step: int
    num_tensors: int
    """Tensors of which this rank holds values that were compared."""
    nbytes: int
    """Bytes of these values."""
    seconds: float


class TakenWeights:
    """An engine rank's weights, made by `xrank.take_weights`. One thread may use it; it is a context manager, too."""

    def __init__(
        self,
        place: Address,
        target: ModuleTarget,
        block: StatusBlock,
        offer: MemoryOffer,
        siblings: EngineRanks,
        loan: ExitStack,
        by_mooncake: bool,
        max_memory_nbytes: int,
        number: int,
        engine: str,
        relay: Relay | None,
        proof: EngineProof | None,
    ) -> None:
        self._place, self._target, self._block, self._offer = place, target, block, offer
        self._siblings, self._loan, self._by_mooncake = siblings, loan, by_mooncake
        self._max_memory_nbytes, self._number, self._engine, self._relay = max_memory_nbytes, number, engine, relay
        self._proof, self._proven = proof, Proof()
        self._checked_places: MemoryPlaces = {}
        """Places of the tensors that `check` compares."""
        self._link: TrainerLink | None = None
        self._is_closed = False
        self._is_writing = False
        self._planned = False
        self._is_late = False
        """Whether the present call has waited in vain for a new step."""
        self._trainer: RankRegistration | None = None
        """The last trainer that was there."""
        self._held_offer = 0
        """Number of the trainer's offer that `step` is of."""
        self.step: int | None = None
        """The step whose weights all tensors hold; None before the first update, and after one that failed while it
        wrote: the values are then undefined, and the engine must not serve until the next update."""

    @names_own_arguments
    def update(self, step: int | None = None, *, timeout_seconds: float = 600.0) -> UpdateReport:
        """Take the weights of a step; every rank of the engine makes this call.

        It waits for a step that this engine does not hold yet, and returns when all ranks of the engine hold it and
        each trainer rank has confirmed that its weights did not change meanwhile. The tensors are written in place: no
        request may use them during the call.

        Args:
            step: the step to take; None: the next one that is visible, or the newest.
            timeout_seconds: how long the trainer and the other ranks may take.

        Raises:
            UsageError: the step is past, or the engine's tensors do not fit the trainer's.
            IncompleteError: no trainer came to the address in time.
            RankFailedError: a rank of the trainer or of this engine has failed, ended or was stopped. `step` is None
                if the tensors are undefined; the next call takes a whole step again.
            RankTimeoutError: no new step became visible in time, or a rank does not answer.
            ContradictionError: the trainer has changed its weights while they were visible; or, with ``proof=True``,
                the engine does not hold the trainer's values: it names tensor, rank and rows, and `step` is None.
            XrankError: as `xrank.load_model`, before a tensor changes.
        """
        return self._call(lambda deadline: self._update(step, deadline), timeout_seconds)

    @names_own_arguments
    def copy_from_engines(self, *, timeout_seconds: float = 600.0) -> UpdateReport:
        """Take the newest step of another engine at the address; every rank of the engine makes this call.

        It is for an engine that starts while the trainer is busy or gone. The other engine must have been made with
        ``take_weights(..., relay=True)``; it goes on serving. All bytes are compared with the digests that its ranks
        computed when they took the step. `update` then takes later steps of the trainer.

        Args:
            timeout_seconds: how long an engine may be in an update of its own, and the other ranks may take.

        Raises:
            IncompleteError: no other engine lends a step that this one does not hold.
            RankFailedError: the only engine that does has failed, or a rank of this engine; `step` as for `update`.
            ContradictionError: the other engine's tensors are not those of its step any more.
            UsageError: the engines' tensors do not fit, or the other engine has cast one to a smaller type.

        Example:
            >>> import torch, xrank
            >>> first, second = {"weight": torch.zeros(2)}, {"weight": torch.zeros(2)}
            >>> with xrank.take_weights(first, "refit", relay=True) as old, xrank.take_weights(second, "refit") as new:
            ...     with xrank.offer_weights({"weight": torch.ones(2)}, "refit", snapshot=True) as offer:
            ...         _ = offer.publish(7)
            ...         _ = old.update()
            ...     new.copy_from_engines().step  # the trainer is gone
            7
        """
        return self._call(self._copy_from_engines, timeout_seconds)

    @names_own_arguments
    def check(self) -> CheckReport:
        """Prove that this rank's tensors still have the values of the last update; other ranks make calls of their own.

        It digests all that copies have filled, tensors that were cast included, and compares with the update's digests.
        Tensors that a loader took whole, and elements that are padding, are not digested.

        Raises:
            UsageError: the weights were taken without ``proof=True``, or the engine has no step.
            ContradictionError: values have changed, or a tensor has other memory; it names tensor, rank and rows.

        Example:
            >>> import torch, xrank
            >>> served = {"weight": torch.zeros(8, 2)}
            >>> offer = xrank.offer_weights({"weight": torch.ones(8, 2)}, "refit", snapshot=True, proof=True)
            >>> weights = xrank.take_weights(served, "refit", proof=True)
            >>> _ = offer.publish(7)
            >>> list(weights.update().digests), weights.check().num_tensors
            (['weight'], 1)
            >>> served["weight"][3, 1] = 0
            >>> try:
            ...     weights.check()
            ... except xrank.errors.ContradictionError as error:
            ...     print(error)
            weight: engine rank 0 has different values than after its last update in rows 3-3
            >>> weights.close(); offer.close()
        """
        if self._proof is None or self.step is None or self._is_closed:
            raise UsageError(
                "there are no digests to compare with",
                got="no proof" if self._proof is None else "the engine has no step",
                want="a step from take_weights(..., proof=True)",
                next_step="call take_weights with proof=True, and update first",
            )
        started, rank = monotonic(), self._number
        if (moved := find_moved(self._checked_places, self._target.list_places())) is not None:
            raise ContradictionError(
                f"{moved[0]}: engine rank {rank} has replaced the tensor that the last update filled",
                tensor=moved[0],
                rank=rank,
                got=moved[2],
                want=moved[1],
                next_step="find what replaces the engine's weights, and call update again",
            )
        return CheckReport(self.step, *self._proof.check(), monotonic() - started)

    def close(self) -> None:
        """Stop taking weights: the trainer no longer waits for this rank. Further calls do nothing."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Close everything; the trainer's report names this rank if its last update has failed, or `error` ends it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._siblings.wait_until_seen()
        status = self._block.value
        cause = "" if status.phase is Phase.LATE else status.cause
        if error is not None and not cause:
            cause = f"{type(error).__name__}: {error}"
        is_of_trainer = self._trainer is not None and self._trainer.number == self._held_offer
        held = self.step if is_of_trainer and self.step is not None else -1
        if self._trainer is not None and (cause or held >= 0):  # it may look when the status can no longer be read
            content = {"cause": cause, "trainer": self._trainer.number, "round": status.round, "step": held}
            left = self._place.register("left", self._engine, self._number, content)
            if self._place.find_trainer_id() != self._trainer.id:  # it has closed, and looks no more
                self._place.remove(left)
        self._block.update(phase=Phase.ENDED, cause=cause, step=held)
        if self._relay is not None:
            self._relay.close()
        self._drop_link()
        self._siblings.close()
        self._loan.close()

    def _call(self, work: Callable[[Deadline], UpdateReport], timeout_seconds: float) -> UpdateReport:
        deadline = Deadline(timeout_seconds)
        if self._is_closed:
            raise UsageError("the weights are closed", next_step="call take_weights again")
        self._block.update(phase=Phase.WAITING, round=self._siblings.find_round(), cause="")
        self._is_writing = self._is_late = False
        try:
            return work(deadline)
        except BaseException as error:
            phase, step = Phase.LATE if self._is_late else Phase.FAILED, self._block.value.step
            if self._is_writing:
                self.step, phase, step = None, Phase.FAILED, -1  # no other engine may copy the tensors
            self._block.update(phase=phase, step=step, cause=f"{type(error).__name__}: {error}")
            raise

    def _update(self, step: int | None, deadline: Deadline) -> UpdateReport:
        while True:
            link = self._connect(deadline)
            check = partial(self._check, deadline, "a new step" if step is None else f"step {step}")
            open_statuses = link.wait_for_step(self._place, step, self.step, check)
            if open_statuses is None:  # another trainer has come
                continue
            found, started = open_statuses[0].step, monotonic()
            moved = self._copy(link)
            copy_seconds = monotonic() - started
            self._block.update(phase=Phase.COPIED)
            check = partial(self._check, deadline, "the trainer's confirmation")
            digests = [] if link.proof is None else link.read_digests(found)
            if not link.wait_for_confirmation(open_statuses, check):
                if step is not None:
                    raise ContradictionError(
                        f"the trainer closed step {found} before this rank had read it",
                        next_step="let publish wait longer, and get the next step",
                    )
                continue
            if link.proof is not None and len(digests) < len(link.peers):
                raise ContradictionError(
                    f"the trainer's ranks show no digests of step {found}",
                    got=f"{len(digests)} tables of {len(link.peers)} ranks",
                    next_step="use the same version of xrank in both jobs",
                )
            link.held_step = found
            if self._commit(link.planned, found, link.number, deadline, link.proof, digests):
                break
        plan_seconds = link.plan_seconds if self._planned else 0.0
        self._planned = False
        seconds = monotonic() - started
        return make_report(
            found, link.planned, link.transfer, moved, (seconds, copy_seconds, plan_seconds), self._proven
        )

    def _begin_writing(self, planned: TargetPlan, step: int, offer: int) -> None:
        self._is_writing = True
        generation = self._block.value.generation + 1
        self._block.update(phase=Phase.READING, step=step, offer=offer, generation=generation)
        self._target.begin(planned)

    def _commit(
        self,
        planned: TargetPlan,
        step: int,
        offer: int,
        deadline: Deadline,
        proof: ProofPlan | None,
        digests: Sequence[RankDigests] | None,
    ) -> bool:
        """Complete a step on all ranks of this engine; return False if another rank holds a newer one.

        The values are proven by the trainer's digests; None: there are none of this step.
        """
        self._target.finish(planned)
        if proof is not None and not self._prove(proof, step, offer, deadline, digests):
            return False
        if self._relay is not None:
            self._relay.record(planned)
        self._block.update(phase=Phase.DONE, step=step, offer=offer)
        if not self._siblings.wait_for_all(self._block.value, lambda: self._check(deadline, "the other ranks")):
            return False
        self.step, self._held_offer, self._is_writing = step, offer, False
        self._block.update(phase=Phase.CLOSED, committed=self._block.value.round)
        return True

    def _prove(
        self, plan: ProofPlan, step: int, offer: int, deadline: Deadline, digests: Sequence[RankDigests] | None
    ) -> bool:
        """Compare all ranks' values of a step with the trainer's; return False if another rank holds a newer one."""
        assert self._proof is not None
        self._block.update(phase=Phase.READING)  # the trainer need not confirm again
        self._proven, self._checked_places = Proof(unproven=plan.unproven), self._target.list_places()
        stamp = (self._block.value.round, offer, step)
        self._proof.record(plan.parts)
        if digests is None:
            return True
        self._proof.show(stamp)
        others = wait_for_tables(self._siblings.peers, stamp, lambda: self._check(deadline, "the other ranks"))
        if others is None:
            return False
        self._proven = compare(plan, digests, [self._proof.read_own(), *others])
        return True

    def _copy_from_engines(self, deadline: Deadline) -> UpdateReport:
        with ExitStack() as loan:
            engines = RelayedEngines(self._place, loan, self._engine)
            while True:
                found, failure = engines.find()
                for engine in found:
                    try:
                        report = self._copy_step(engine, deadline)
                    except EngineGoneError as error:
                        failure = error.failure
                        continue
                    if report is not None:
                        if self._link is not None and self._link.number == self._held_offer:
                            self._link.held_step = report.step
                        return report
                if not found:
                    raise failure or IncompleteError(
                        f"no other engine offers a step at {self._place.path}",
                        file=self._place.path,
                        got=f"step {'none' if self.step is None else self.step} is on the engine",
                        want="an engine of take_weights(..., relay=True) that has a newer step",
                        next_step="wait for the trainer with update",
                    )
                self._check(deadline, "a newer step of a different engine")
                sleep(LOOK_SECONDS / 10)
        raise AssertionError

    def _copy_step(self, engine: RelayedEngine, deadline: Deadline) -> UpdateReport | None:
        """Fill the tensors from the step that an engine holds, compare the bytes with their digests, and commit it.

        Return None if it holds no newer step, or has begun an update of its own meanwhile.
        """
        check = self._siblings.check
        with engine.naming_failures(check):
            before = engine.read()
        step, offer = before[0].step, before[0].offer
        if not _is_steady(before) or (self.step is not None and step <= self.step):
            return None
        started = monotonic()
        model = engine.read_model()
        cast = frozenset(str(one[0]) for each in engine.registrations for one in each.content["tensors"] if one[5])
        planned = replace(self._target.plan(model), cast=cast)
        for tensor in planned.plan.tensors:
            if tensor.output.name in cast and tensor.output.dtype != tensor.source_dtype:
                raise UsageError(
                    f"{tensor.output.name}: the other engine has cast it from the trainer's type",
                    tensor=tensor.output.name,
                    got=f"{tensor.source_dtype} there, {tensor.output.dtype} here",
                    next_step="get the step from the trainer, or from an engine with the same types",
                )
        with closing(engine.open_source(self._offer, model, check)) as source:
            transfer = make_transfer(planned, self._number, source, self._max_memory_nbytes)
            ready = monotonic()
            self._begin_writing(planned, -1, offer)
            with engine.naming_failures(check):
                moved = transfer.run(check)
                copied = monotonic()
                changed = engine.find_changed(planned.plan, model, source, check)
                now = engine.read()
        if not _is_steady(now) or any(
            (a.generation, a.step, a.offer) != (b.generation, b.step, b.offer) for a, b in zip(before, now, strict=True)
        ):
            return None  # a rank has begun to write meanwhile
        if changed is not None:
            raise changed
        proof = None if self._proof is None else plan_proof(planned, model, is_compared=False)
        if not self._commit(planned, step, offer, deadline, proof, None):
            return None
        times = monotonic() - ready, copied - ready, ready - started
        return make_report(step, planned, transfer, moved, times, self._proven)

    def _connect(self, deadline: Deadline) -> TrainerLink:
        """Return the link to the present trainer; make one, with its plan, if this rank has none."""
        if self._link is not None and (self._link.is_over or self._link.places != self._target.list_places()):
            self._drop_link()  # the trainer has ended, or the engine has new tensors
        failure: XrankError | None = None
        while True:
            if self._link is not None and self._link.registration.id == self._place.find_trainer_id():
                return self._link
            self._drop_link()
            trainer = self._place.read_trainer()
            self._trainer = trainer or self._trainer
            if trainer is not None:
                try:
                    self._link = self._connect_trainer(trainer)
                except (RankFailedError, RankTimeoutError) as error:
                    failure = error  # an earlier trainer's registration: another one may come
                else:
                    self._planned = True
                    if self._link.number == self._held_offer and self.step is not None:
                        self._link.held_step = self.step  # taken from another engine
                    return self._link
            if deadline.has_passed:
                self._is_late = True
                raise IncompleteError(
                    f"no trainer offers its weights at {self._place.path}",
                    file=self._place.trainer_path,
                    got="no registration" if failure is None else str(failure),
                    next_step="start a trainer that calls offer_weights with this directory, then repeat the call",
                )
            self._siblings.check()
            sleep(LOOK_SECONDS / 10)

    def _connect_trainer(self, registration: RankRegistration) -> TrainerLink:
        """Return a link to a trainer: its ranks answer, and the plan is proven."""
        offers = dict(find_trainer_ranks(registration))
        with ExitStack() as loan:
            peers = []
            for rank, description in offers.items():
                peers.append(PeerRank(f"trainer rank {rank}", rank, description))
                loan.callback(peers[-1].close)
            for peer in peers:
                peer.read()
            started = monotonic()
            if self._proof is not None and not registration.content.get("proof"):
                raise UsageError(
                    f"the trainer at {self._place.path} computes no digests to compare with",
                    file=registration.path,
                    got="an offer without proof",
                    want="offer_weights(..., proof=True)",
                    next_step="give proof=True on both sides, or omit it here",
                )
            model = read_trainer_model(registration)
            planned = self._target.plan(model)
            proof = None if self._proof is None else plan_proof(planned, model)
            source = open_source(
                self._offer,
                _OWN,
                offers,
                model.live.rank.tolist(),
                model.live.view.tolist(),
                check=self._siblings.check,
                mooncake=_join_mooncake(offers, planned, loan) if self._by_mooncake else None,
            )
            loan.callback(source.close)
            # Each rank of the engine reads other replicas than its neighbors.
            transfer = make_transfer(planned, self._number, source, self._max_memory_nbytes)
            places, seconds = self._target.list_places(), monotonic() - started
            return TrainerLink(registration, peers, planned, transfer, places, seconds, loan.pop_all(), proof)
        raise AssertionError

    def _copy(self, link: TrainerLink) -> int:
        """Fill all tensors, and return the number of bytes read."""
        self._begin_writing(link.planned, link.held_step, link.number)
        try:
            return link.transfer.run(self._siblings.check)
        except (LendingEndedError, UnreadableMemoryError):
            self._explain_end(link)
        except (RankFailedError, RankTimeoutError):
            link.read()  # it names the rank with its side
            raise

    def _explain_end(self, link: TrainerLink) -> NoReturn:
        link.watch()  # it names the rank that has ended or is stopped
        self._drop_link()
        if self._by_mooncake:
            raise RankTimeoutError(
                "Mooncake could not read the trainer's tensors, although all of its ranks answer",
                next_step="look at what Mooncake has logged, and check its variables (MOONCAKE_PROTOCOL, "
                f"MOONCAKE_DEVICE, MOONCAKE_LOCAL_HOSTNAME) on both sides; or omit {option('wire')} on both",
            )
        raise ContradictionError(
            "memory of a trainer's tensor can no longer be read",
            next_step="keep the offered tensors alive; then let the trainer offer its weights again",
        )

    def _check(self, deadline: Deadline, what: str) -> None:
        """Raise if another rank of this engine has failed, or the time is over."""
        self._siblings.check()
        if deadline.has_passed:
            self._is_late = True
            raise RankTimeoutError(
                f"{what} did not arrive within {deadline.timeout_seconds:g} s",
                got=f"step {'none' if self.step is None else self.step} is on the engine",
                next_step="check that the trainer publishes, and all ranks of the engine call update; then repeat "
                "the call",
            )

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
