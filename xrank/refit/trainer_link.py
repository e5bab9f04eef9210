"""An engine rank's link to one trainer: its ranks, the proven plan and the connections, kept over all steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic, sleep
from typing import Any

from msgspec import Struct, field

from xrank.engine.executor import Budget
from xrank.engine.replicas import spread_copies
from xrank.errors import RankFailedError, RankTimeoutError, UsageError, option
from xrank.ranks.loans import MemoryOffer, MooncakeEngine, PeerSource
from xrank.ranks.memory import locate_elements
from xrank.recipes.options import default_workers
from xrank.refit.directory import Address, RankRegistration, find_trainer_ranks, read_trainer_model
from xrank.refit.peers import (
    GRACE_SECONDS,
    PAUSE_SECONDS,
    SILENT_SECONDS,
    Pause,
    PeerRank,
    Phase,
    RankStatus,
    check_phase,
)
from xrank.refit.targets import MemoryPlaces, ModuleTarget, TargetPlan, Transfer, make_transfer

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
        """Return the statuses of all ranks; raise a failure of a step once, the end of a rank always.

        Raises:
            RankFailedError, RankTimeoutError: as `PeerRank.read` and `check_phase`.
        """
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
        """Read the statuses for a moment, after a read of memory has failed; errors as `read`."""
        end = monotonic() + SILENT_SECONDS
        while monotonic() < end:
            self.read()
            sleep(PAUSE_SECONDS)

    def wait_for_step(
        self, place: Address, step: int | None, engine_step: int | None, check: Callable[[], object]
    ) -> list[RankStatus] | None:
        """Return the statuses once all ranks show one new step; None if another trainer has come to the address.

        With a step, no other one is waited for; without, any that is not `engine_step`, which the engine holds.

        Raises:
            UsageError: the step is past.
            RankFailedError, RankTimeoutError: as `read`.
        """
        pause, next_look, seen = Pause(), 0.0, None

        def is_new(found: int) -> bool:
            return found == step or (step is None and (found > self.held_step or engine_step != found))

        while True:
            first = self.peers[0].try_read()  # `read` explains why it cannot be read
            if first is None or first != seen or is_new(first.step) or monotonic() >= next_look:
                statuses, seen, next_look = self.read(), first, monotonic() + LOOK_SECONDS
                newest = statuses[0].step
                if step is not None and any(status.is_past(step) for status in statuses):
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
        """Wait until all ranks confirm the bytes that were read; return False if they have closed the step.

        Raises:
            RankFailedError, RankTimeoutError: as `read`.
        """
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

    Of replicas, this rank, a `number` among the engine's, reads other ones than the ranks beside it.

    Raises:
        RankFailedError, RankTimeoutError: a trainer rank has ended, or does not answer.
        UsageError: a trainer rank does not lend by Mooncake.
        XrankError: as `read_trainer_model` and `ModuleTarget.plan`.
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
        source = PeerSource(
            offer,
            _OWN,
            offers,
            model.live.rank.tolist(),
            model.live.view.tolist(),
            check=check,
            timeout_seconds=SILENT_SECONDS,
            grace_seconds=GRACE_SECONDS,
            mooncake=_join_mooncake(offers, planned, loan) if by_mooncake else None,
        )
        loan.callback(source.close)
        budget = Budget.from_memory(max_memory_nbytes, default_workers())
        transfer = make_transfer(spread_copies(planned.plan, number), planned.tensors, source, budget)
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
