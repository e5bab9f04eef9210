"""What a trainer rank sees of the engines' ranks, and how the trainer's ranks come to the same outcome in each step.

The first rank decides: it looks at all other ranks of the trainer and at the engines, writes the outcome into its
memory, and then its step into its status. The others look at the first rank alone, take the outcome over, and show the
step in their own statuses. The first rank waits for that. So an outcome that one rank has taken is there to be read
until all have it, also if the first rank ends meanwhile: then the others look at each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic, sleep

from xrank.errors import ContradictionError, CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.refit.directory import Address, Card
from xrank.refit.peers import Outcome, OutcomeBlock, PeerRank, Phase, Status, StatusBlock, check_phase, make_failure

_REFRESH_SECONDS = 0.05
"""Time between two looks into the directory."""

_RETRY_SECONDS = 0.5
"""Time in which an engine rank that has failed may repeat its call; then the trainer goes on without it."""

_HOLDING = (Phase.CLOSED, Phase.WAITING, Phase.LATE, Phase.FAILED)
"""Phases in which all ranks of an engine hold the step of its status: a failure while it wrote has none."""


@dataclass(slots=True)
class Survey:
    """The engine ranks at one moment, by their part in a step."""

    waiting: list[PeerRank] = field(default_factory=list)
    """Ranks that have not yet taken the step."""
    taken: list[str] = field(default_factory=list)
    failed: list[tuple[PeerRank, Status]] = field(default_factory=list)
    """Ranks whose last call of `update` has raised; for a moment they are among `waiting`, too."""
    reading: list[PeerRank] = field(default_factory=list)
    """Those of `waiting` that write to their tensors, or wait until what they wrote is confirmed."""
    must_confirm: bool = False
    """Whether one of them waits for that now: the others need no checks yet."""


class Takers:
    """Finds engine ranks by their cards, and reads their statuses.

    Args:
        place: the address.
        offer: number of the trainer's offer.
        is_first: whether this is the trainer's first rank, which alone removes cards.
    """

    def __init__(self, place: Address, offer: int, *, is_first: bool) -> None:
        self._place, self._offer, self._is_first = place, offer, is_first
        self._cards: dict[str, Card] = {}
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
        self.survey(-1)
        self._ended.clear()  # ranks of earlier jobs, whose cards are removed now

    def begin_step(self) -> None:
        """Look again for ranks that were stopped or silent during the last step."""
        self._paused.clear()
        self._failed.clear()
        self._next_refresh = 0.0

    def survey(self, step: int) -> Survey:
        """Return the engine ranks' parts in a step. Ranks that have ended are left out; `settle` names them."""
        self._refresh()
        found = Survey()
        for name, peer in list(self._peers.items()):
            try:
                status = peer.read()
            except (RankFailedError, RankTimeoutError) as error:
                self._lose(name, peer, error)
                continue
            self._sort(found, name, peer, status, step)
        found.taken += [role for role, held in self._left.items() if held >= step and role not in found.taken]
        return found

    def settle(self, found: Survey) -> tuple[dict[str, str], list[XrankError]]:
        """Return why engine ranks have failed, by rank, and the errors of those that were not returned before."""
        failed = {role: _cause_of(error) for role, error in self._ended.items()}
        errors = list(self._ended.values())
        for peer, status in found.failed:
            failed[peer.role] = status.cause
            if self._reported.get(peer.role) != status.round:
                self._reported[peer.role] = status.round
                errors.append(peer.make_error(status.cause))
        self._ended.clear()
        self._left.clear()
        return failed, errors

    def close(self) -> None:
        """Close all connections; after the trainer's card was removed, no rank of an engine leaves last words."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self._read_left()

    def _sort(self, found: Survey, name: str, peer: PeerRank, status: Status, step: int) -> None:
        if status.phase is Phase.ENDED:
            self._note_left(peer.role, peer.rank, status.cause, status.round, status.step)
            self._drop(name)
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
        cards = self._place.read_engines(self._cards)
        for name in [*self._peers.keys() - cards.keys()]:
            self._forget(name)
        self._read_left()
        for name, card in cards.items():
            if name not in self._cards and name not in self._paused:
                self._add(name, card)
        self._cards = {name: card for name, card in cards.items() if name not in self._paused}

    def _add(self, name: str, card: Card) -> None:
        try:
            content = card.describe("an engine's rank", "engine, rank and offer")
            rank, engine = content["rank"].count(below=1 << 31), content["engine"].text()
            self._peers[name] = PeerRank(f"engine rank {rank} ({engine})", rank, content["offer"].table())
        except (CorruptError, RankFailedError, UsageError):
            # The trainer goes on: an engine with a damaged card cannot take anything.
            self._remove(card)

    def _read_left(self) -> None:
        """Read and remove the last words of engine ranks that have closed."""
        if not self._is_first:
            return
        for card in self._place.read_left():
            with suppress(CorruptError):  # not xrank's
                content = card.describe("the end of an engine's rank", "engine, rank, step, round, cause and trainer")
                engine, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
                step, round_ = content["step"].count(low=-1), content["round"].count(low=-1)
                cause = content["cause"].text()
                if content["trainer"].value == self._offer:
                    self._note_left(f"engine rank {rank} ({engine})", rank, cause, round_, step)
            self._place.remove(card)

    def _note_left(self, role: str, rank: int, cause: str, round_: int, step: int) -> None:
        if not cause:
            self._left[role] = step
        elif self._reported.get(role) != round_:
            self._reported[role] = round_
            self._ended[role] = make_failure(role, rank, cause)

    def _lose(self, name: str, peer: PeerRank, error: XrankError) -> None:
        """Drop a rank that has failed. One that closes removes its card before its status cannot be read any more."""
        if self._place.has(self._cards[name]):
            self._ended[peer.role] = error
        else:
            self._read_left()
        if peer.may_return:
            self._paused.add(name)
            self._forget(name)
            self._cards.pop(name, None)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._forget(name)
        if name in self._cards:
            self._remove(self._cards[name])

    def _remove(self, card: Card) -> None:
        if self._is_first:
            self._place.remove(card)

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.close()


def _cause_of(error: XrankError) -> str:
    return (error.cause if isinstance(error, RankFailedError) else None) or error.message


_PAUSE_SECONDS = 0.0005
_LEAVE_SECONDS = 2.0
"""Longest time for which a rank that closes waits for others."""
_SUSPECT_SECONDS = 2.0
"""Longest time until all ranks have noticed that the first one does not answer."""
_SHOWN = (Phase.OPEN, Phase.STEADY)


class TrainerRanks:
    """The other ranks of this trainer.

    Args:
        block: this rank's status.
        outcomes: this rank's last outcome.
        peers: the other ranks, in the order of all ranks.
        is_first: whether this rank decides.
    """

    def __init__(
        self, block: StatusBlock, outcomes: OutcomeBlock, peers: Sequence[PeerRank], *, is_first: bool
    ) -> None:
        self.block, self.peers, self.is_first = block, peers, is_first
        self._outcomes = outcomes

    def check(self, step: int) -> None:
        """Raise if a step has failed on another rank.

        Raises:
            RankFailedError, RankTimeoutError, ContradictionError: it names the rank.
        """
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

    def decide(self, outcome: Outcome) -> None:
        """Let the other ranks take an outcome over."""
        self._outcomes.write(outcome)
        self.block.write(replace(self.block.value, committed=outcome.step))

    def wait_until_known(self, step: int) -> None:
        """Wait until all living ranks have taken the outcome of a step over.

        Raises:
            RankFailedError: none has, because they took this rank for a failed one.
        """
        waiting, is_known = list(self.peers), False
        refusal: tuple[PeerRank, Status] | None = None
        while waiting:
            for peer in list(waiting):
                try:
                    status = peer.read()
                except (RankFailedError, RankTimeoutError):
                    waiting.remove(peer)  # the next step names it
                    continue
                if status.committed >= step:
                    is_known = True
                elif status.step >= step and status.phase in (Phase.FAILED, Phase.ENDED):
                    refusal = peer, status
                else:
                    continue
                waiting.remove(peer)
            if waiting:
                sleep(_PAUSE_SECONDS)
        if refusal is not None and not is_known:
            check_phase(*refusal)

    def find_outcome(self, step: int) -> Outcome | None:
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

    def has_first_come(self, step: int) -> bool:
        """Return whether the first rank has come to a step."""
        return self.is_first or self.peers[0].read().step >= step

    def leave(self, cause: str) -> RankFailedError | None:
        """Show that this rank closes, and return the error of a rank that has ended before it closed.

        Each rank waits for a moment until all have seen each other close.

        Args:
            cause: the failure after which it closes; empty if there is none.
        """
        self.block.write(replace(self.block.value, phase=Phase.ENDED, checks=0, cause=cause))
        end = monotonic() + _LEAVE_SECONDS
        for checks in (0, 1):
            waiting = list(self.peers)
            self.block.write(replace(self.block.value, checks=checks))
            while waiting and monotonic() < end:
                for peer in list(waiting):
                    try:
                        status = peer.read()
                    except RankTimeoutError:
                        continue
                    except RankFailedError as error:
                        if not peer.may_return and not checks:
                            return error
                        if not peer.may_return:
                            waiting.remove(peer)
                        continue
                    if status.phase is Phase.ENDED and status.checks >= checks:
                        waiting.remove(peer)
                if waiting:
                    sleep(_PAUSE_SECONDS)
        return None

    def close(self) -> None:
        """Close all connections."""
        for peer in self.peers:
            peer.close()

    def _take_over(self, peer: PeerRank, step: int) -> Outcome:
        outcome = Outcome.from_json(peer.read_outcome())
        if outcome.step != step:
            raise _make_step_error(peer, outcome.step, step)
        self.decide(outcome)
        return outcome

    def _ask_others(self, step: int, error: XrankError) -> Outcome:
        """Return the outcome that another rank has taken over from the first one, which has ended; else raise.

        A rank that shows its failure here takes no outcome from the first rank any more. So if all do, none has one.
        """
        cause = f"{type(error).__name__}: {error}"
        self.block.write(replace(self.block.value, phase=Phase.FAILED, step=step, cause=cause))
        waiting, end = list(self.peers[1:]), monotonic() + _SUSPECT_SECONDS
        while waiting and monotonic() < end:
            for peer in list(waiting):
                try:
                    status = peer.read()
                except (RankFailedError, RankTimeoutError):
                    waiting.remove(peer)
                    continue
                if status.committed >= step:
                    return self._take_over(peer, step)
                if status.step != step or status.phase in (Phase.FAILED, Phase.ENDED):
                    waiting.remove(peer)
            if waiting:
                sleep(_PAUSE_SECONDS)
        raise error


def _check_step(peer: PeerRank, status: Status, step: int) -> None:
    """Raise if a rank has failed in a step, has closed, or publishes a later step."""
    if status.step >= step or status.phase is Phase.ENDED:  # failures of earlier steps are over
        check_phase(peer, status)
    if status.step > step:
        raise _make_step_error(peer, status.step, step)


def _make_step_error(peer: PeerRank, got: int, step: int) -> ContradictionError:
    return ContradictionError(
        f"{peer.role} publishes step {got}, this rank step {step}",
        rank=peer.rank,
        got=f"step {got} on {peer.role}",
        want=f"step {step} on all ranks of the trainer",
        next_step="let all ranks publish the same steps in the same order",
    )
