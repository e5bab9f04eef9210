"""An engine rank's side: it takes the trainer's weights, step by step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic, sleep
from types import TracebackType
from typing import NoReturn, Self

from xrank.errors import (
    ContradictionError,
    IncompleteError,
    RankFailedError,
    RankTimeoutError,
    UsageError,
    XrankError,
    names_own_arguments,
    option,
)
from xrank.lending.memory_offer import MemoryOffer
from xrank.lending.peer_memory import LendingEndedError, UnreadableMemoryError
from xrank.ranks.deadline import Deadline
from xrank.refit.card import Address, Card
from xrank.refit.engine_ranks import EngineRanks
from xrank.refit.offer_card import number_of
from xrank.refit.relay import Relay
from xrank.refit.relayed_engine import EngineGoneError, RelayedEngine
from xrank.refit.relayed_engines import RelayedEngines
from xrank.refit.report import UpdateReport, make_update_report
from xrank.refit.status import Phase, Status, StatusBlock
from xrank.refit.targets import Filling, Target
from xrank.refit.trainer_link import CARD_SECONDS, TrainerLink, connect_trainer


class TakenWeights:
    """An engine rank's weights, made by `xrank.take_weights`. One thread may use it; it is a context manager, too."""

    def __init__(
        self,
        place: Address,
        target: Target,
        block: StatusBlock,
        offer: MemoryOffer,
        siblings: EngineRanks,
        loan: ExitStack,
        max_memory_nbytes: int,
        number: int,
        engine: str,
        relay: Relay | None,
        *,
        by_mooncake: bool,
    ) -> None:
        self._place, self._target, self._block, self._offer = place, target, block, offer
        self._siblings, self._loan, self._max_memory_nbytes = siblings, loan, max_memory_nbytes
        self._number, self._engine, self._relay, self._by_mooncake = number, engine, relay, by_mooncake
        self._link: TrainerLink | None = None
        self._is_closed = False
        self._is_writing = False
        self._planned = False
        self._is_late = False
        """Whether the present call has waited in vain for a new step."""
        self._trainer: Card | None = None
        """The card of the last trainer that was there."""
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
            ContradictionError: the trainer has changed its weights while they were visible.
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

    def close(self) -> None:
        """Stop taking weights: the trainer no longer waits for this rank. Further calls do nothing."""
        self._end(None)

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
        last = replace(status, phase=Phase.ENDED, cause=cause, step=self._find_held_step())
        self._leave_last_words(last)
        self._block.write(last)
        if self._relay is not None:
            self._relay.close()
        self._drop_link()
        self._siblings.close()
        self._loan.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def _find_held_step(self) -> int:
        """Return the step that this rank holds of the trainer that it knows; -1 if there is none."""
        is_known = self._trainer is not None and number_of(self._trainer) == self._held_offer
        return self.step if is_known and self.step is not None else -1

    def _leave_last_words(self, last: Status) -> None:
        """Write down for the trainer how this rank ends: it may look when the status cannot be read any more."""
        if self._trainer is None or not (last.cause or last.step >= 0):
            return
        numbers = {"trainer": number_of(self._trainer), "round": last.round, "step": last.step}
        content = {"engine": self._engine, "rank": self._number, "cause": last.cause, **numbers}
        left = self._place.write_left(self._engine, self._number, content)
        card = self._place.read_trainer()
        if card is None or card.id != self._trainer.id:  # it has closed, and looks no more
            self._place.remove(left)

    def _call(self, work: Callable[[Deadline], UpdateReport], timeout_seconds: float) -> UpdateReport:
        deadline = Deadline(timeout_seconds)
        if self._is_closed:
            raise UsageError("the weights are closed", want="open weights", next_step="call take_weights again")
        self._block.write(replace(self._block.value, phase=Phase.WAITING, round=self._siblings.find_round(), cause=""))
        self._is_writing = self._is_late = False
        try:
            return work(deadline)
        except BaseException as error:
            phase = Phase.LATE if self._is_late and not self._is_writing else Phase.FAILED
            failed = replace(self._block.value, phase=phase, cause=f"{type(error).__name__}: {error}")
            if self._is_writing:
                self.step = None
                failed = replace(failed, step=-1)  # no other engine may copy the tensors
            self._block.write(failed)
            raise

    def _update(self, step: int | None, deadline: Deadline) -> UpdateReport:
        while True:
            link = self._connect(deadline)
            check = partial(self._check, deadline, "a new step" if step is None else f"step {step}")
            open_statuses = link.wait_for_step(self._place, step, self.step, check)
            if open_statuses is None:  # another trainer has come
                continue
            found, started = open_statuses[0].step, monotonic()
            moved = self._copy(link, open_statuses)
            copy_seconds = monotonic() - started
            self._block.write(replace(self._block.value, phase=Phase.COPIED))
            check = partial(self._check, deadline, "the trainer's confirmation")
            if not link.wait_for_confirmation(open_statuses, check):
                if step is not None:
                    raise ContradictionError(
                        f"the trainer closed step {found} before this rank had read it",
                        want="a step that stays visible until it is read",
                        next_step="let publish wait longer, and take the next step",
                    )
                continue
            link.held_step = found
            if self._commit(link.filling, found, link.number, deadline):
                break
        plan_seconds = link.plan_seconds if self._planned else 0.0
        self._planned = False
        seconds = monotonic() - started
        return make_update_report(found, link.filling, link.transfer, moved, seconds, copy_seconds, plan_seconds)

    def _commit(self, filling: Filling, step: int, offer: int, deadline: Deadline) -> bool:
        """Complete a step on all ranks of this engine; return False if another rank holds a newer one."""
        self._target.finish(filling)
        if self._relay is not None:
            self._relay.record(filling)
        self._block.write(replace(self._block.value, phase=Phase.DONE, step=step, offer=offer))
        if not self._siblings.wait_for_all(self._block.value, lambda: self._check(deadline, "the other ranks")):
            return False
        self.step, self._held_offer, self._is_writing = step, offer, False
        self._block.write(replace(self._block.value, phase=Phase.CLOSED, committed=self._block.value.round))
        return True

    def _begin_writing(self, filling: Filling, step: int, offer: int) -> None:
        self._is_writing = True
        old = self._block.value
        self._block.write(replace(old, phase=Phase.READING, step=step, offer=offer, generation=old.generation + 1))
        self._target.begin(filling)

    def _copy_from_engines(self, deadline: Deadline) -> UpdateReport:
        with ExitStack() as loan:
            engines = RelayedEngines(self._place, loan, self._engine)
            while True:
                found, failure = engines.find()
                for engine in found:
                    try:
                        report = self._copy_from(engine, deadline)
                    except EngineGoneError as error:
                        failure = error.failure
                        continue
                    if report is not None:
                        return report
                if not found:
                    raise failure or IncompleteError(
                        f"no other engine lends a step at {self._place.path}",
                        file=self._place.path,
                        got=f"step {'none' if self.step is None else self.step} is held",
                        want="an engine of take_weights(..., relay=True) that has taken a newer step",
                        next_step="wait for the trainer by update",
                    )
                self._check(deadline, "a newer step of another engine")
                sleep(CARD_SECONDS / 10)
        raise AssertionError

    def _copy_from(self, engine: RelayedEngine, deadline: Deadline) -> UpdateReport | None:
        """Return the report of a copy; None if the engine holds no newer step, or begins an update meanwhile."""
        started = monotonic()
        copy = engine.copy_into(
            self._target,
            self._offer,
            lambda filling, number: self._begin_writing(filling, -1, number),
            self._siblings.check,
            max_memory_nbytes=self._max_memory_nbytes,
            number=self._number,
            held_step=self.step,
        )
        if copy is None or not self._commit(copy.filling, copy.step, copy.number, deadline):
            return None
        if self._link is not None and self._link.number == copy.number:
            self._link.held_step = copy.step
        seconds = monotonic() - started - copy.plan_seconds
        return make_update_report(
            copy.step, copy.filling, copy.transfer, copy.moved_nbytes, seconds, copy.copy_seconds, copy.plan_seconds
        )

    def _connect(self, deadline: Deadline) -> TrainerLink:
        """Return the link to the trainer of the present card, and plan if there is none yet."""
        if self._link is not None and (self._link.is_over or self._link.places != self._target.list_places()):
            self._drop_link()  # the trainer has ended, or the engine has new tensors
        failure: XrankError | None = None
        while True:
            card = self._place.read_trainer()
            self._trainer = card or self._trainer
            if card is not None and self._link is not None and self._link.card.id == card.id:
                return self._link
            self._drop_link()
            if card is not None:
                try:
                    self._link = connect_trainer(
                        card,
                        self._target,
                        self._offer,
                        self._max_memory_nbytes,
                        self._siblings.check,
                        self._number,
                        by_mooncake=self._by_mooncake,
                    )
                except (RankFailedError, RankTimeoutError) as error:
                    failure = error  # an earlier trainer's card: another one may come
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
                    got="no card" if failure is None else str(failure),
                    want="a live trainer that has called offer_weights with this directory",
                    next_step="start the trainer, then repeat the call",
                )
            self._siblings.check()
            sleep(CARD_SECONDS / 10)

    def _copy(self, link: TrainerLink, statuses: Sequence[Status]) -> int:
        """Fill all tensors, and return the number of bytes read."""
        self._begin_writing(link.filling, link.held_step, link.number)
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
                want="a network on which Mooncake reaches the trainer's hosts",
                next_step="look at what Mooncake has logged, and check its variables (MOONCAKE_PROTOCOL, "
                f"MOONCAKE_DEVICE, MOONCAKE_LOCAL_HOSTNAME) on both sides; or leave {option('wire')} out on both",
            )
        raise ContradictionError(
            "memory of a trainer's tensor cannot be read any more",
            want="the memory that the offer describes",
            next_step="keep the offered tensors alive; then let the trainer offer its weights again",
        )

    def _check(self, deadline: Deadline, what: str) -> None:
        """Raise if another rank of this engine has failed, or the time is over."""
        self._siblings.check()
        if deadline.has_passed:
            self._is_late = True
            raise RankTimeoutError(
                f"{what} did not come in {deadline.timeout_seconds:g} s",
                got=f"step {'none' if self.step is None else self.step} is held",
                want=what,
                next_step="check that the trainer publishes, and all ranks of the engine call update; then repeat it",
            )

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
