"""The ranks of a trainer, which come to the same outcome in each step.

The first rank decides: it looks at all other ranks of the trainer and at the engines, writes the outcome into its
memory, and then its step into its status. The others look at the first rank alone, take the outcome over, and show the
step in their own statuses. The first rank waits for that. So an outcome that one rank has taken is there to be read
until all have it, also if the first rank ends meanwhile: then the others look at each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic, sleep

from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError, XrankError
from xrank.refit.outcome import Outcome, OutcomeBlock
from xrank.refit.peer_rank import PeerRank, check_phase
from xrank.refit.status import Phase, Status, StatusBlock

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
