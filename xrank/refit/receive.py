"""Receive: an engine's ranks take the weights of a trainer of another job, step by step."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from xrank.engine.executor import Budget
from xrank.errors import (
    ContradictionError,
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
from xrank.ranks.failure import Deadline
from xrank.ranks.loans import LendingEndedError, MemoryOffer, UnreadableMemoryError, is_mooncake, share_offers
from xrank.ranks.team import check_alike, find_group_team, find_world, nbytes_text
from xrank.readers.live.modules import FilledModule
from xrank.recipes.options import check_meeting, check_types, default_workers, live_layouts, parse_size
from xrank.refit.directory import Address, RankRegistration
from xrank.refit.links import (
    LOOK_SECONDS,
    EngineGoneError,
    Relay,
    RelayedEngines,
    TrainerLink,
    connect_trainer,
)
from xrank.refit.peers import EngineRanks, Phase, StatusBlock, open_siblings
from xrank.refit.targets import LoaderTarget, ModuleTarget, TargetPlan, UpdateReport, make_report

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap
    from xrank.refit.recording import Loader


@names_own_arguments
def take_weights(
    target: FilledModule,
    address: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    loader: Loader | None = None,
    relay: bool = False,
    max_memory: str | int = "64MB",
    wire: str | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> TakenWeights:
    """Prepare to take a trainer's weights; every rank of the engine makes this call, in any order with the trainer.

    The engine is a job of its own, with a world of its own or none. `TakenWeights.update` then takes step after step.
    The first one plans: it composes the trainer's layouts with those of the target, and proves that each element of
    each tensor is written once.

    Args:
        target: the rank's module or state dict, as for `xrank.load_model`, under Hugging Face's names; or, with
            `loader`, the engine's module in its own form.
        address: the directory of the trainer's `xrank.offer_weights`.
        layouts: the layouts of plain tensors that are cut; other plain tensors are whole.
        mesh: the mesh of `layouts`, if they have none, or of a Megatron module.
        loader: the engine's own function that takes (Hugging Face name, tensor) pairs and fills `target`, such as
            vLLM's ``model.load_weights``. It runs once on tensors without memory, which shows its copies; tensors that
            it changes on the way are given to it whole at each update (`UpdateReport.whole`). No layouts are needed.
        relay: whether other engines may copy this rank's step out of its memory, by `TakenWeights.copy_from_engines`.
            Each update then computes digests of the rank's bytes.
        max_memory: bytes of the buffers for tensors that are cast, strided, on a device, or of another host.
        wire: ``"mooncake"``: Mooncake's transfer engine copies runs of bytes, from a trainer whose `wire` is the same.
            None: the kernel copies on one host, sockets between hosts.
        group: the ranks of the engine, which take each step all together; None: all of the world.
        timeout_seconds: how long the engine's ranks may take to arrive.

    Raises:
        UsageError: an argument is wrong, or a tensor has no memory to fill.

    Example:
        >>> import torch, xrank
        >>> weights = xrank.take_weights({"weight": torch.zeros(2, 2)}, "refit")
        >>> offer = xrank.offer_weights({"weight": torch.ones(2, 2)}, "refit", snapshot=True)
        >>> _ = offer.publish(7)
        >>> weights.update().moved_nbytes
        16
        >>> weights.close(); offer.close()
    """
    require("torch", "take_weights")
    require_linux("take_weights")
    check_meeting(group, timeout_seconds)
    place = Address(address)
    team = find_group_team(
        group, os.path.join(place.path, "engine"), timeout_seconds=timeout_seconds, call="take_weights"
    )

    def read_arguments() -> tuple[ModuleTarget, int]:
        check_types(layouts, mesh)
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        is_mooncake(wire, "take_weights")
        if loader is None:
            return ModuleTarget(target, live_layouts(layouts, mesh), mesh, *find_world()), nbytes
        if layouts is not None or mesh is not None:
            raise UsageError(
                f"{option('loader')} shows how it cuts tensors; {option('layouts')} and {option('mesh')} have no use",
                next_step="leave layouts and mesh out",
            )
        return LoaderTarget(target, loader), nbytes

    def describe(made: tuple[ModuleTarget, int]) -> dict[str, str | None]:
        return {
            "call": "take_weights",
            "relay": str(relay),
            "address": place.path,
            "max_memory": nbytes_text(made[1]),
            "wire": wire,
        }

    with ExitStack() as loan:
        with team.together():
            (made, nbytes), _ = team.agree("the arguments", read_arguments, describe, check_alike(team.ranks))
            block = StatusBlock()
            offer = MemoryOffer([block], across_hosts=True, secret=team.secret)
            loan.callback(offer.close)
            parts = share_offers(team, "the engine's ranks", offer, {})
            own = parts[team.position]["offer"]
            engine = team.broadcast("the engine's name", secrets.token_hex(4) if team.is_first else None)
            loan.callback(place.remove, place.register("engine", engine, team.rank, {"offer": own}))
        by_mooncake = is_mooncake(wire, "take_weights")
        lender = Relay(place, engine, team.rank, team.ranks, own) if relay else None
        ranks = EngineRanks(block, open_siblings("engine", team, parts))
        return TakenWeights(
            place, made, block, offer, ranks, loan.pop_all(), by_mooncake, nbytes, team.rank, engine, lender
        )
    raise AssertionError


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
    ) -> None:
        self._place, self._target, self._block, self._offer = place, target, block, offer
        self._siblings, self._loan, self._by_mooncake = siblings, loan, by_mooncake
        self._max_memory_nbytes, self._number, self._engine, self._relay = max_memory_nbytes, number, engine, relay
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
        if self._trainer is not None and (cause or held >= 0):  # it may look when the status cannot be read any more
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
            if not link.wait_for_confirmation(open_statuses, check):
                if step is not None:
                    raise ContradictionError(
                        f"the trainer closed step {found} before this rank had read it",
                        next_step="let publish wait longer, and take the next step",
                    )
                continue
            link.held_step = found
            if self._commit(link.planned, found, link.number, deadline):
                break
        plan_seconds = link.plan_seconds if self._planned else 0.0
        self._planned = False
        seconds = monotonic() - started
        return make_report(found, link.planned, link.transfer, moved, (seconds, copy_seconds, plan_seconds))

    def _begin_writing(self, planned: TargetPlan, step: int, offer: int) -> None:
        self._is_writing = True
        generation = self._block.value.generation + 1
        self._block.update(phase=Phase.READING, step=step, offer=offer, generation=generation)
        self._target.begin(planned)

    def _commit(self, planned: TargetPlan, step: int, offer: int, deadline: Deadline) -> bool:
        """Complete a step on all ranks of this engine; return False if another rank holds a newer one."""
        self._target.finish(planned)
        if self._relay is not None:
            self._relay.record(planned)
        self._block.update(phase=Phase.DONE, step=step, offer=offer)
        if not self._siblings.wait_for_all(self._block.value, lambda: self._check(deadline, "the other ranks")):
            return False
        self.step, self._held_offer, self._is_writing = step, offer, False
        self._block.update(phase=Phase.CLOSED, committed=self._block.value.round)
        return True

    def _copy_from_engines(self, deadline: Deadline) -> UpdateReport:
        with ExitStack() as loan:
            engines = RelayedEngines(self._place, loan, self._engine)
            while True:
                found, failure = engines.find()
                for engine in found:
                    try:
                        report = engine.copy_into(
                            self._target,
                            self._offer,
                            self._begin_writing,
                            partial(self._commit, deadline=deadline),
                            self._siblings.check,
                            max_memory_nbytes=self._max_memory_nbytes,
                            number=self._number,
                            held_step=self.step,
                        )
                    except EngineGoneError as error:
                        failure = error.failure
                        continue
                    if report is not None:
                        if self._link is not None and self._link.number == self._held_offer:
                            self._link.held_step = report.step
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
                sleep(LOOK_SECONDS / 10)
        raise AssertionError

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
                    self._link = connect_trainer(
                        trainer,
                        self._target,
                        self._offer,
                        self._max_memory_nbytes,
                        self._siblings.check,
                        self._number,
                        by_mooncake=self._by_mooncake,
                    )
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
        if link.by_mooncake:
            raise RankTimeoutError(
                "Mooncake could not read the trainer's tensors, although all of its ranks answer",
                next_step="look at what Mooncake has logged, and check its variables (MOONCAKE_PROTOCOL, "
                f"MOONCAKE_DEVICE, MOONCAKE_LOCAL_HOSTNAME) on both sides; or leave {option('wire')} out on both",
            )
        raise ContradictionError(
            "memory of a trainer's tensor cannot be read any more",
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
                next_step="check that the trainer publishes, and all ranks of the engine call update; then repeat it",
            )

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
