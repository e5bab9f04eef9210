"""The offer of a trainer rank, which publishes its weights step by step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from time import monotonic, sleep
from types import TracebackType
from typing import Self

from xrank.errors import ContradictionError, RankTimeoutError, UsageError, XrankError
from xrank.public_calls import names_own_arguments
from xrank.ranks.deadline import Deadline
from xrank.refit.card import Address, Card
from xrank.refit.held_memory import MemoryPlaces, find_moved
from xrank.refit.offer_card import number_of
from xrank.refit.own_part import OwnPart
from xrank.refit.pause import Pause
from xrank.refit.peer_rank import PeerRank, check_phase, wait_until_done
from xrank.refit.report import PublishReport
from xrank.refit.status import Phase, Status, StatusBlock
from xrank.refit.takers import Survey, Takers
from xrank.words import list_text, plural

__all__ = ["Watch", "WeightsOffer"]

_PAUSE_SECONDS = 0.0005
_SIBLING_SECONDS = 0.05
"""Time between two looks at the trainer's other ranks, and at the tensors, while no engine rank waits for checks."""
_AHEAD_SECONDS = 1.0
"""Time for which another trainer rank may be a step ahead, until this one sees that all engine ranks are done."""


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
        block: StatusBlock,
        siblings: Sequence[PeerRank],
        loan: ExitStack,
        part: OwnPart,
        list_places: Callable[[], MemoryPlaces],
        watch: Watch,
    ) -> None:
        self._place, self._card, self._block, self._siblings = place, card, block, siblings
        self._loan, self._part, self._list_places = loan, part, list_places
        self._places, self._watch = list_places(), watch
        self._takers = Takers(place, number_of(card))
        self._ahead_since: float | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    @names_own_arguments
    def publish(self, step: int, *, timeout_seconds: float = 600.0) -> PublishReport:
        """Make the present weights visible as those of a step; every rank of the trainer makes this call.

        Without a snapshot it returns when all engine ranks at the address have taken the step: the weights must not
        change before, and torch's counts of changes are compared. Engine ranks that serve and have not called `update`
        are waited for, too. With a snapshot it waits only for engine ranks that still read the last one.

        Args:
            step: larger than that of the last call.
            timeout_seconds: how long engine ranks may take. The step is then closed, and they take the next one.

        Raises:
            UsageError: the step is not larger than the last one, or the offer is closed.
            ContradictionError: a tensor has changed its shape or its memory, or was changed in place while it was
                visible; another trainer has replaced this offer; or another rank publishes another step.
            RankFailedError: an engine rank has failed, ended or was stopped; all others have taken the step, and the
                next step may be published. Or another trainer rank has failed, and no engine takes the step.
            RankTimeoutError: engine ranks have not taken the step.
        """
        started, deadline = monotonic(), Deadline(timeout_seconds)
        with self._lock:
            self._check_call(step)
            self._check_places(step)
            self._takers.begin_step()
            self._part.synchronize()
            if self._part.is_snapshot:
                found = self._publish_copy(step, deadline)
            else:
                found = self._publish_in_place(step, deadline)
            self._raise_failures()
        return PublishReport(step, tuple(found.taken), tuple(found.missed), monotonic() - started)

    @names_own_arguments
    def wait_for_takers(self, count: int, *, timeout_seconds: float = 600.0) -> None:
        """Wait until that many engine ranks are at the address; this rank alone waits.

        Raises:
            RankTimeoutError: fewer came in time.
        """
        deadline = Deadline(timeout_seconds)
        with self._lock:
            while True:
                found = self._takers.survey(self._block.value.step)
                here = len(found.waiting) + len(found.taken) + len(found.missed)
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
                sleep(_PAUSE_SECONDS)

    def close(self) -> None:
        """End the offer; engines that wait or read raise an error. Further calls do nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wait_for_siblings()
            self._set(Phase.ENDED, self._block.value.step, self._block.value.cause)
            self._takers.close()
            for peer in self._siblings:
                peer.close()
            self._loan.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _raise_failures(self) -> None:
        """Raise the failures of engine ranks; if the caller then closes, the other ranks see why."""
        try:
            self._takers.raise_failures()
        except XrankError as error:
            self._block.write(replace(self._block.value, cause=f"{type(error).__name__}: {error}"))
            raise

    def _publish_in_place(self, step: int, deadline: Deadline) -> Survey:
        versions = self._part.count_versions()
        try:
            if self._part.prepared is not None:
                self._refill(step, deadline)
            self._set(Phase.OPEN, step)
            self._wait_for_fills(step, deadline)
            pause, next_look = Pause(), 0.0
            while True:
                found, is_due = self._takers.survey(step), monotonic() >= next_look
                if not found.waiting or found.must_confirm or is_due:
                    self._confirm(versions, step)
                if not found.waiting or deadline.has_passed:
                    break
                if is_due:
                    self._check_siblings(step)
                    next_look = monotonic() + _SIBLING_SECONDS
                if found.must_confirm:
                    pause = Pause()  # the rank goes on at once, and others come to the same point
                pause()
        except BaseException as error:
            self._set(Phase.FAILED, step, f"{type(error).__name__}: {error}")
            raise
        self._set(Phase.CLOSED, step)
        if found.waiting:
            raise self._late_error(found.waiting, f"taken step {step}", deadline)
        return found

    def _confirm(self, versions: Sequence[int], step: int) -> None:
        """Check the values, and count the checks for the engine ranks.

        An engine rank waits for the second check after its reads, as the first may have begun before they ended. Two in
        a row spare it another pause.
        """
        for _ in range(2):
            self._check_values(versions, step)
            self._block.write(replace(self._block.value, checks=self._block.value.checks + 1))

    def _publish_copy(self, step: int, deadline: Deadline) -> Survey:
        while (found := self._takers.survey(step)).reading:
            if deadline.has_passed:
                raise self._late_error(found.reading, f"read step {self._block.value.step}", deadline)
            sleep(_PAUSE_SECONDS)
        self._set(Phase.CLOSED, self._block.value.step)
        try:
            versions = self._part.count_versions()
            self._refill(step, deadline)
            self._set(Phase.STEADY, step)
            self._wait_for_fills(step, deadline)
            self._check_values(versions, step)
            self._block.write(replace(self._block.value, checks=1))  # this rank needs no other one any more
        except BaseException as error:
            self._set(Phase.FAILED, step, f"{type(error).__name__}: {error}")
            raise
        return Survey()

    def _refill(self, step: int, deadline: Deadline) -> None:
        """Fill all copies that are lent, from the present weights of all ranks."""
        prepared = self._part.prepared
        if prepared is None:
            self._part.refill()
            return
        self._watch.check = lambda: self._check_siblings(step)
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
        waiting = list(self._siblings)
        while True:
            statuses = [(peer, peer.read()) for peer in waiting]
            waiting = [
                peer for peer, now in statuses if now.step < step or (now.step == step and now.phase not in phases)
            ]
            if not waiting:
                return
            self._check_siblings(step)
            if deadline.has_passed:
                raise self._late_error(waiting, what, deadline)
            sleep(_PAUSE_SECONDS)

    def _wait_for_siblings(self) -> None:
        """Wait until no other rank looks for this one in the last step, for a moment at most."""
        step, prepared = self._block.value.step, self._part.prepared
        is_shared = prepared is not None and prepared.is_shared

        def needs(status: Status) -> bool:
            is_filling = is_shared and status.phase is Phase.STEADY and not status.checks
            return status.step == step and (status.phase in (Phase.OPEN, Phase.MEASURED) or is_filling)

        wait_until_done(self._siblings, needs)

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
        card = self._place.read_trainer()
        if card is None or card.id != self._card.id:
            raise ContradictionError(
                f"another trainer has replaced this offer at {self._place.path}",
                file=self._place.trainer_path,
                got="no card" if card is None else "the card of another offer",
                want="the card of this offer",
                next_step="end one of the trainers, or give each its own directory; then call offer_weights again",
            )

    def _check_places(self, step: int) -> None:
        moved = find_moved(self._places, self._list_places())
        if moved is not None:
            name, old, new = moved
            self._set(Phase.FAILED, step, f"{name} is not the tensor that was offered")  # for the other ranks
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

    def _check_siblings(self, step: int) -> None:
        """Raise if another trainer rank has failed, or publishes another step."""
        ahead = None
        for peer in self._siblings:
            status = peer.read()
            if status.step >= step or status.phase is Phase.ENDED:  # a failure of an earlier step is over
                check_phase(peer, status)
            if status.step > step:
                ahead = (peer, status)
        if ahead is None:
            self._ahead_since = None
            return
        now = monotonic()
        self._ahead_since = self._ahead_since or now
        if now > self._ahead_since + _AHEAD_SECONDS:
            peer, status = ahead
            raise ContradictionError(
                f"{peer.role} publishes step {status.step}, this rank step {step}",
                rank=peer.rank,
                got=f"step {status.step} on {peer.role}",
                want=f"step {step} on all ranks of the trainer",
                next_step="let all ranks publish the same steps in the same order",
            )

    def _late_error(self, late: Sequence[PeerRank], what: str, deadline: Deadline) -> RankTimeoutError:
        names = list_text([f"{peer.role} ({peer.place})" for peer in late], 4)
        return RankTimeoutError(
            f"{names} has not {what} in {deadline.timeout_seconds:g} s",
            rank=late[0].rank,
            waiting_for=tuple(peer.rank for peer in late),
            got=names,
            next_step="check why the engine does not call update; it takes the next step that is published",
        )
