"""What a trainer rank sees of the engines' ranks, and how the trainer's ranks come to the same outcome in each step.

The first rank decides: it looks at all other ranks of the trainer and at the engines, writes the outcome into its
memory, and then its step into its status. The others look at the first rank alone, take the outcome over, and show the
step in their own statuses. The first rank waits for that. So an outcome that one rank has taken is there to be read
until all have it, also if the first rank ends meanwhile: then the others look at each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from msgspec import Struct, field
from msgspec.structs import replace

from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.refit.directory import Address, RankRegistration
from xrank.refit.peers import (
    OutcomeBlock,
    PeerRank,
    Phase,
    RankStatus,
    StatusBlock,
    StepOutcome,
    check_phase,
    make_failure,
    wait_while,
)

_REFRESH_SECONDS = 0.05
"""Time between two looks into the directory."""
_RETRY_SECONDS = 0.5
"""Time in which an engine rank that has failed may repeat its call; then the trainer goes on without it."""
_LEAVE_SECONDS = 2.0
"""Longest time for which a rank that closes waits for others."""
_SUSPECT_SECONDS = 2.0
"""Longest time until all ranks have noticed that the first one does not answer."""
_SHOWN = (Phase.OPEN, Phase.STEADY)
_HOLDING = (Phase.CLOSED, Phase.WAITING, Phase.LATE, Phase.FAILED)
"""Phases in which all ranks of an engine hold the step of its status: a failure while it wrote has none."""


class EngineParts(Struct):
    """The engine ranks at one moment, by their part in a step."""

    waiting: list[PeerRank] = field(default_factory=list)
    """Ranks that have not yet taken the step."""
    taken: list[str] = field(default_factory=list)
    failed: list[tuple[PeerRank, RankStatus]] = field(default_factory=list)
    """Ranks whose last call of `update` has raised; for a moment they are among `waiting`, too."""
    reading: list[PeerRank] = field(default_factory=list)
    """Those of `waiting` that write to their tensors, or wait until what they wrote is confirmed."""
    must_confirm: bool = False
    """Whether one of them waits for that now: the others need no checks yet."""


class EngineWatch:
    """Finds engine ranks by their registrations, which the trainer's first rank removes, and reads their statuses."""

    def __init__(self, place: Address, offer: int, *, is_first: bool) -> None:
        self._place, self._offer, self._is_first = place, offer, is_first
        self._registrations: dict[str, RankRegistration] = {}
        self._peers: dict[str, PeerRank] = {}
        self._reported: dict[str, int] = {}
        """Rank -> the call of `update` whose failure was reported."""
        self._paused: set[str] = set()
        """Stopped or silent ranks, which are left alone until the next step."""
        self._failed: dict[str, tuple[int, float]] = {}
        """Rank -> the call of `update` that has failed, and the time since which this is known in the present step."""
        self._next_refresh = 0.0
        self._ended: dict[str, XrankError] = {}
        """Engine ranks that have ended, or were stopped, since the last outcome, and how."""
        self._left: dict[str, int] = {}
        """Engine ranks that have closed since the last outcome, and the step that they held."""
        self.look(-1)
        self._ended.clear()  # ranks of earlier jobs, whose registrations are removed now

    def begin_step(self) -> None:
        """Look again for ranks that were stopped or silent during the last step."""
        self._paused.clear()
        self._failed.clear()
        self._next_refresh = 0.0

    def look(self, step: int) -> EngineParts:
        """Return the engine ranks' parts in a step. Ranks that have ended are left out; `settle` names them."""
        self._refresh()
        found = EngineParts()
        for name, peer in list(self._peers.items()):
            try:
                status = peer.read()
            except (RankFailedError, RankTimeoutError) as error:
                self._lose(name, peer, error)
                continue
            if status.phase is Phase.ENDED:
                self._note_left(peer.role, peer.rank, status.cause, status.round, status.step)
                self._forget(name, remove=True)
            elif status.offer == self._offer and status.step >= step and status.phase in _HOLDING:
                found.taken.append(peer.role)
            elif status.phase is Phase.FAILED:
                found.failed.append((peer, status))
                if self._may_retry(name, status.round):
                    found.waiting.append(peer)
            else:
                found.waiting.append(peer)
                if status.phase in (Phase.READING, Phase.COPIED):
                    found.reading.append(peer)
                found.must_confirm |= status.phase is Phase.COPIED
        found.taken += [role for role, held in self._left.items() if held >= step and role not in found.taken]
        return found

    def settle(self, found: EngineParts) -> tuple[dict[str, str], list[XrankError]]:
        """Return why engine ranks have failed, by rank, and the errors of those that were not returned before."""
        errors = list(self._ended.values())
        failed = {
            role: (error.cause if isinstance(error, RankFailedError) else None) or error.message
            for role, error in self._ended.items()
        }
        for peer, status in found.failed:
            failed[peer.role] = status.cause
            if self._reported.get(peer.role) != status.round:
                self._reported[peer.role] = status.round
                errors.append(peer.make_error(status.cause))
        self._ended.clear()
        self._left.clear()
        return failed, errors

    def close(self) -> None:
        """Close all connections; after the trainer's registration was removed, no engine rank leaves last words."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._read_left()

    def _may_retry(self, name: str, round_: int) -> bool:
        """Return whether a rank that has failed may still repeat its call: in its first moment in this step."""
        known, since = self._failed.setdefault(name, (round_, monotonic()))
        if known != round_:
            since = monotonic()
            self._failed[name] = (round_, since)
        return monotonic() < since + _RETRY_SECONDS

    def _refresh(self) -> None:
        now = monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + _REFRESH_SECONDS
        found = self._place.find_all("engine", self._registrations)
        for name in [*self._peers.keys() - found.keys()]:
            self._forget(name)
        self._read_left()
        for name, one in found.items():
            if name not in self._registrations and name not in self._paused:
                self._add(name, one)
        self._registrations = {name: one for name, one in found.items() if name not in self._paused}

    def _add(self, name: str, registration: RankRegistration) -> None:
        try:
            content = registration.describe("an engine's rank", "engine, rank and offer")
            rank, engine = content["rank"].count(below=1 << 31), content["engine"].text()
            self._peers[name] = PeerRank(f"engine rank {rank} ({engine})", rank, content["offer"].table())
        except (CorruptError, RankFailedError, UsageError):
            if self._is_first:  # the trainer goes on: an engine with a damaged registration cannot take anything
                self._place.remove(registration)

    def _read_left(self) -> None:
        """Read and remove the last words of engine ranks that have closed."""
        for left in self._place.find_all("left").values() if self._is_first else ():
            with suppress(CorruptError):  # not xrank's
                content = left.describe("the end of an engine's rank", "engine, rank, step, round, cause and trainer")
                engine, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
                step, round_ = content["step"].count(low=-1), content["round"].count(low=-1)
                cause = content["cause"].text()
                if content["trainer"].value == self._offer:
                    self._note_left(f"engine rank {rank} ({engine})", rank, cause, round_, step)
            self._place.remove(left)

    def _note_left(self, role: str, rank: int, cause: str, round_: int, step: int) -> None:
        if not cause:
            self._left[role] = step
        elif self._reported.get(role) != round_:
            self._reported[role] = round_
            self._ended[role] = make_failure(role, rank, cause)

    def _lose(self, name: str, peer: PeerRank, error: XrankError) -> None:
        """Drop a rank that has failed. One that closes removes its registration before its status is gone."""
        if self._place.has(self._registrations[name]):
            self._ended[peer.role] = error
        else:
            self._read_left()
        if peer.may_return:
            self._paused.add(name)
            self._registrations.pop(name, None)
        self._forget(name, remove=not peer.may_return)

    def _forget(self, name: str, *, remove: bool = False) -> None:
        self._peers.pop(name).close()
        if remove and self._is_first and name in self._registrations:
            self._place.remove(self._registrations[name])


class TrainerRanks:
    """The other ranks of this trainer."""

    def __init__(
        self, block: StatusBlock, outcomes: OutcomeBlock, peers: Sequence[PeerRank], *, is_first: bool
    ) -> None:
        self.block, self.peers, self.is_first = block, peers, is_first
        self._outcomes = outcomes

    def check(self, step: int) -> None:
        """Raise if a step has failed on another rank; the error names it."""
        if self.is_first:
            self.find_late(step)
        else:
            outcome = self.find_outcome(step)
            if outcome is not None and outcome.error is not None:
                raise outcome.error

    def find_late(self, step: int) -> list[PeerRank]:
        """Return the ranks that do not show a step yet.

        Raises:
            RankFailedError, RankTimeoutError, ContradictionError: a rank has ended, failed in the step or gone on to
                another. Of several failures it is the one that the others follow from, as far as this can be seen.
        """
        late: list[PeerRank] = []
        reported: list[XrankError] = []
        followed: list[XrankError] = []
        for peer in self.peers:
            try:
                status = peer.read()
                _check_step(peer, status, step)
            except (RankFailedError, RankTimeoutError, ContradictionError) as error:
                if not peer.has_answered:
                    raise
                cause = error.cause if isinstance(error, RankFailedError) else None
                is_first_cause = cause is None or not cause.startswith(("RankFailedError", "RankTimeoutError"))
                (reported if is_first_cause else followed).append(error)
                continue
            if status.step < step or status.phase not in _SHOWN or not status.checks:
                late.append(peer)
        for failure in (*reported, *followed):
            raise failure
        return late

    def decide(self, outcome: StepOutcome) -> None:
        """Let the other ranks take an outcome over."""
        self._outcomes.write(outcome)
        self.block.write(replace(self.block.value, committed=outcome.step))

    def wait_until_known(self, step: int) -> None:
        """Wait until all living ranks have taken the outcome of a step over.

        Raises:
            RankFailedError: none has, because they took this rank for a failed one.
        """
        known: list[PeerRank] = []
        refusals: list[tuple[PeerRank, RankStatus]] = []

        def is_waited_for(peer: PeerRank) -> bool:
            status = peer.try_read()
            if status is None:
                return False  # the next step names it
            if status.committed >= step:
                known.append(peer)
            elif status.step >= step and status.phase in (Phase.FAILED, Phase.ENDED):
                refusals.append((peer, status))
            else:
                return True
            return False

        wait_while(self.peers, is_waited_for)
        if refusals and not known:
            check_phase(*refusals[-1])

    def find_outcome(self, step: int) -> StepOutcome | None:
        """Return the outcome of a step once the first rank has decided it.

        Raises:
            RankFailedError, RankTimeoutError: the first rank has failed or ended, and no rank knows an outcome.
            ContradictionError: the first rank publishes another step.
        """
        if self.is_first:
            return None
        first = self.peers[0]
        try:
            status = first.read()
        except (RankFailedError, RankTimeoutError) as error:
            if first.last is None or first.last.committed < step:
                return self._ask_others(step, error)
            status = first.last  # it was stopped after it had decided
        if status.committed >= step:
            return self._take_over(first, step)
        _check_step(first, status, step)
        return None

    def leave(self, cause: str) -> RankFailedError | None:
        """Show that this rank closes, and return the error of a rank that has ended before it closed.

        Each rank waits for a moment until all have seen each other close.
        """
        self.block.write(replace(self.block.value, phase=Phase.ENDED, checks=0, cause=cause))
        end = monotonic() + _LEAVE_SECONDS
        lost: list[RankFailedError] = []
        for checks in (0, 1):

            def is_open(peer: PeerRank, checks: int = checks) -> bool:
                if lost:
                    return False
                try:
                    status = peer.read()
                except RankTimeoutError:
                    return True
                except RankFailedError as error:
                    if not peer.may_return and not checks:
                        lost.append(error)
                    return peer.may_return
                return status.phase is not Phase.ENDED or status.checks < checks

            self.block.write(replace(self.block.value, checks=checks))
            wait_while(self.peers, is_open, end=end)
            if lost:
                return lost[0]
        return None

    def close(self) -> None:
        """Close all connections."""
        for peer in self.peers:
            peer.close()

    def _take_over(self, peer: PeerRank, step: int) -> StepOutcome:
        outcome = peer.read_outcome()
        if outcome.step != step:
            raise _step_error(peer, outcome.step, step)
        self.decide(outcome)
        return outcome

    def _ask_others(self, step: int, error: XrankError) -> StepOutcome:
        """Return the outcome that another rank has taken over from the first one, which has ended; else raise.

        A rank that shows its failure here takes no outcome from the first rank any more. So if all do, none has one.
        """
        cause = f"{type(error).__name__}: {error}"
        self.block.write(replace(self.block.value, phase=Phase.FAILED, step=step, cause=cause))
        knowing: list[PeerRank] = []

        def may_know(peer: PeerRank) -> bool:
            status = None if knowing else peer.try_read()
            if status is None:
                return False
            if status.committed >= step:
                knowing.append(peer)
                return False
            return status.step == step and status.phase not in (Phase.FAILED, Phase.ENDED)

        wait_while(self.peers[1:], may_know, end=monotonic() + _SUSPECT_SECONDS)
        if knowing:
            return self._take_over(knowing[0], step)
        raise error


def _check_step(peer: PeerRank, status: RankStatus, step: int) -> None:
    """Raise if a rank has failed in a step, has closed, or publishes a later step."""
    if status.step >= step or status.phase is Phase.ENDED:  # failures of earlier steps are over
        check_phase(peer, status)
    if status.step > step:
        raise _step_error(peer, status.step, step)


def _step_error(peer: PeerRank, got: int, step: int) -> ContradictionError:
    return ContradictionError(
        f"{peer.role} publishes step {got}, this rank step {step}",
        rank=peer.rank,
        want=f"step {step} on all ranks of the trainer",
        next_step="let all ranks publish the same steps in the same order",
    )
