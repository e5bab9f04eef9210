"""The offer of a trainer rank, which publishes its weights step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from xrank.errors import (
    ContradictionError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
    XrankError,
    names_own_arguments,
)
from xrank.ranks.deadline import Deadline
from xrank.refit.card import Address, Card
from xrank.refit.held_memory import MemoryPlaces, find_moved
from xrank.refit.offer_card import number_of
from xrank.refit.outcome import Outcome, describe_error, make_described_error
from xrank.refit.own_part import OwnPart
from xrank.refit.pause import Pause
from xrank.refit.peer_rank import PeerRank, make_failure
from xrank.refit.report import PublishReport
from xrank.refit.status import Phase
from xrank.refit.takers import Survey, Takers
from xrank.refit.trainer_ranks import TrainerRanks
from xrank.words import list_text, plural

_PAUSE_SECONDS = 0.0005
_SIBLING_SECONDS = 0.05
"""Time between two looks at the trainer's other ranks, and at the tensors, while no engine rank waits for checks."""


@dataclass(slots=True, eq=False)
class Watch:
    """Raises if another trainer rank has failed; the offer replaces the check at each step."""

    check: Callable[[], object]

    def __call__(self) -> object:
        """Run the check."""
        return self.check()


class WeightsOffer:
    """A trainer rank's offer, made by `xrank.offer_weights`. One thread may use it; it is a context manager, too."""

    def __init__(
        self,
        place: Address,
        card: Card,
        ranks: TrainerRanks,
        own_rank: int,
        loan: ExitStack,
        part: OwnPart,
        list_places: Callable[[], MemoryPlaces],
        watch: Watch,
        *,
        raises: bool,
    ) -> None:
        self._place, self._card, self._ranks, self._block = place, card, ranks, ranks.block
        self._loan, self._part, self._list_places = loan, part, list_places
        self._places, self._watch, self._own_rank, self._raises = list_places(), watch, own_rank, raises
        self._takers = Takers(place, number_of(card), is_first=ranks.is_first)
        self._lock = threading.Lock()
        self._is_closed = False

    @names_own_arguments
    def publish(self, step: int, *, timeout_seconds: float = 600.0) -> PublishReport:
        """Make the present weights visible as those of a step; every rank of the trainer makes this call.

        Without a snapshot it returns when all engine ranks at the address have taken the step: the weights must not
        change before, and torch's counts of changes are compared. Engine ranks that serve and have not called `update`
        are waited for, too. With a snapshot it waits only for engine ranks that still read the last one, and for the
        copies of all ranks of the trainer.

        All ranks of the trainer come to the same outcome: that of the first rank.

        Args:
            step: larger than that of the last call.
            timeout_seconds: how long engine ranks may take. The step is then closed, and they take the next one.

        Raises:
            UsageError: the step is not larger than the last one, or the offer is closed.
            ContradictionError: a tensor has changed its shape or its memory, or was changed in place while it was
                visible; another trainer has replaced this offer; or another rank publishes another step.
            RankFailedError: another trainer rank has failed or ended, and no engine takes the step. With
                ``on_engine_failure="raise"`` also: an engine rank has failed, ended or was stopped; all others have
                taken the step, and the next step may be published.
            RankTimeoutError: engine ranks have not taken the step, or a trainer rank has not come to it.
        """
        started, deadline = monotonic(), Deadline(timeout_seconds)
        with self._lock:
            self._check_call(step)
            try:
                self._check_places(step)
                self._takers.begin_step()
                self._part.synchronize()
                outcome = (self._publish_copy if self._part.is_snapshot else self._publish_in_place)(step, deadline)
                if outcome.is_over and outcome.error is not None:
                    raise outcome.error
            except BaseException as error:
                self._set(Phase.FAILED, step, f"{type(error).__name__}: {error}")
                if self._ranks.is_first and isinstance(error, RankFailedError | RankTimeoutError):
                    self._ranks.decide(Outcome(step, error=error, is_over=True))
                raise
            if not self._part.is_snapshot:
                self._set(Phase.CLOSED, step)
            if outcome.error is not None:  # if the caller then closes, others see why
                cause = f"{type(outcome.error).__name__}: {outcome.error}"
                self._block.write(replace(self._block.value, cause=cause))
                raise outcome.error
        return PublishReport(step, outcome.takers, outcome.failed, monotonic() - started)

    @names_own_arguments
    def wait_for_takers(self, count: int, *, timeout_seconds: float = 600.0) -> None:
        """Wait until that many engine ranks are at the address; this rank alone waits.

        Raises:
            RankTimeoutError: fewer came in time.
        """
        deadline, pause = Deadline(timeout_seconds), Pause()
        with self._lock:
            while True:
                found = self._takers.survey(self._block.value.step)
                here = len(found.waiting) + len(found.taken)
                if here >= count:
                    return
                if deadline.has_passed:
                    raise RankTimeoutError(
                        f"{here} of {plural(count, 'engine rank')} came to {self._place.path} in {timeout_seconds:g} s",
                        file=self._place.path,
                        got=plural(here, "engine rank"),
                        want=plural(count, "engine rank"),
                        next_step="check that the engine's ranks call take_weights with this directory",
                    )
                pause()

    def close(self) -> None:
        """End the offer; engines that wait or read raise an error. Further calls do nothing.

        Raises:
            RankFailedError: another rank of the trainer has ended without a call of this. The offer is closed.
        """
        failure = self._end(None)
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = self._end(error)
        if failure is not None and error is None:
            raise failure

    def _end(self, error: BaseException | None) -> XrankError | None:
        """Close everything, and return how another trainer rank has ended, if that ends the offer.

        Args:
            error: the exception that leaves the `with` block; the other ranks get it from their own calls.
        """
        with self._lock:
            if self._is_closed:
                return None
            self._is_closed = True
            try:
                if error is not None:  # before the others see this rank close
                    self._note_failure(error)
                cause = self._block.value.cause if error is None else f"{type(error).__name__}: {error}"
                lost = self._ranks.leave(cause)
                failure = self._find_noted_failure()
                # A rank that has closed cannot be read, as one that was killed; but it has removed the trainer's card.
                if failure is None and lost is not None and self._place.has(self._card):
                    self._note_failure(lost)
                    failure = lost
            finally:
                self._ranks.close()
                self._loan.close()
                self._takers.close()
            return failure

    def _note_failure(self, error: BaseException) -> None:
        """Write the reason of the offer's end into the directory, for ranks that come to their calls later."""
        if not self._ranks.peers or self._find_noted_failure() is not None:
            return
        if not isinstance(error, RankFailedError):
            error = make_failure(f"trainer rank {self._own_rank}", self._own_rank, f"{type(error).__name__}: {error}")
        self._place.write_failure(self._card, describe_error(error))

    def _find_noted_failure(self) -> XrankError | None:
        noted = self._place.read_failure(self._card) if self._ranks.peers else None
        return None if noted is None else make_described_error(noted)

    def _publish_in_place(self, step: int, deadline: Deadline) -> Outcome:
        versions = self._part.count_versions()
        if self._part.prepared is not None:
            self._refill(step, deadline)
        self._set(Phase.OPEN, step)
        self._wait_for_fills(step, deadline)
        pause, next_look = Pause(), 0.0
        while True:
            outcome = self._ranks.find_outcome(step)
            if outcome is not None:
                return outcome
            found, is_due = self._takers.survey(step), monotonic() >= next_look
            is_done = self._ranks.is_first and not found.waiting
            if found.must_confirm or is_done or is_due:
                self._confirm(versions, step)
            if is_due or is_done:
                outcome = self._decide(found, step, deadline)
                if outcome is not None:
                    return outcome
                next_look = monotonic() + _SIBLING_SECONDS
            if found.must_confirm:
                pause = Pause()  # the rank goes on at once, and others come to the same point
            pause()

    def _decide(self, found: Survey, step: int, deadline: Deadline) -> Outcome | None:
        """Decide the outcome of a step on the first rank, once it is known.

        Args:
            found: the engine ranks; those that it waits for hold the outcome up.
            step: the step.
            deadline: of the call.

        Raises:
            RankTimeoutError: a rank of the trainer has not come to the step in time.
            XrankError: as `TrainerRanks.check`.
        """
        if not self._ranks.is_first:
            if deadline.has_passed and not self._ranks.has_first_come(step):
                raise self._late_error(self._ranks.peers[:1], f"come to step {step}", deadline)
            return None
        late = self._ranks.find_late(step)
        if late and deadline.has_passed:
            raise self._late_error(late, f"come to step {step}", deadline)
        if late or (found.waiting and not deadline.has_passed):
            return None
        failed, errors = self._takers.settle(found)
        error: XrankError | None = None
        if found.waiting:
            error = self._late_error(found.waiting, f"taken step {step}", deadline)
        elif self._raises and errors:
            error = errors[0]
            if isinstance(error, RankFailedError):
                error.failures = tuple(errors)
        outcome = Outcome(step, tuple(found.taken), failed, error)
        self._ranks.decide(outcome)
        self._ranks.wait_until_known(step)
        return outcome

    def _confirm(self, versions: Sequence[int], step: int) -> None:
        """Check the values, and count the checks for the engine ranks.

        An engine rank waits for the second check after its reads, as the first may have begun before they ended. Two in
        a row spare it another pause.
        """
        for _ in range(2):
            self._check_values(versions, step)
            self._block.write(replace(self._block.value, checks=self._block.value.checks + 1))

    def _publish_copy(self, step: int, deadline: Deadline) -> Outcome:
        pause = Pause()
        while (found := self._takers.survey(step)).reading:
            self._ranks.check(step)
            if deadline.has_passed:
                raise self._late_error(found.reading, f"read step {self._block.value.step}", deadline)
            pause()
        self._set(Phase.CLOSED, self._block.value.step)
        versions = self._part.count_versions()
        self._refill(step, deadline)
        self._set(Phase.STEADY, step)
        self._wait_for_fills(step, deadline)
        self._check_values(versions, step)
        self._block.write(replace(self._block.value, checks=1))  # this rank needs no other one any more
        pause = Pause()
        while True:
            outcome = self._ranks.find_outcome(step)
            if outcome is None:
                # Engines take the step when they like: none holds its outcome up.
                outcome = self._decide(Survey(failed=found.failed), step, deadline)
            if outcome is not None:
                return outcome
            pause()

    def _refill(self, step: int, deadline: Deadline) -> None:
        """Fill all copies that are lent, from the present weights of all ranks."""
        prepared = self._part.prepared
        if prepared is None:
            self._part.refill()
            return
        self._watch.check = lambda: self._ranks.check(step)
        versions = self._part.count_versions()
        prepared.measure()
        if prepared.is_shared:
            self._set(Phase.MEASURED, step)
            self._wait_for_phase(step, deadline, f"come to step {step}", (Phase.MEASURED, Phase.OPEN, Phase.STEADY))
        prepared.fill()
        self._check_values(versions, step)

    def _wait_for_fills(self, step: int, deadline: Deadline) -> None:
        """Wait until no other rank reads this rank's weights or maxima any more."""
        if self._part.prepared is not None and self._part.prepared.is_shared:
            self._wait_for_phase(step, deadline, f"prepared step {step}", (Phase.OPEN, Phase.STEADY, Phase.CLOSED))

    def _wait_for_phase(self, step: int, deadline: Deadline, what: str, phases: Sequence[Phase]) -> None:
        waiting = list(self._ranks.peers)
        while True:
            statuses = [(peer, peer.read()) for peer in waiting]
            waiting = [
                peer for peer, now in statuses if now.step < step or (now.step == step and now.phase not in phases)
            ]
            if not waiting:
                return
            self._ranks.check(step)
            if deadline.has_passed:
                raise self._late_error(waiting, what, deadline)
            sleep(_PAUSE_SECONDS)

    def _set(self, phase: Phase, step: int, cause: str = "") -> None:
        old = self._block.value
        self._block.write(replace(old, phase=phase, step=step, cause=cause, checks=0, generation=old.generation + 1))

    def _check_call(self, step: int) -> None:
        if self._is_closed:
            raise UsageError("the offer is closed", want="an open offer", next_step="call offer_weights again")
        last = self._block.value.step
        if isinstance(step, bool) or not isinstance(step, int) or step <= last or not 0 <= step < 1 << 62:
            raise UsageError(
                f"step {step} is out of order",
                got=f"step {step!r} after {'no step' if last < 0 else f'step {last}'}",
                want=f"an integer of at least {last + 1}",
                next_step="number the steps upwards; after a restart make a new offer",
            )
        failure = self._find_noted_failure()
        if failure is not None:
            raise failure
        card = self._place.read_trainer()
        if card is None:  # a rank of this trainer has closed its offer
            self._ranks.find_late(step)
        if card is None or card.id != self._card.id:
            what = "the card of this offer is gone" if card is None else "another trainer has replaced this offer"
            raise ContradictionError(
                f"{what} at {self._place.path}",
                file=self._place.trainer_path,
                got="no card" if card is None else "the card of another offer",
                want="the card of this offer",
                next_step="end one of the trainers, or give each its own directory; then call offer_weights again",
            )

    def _check_places(self, step: int) -> None:
        moved = find_moved(self._places, self._list_places())
        if moved is not None:
            name, old, new = moved
            raise ContradictionError(
                f"{name} is not the tensor that was offered",
                tensor=name,
                got=new,
                want=old,
                next_step="close the offer and call offer_weights again: engines then plan anew",
            )

    def _check_values(self, versions: Sequence[int], step: int) -> None:
        if self._part.count_versions() != versions:
            raise ContradictionError(
                f"a tensor was changed in place while step {step} was visible",
                want="the same values until publish has returned",
                next_step="do not step the optimizer meanwhile, in any thread or hook, or use snapshot=True",
            )

    def _late_error(self, late: Sequence[PeerRank], what: str, deadline: Deadline) -> RankTimeoutError:
        names = list_text([f"{peer.role} ({peer.place})" for peer in late], 4)
        return RankTimeoutError(
            f"{names} has not {what} in {deadline.timeout_seconds:g} s",
            rank=late[0].rank,
            waiting_for=tuple(peer.rank for peer in late),
            got=names,
            next_step=f"check why {late[0].role} does not come; it takes the next step that is published",
        )
