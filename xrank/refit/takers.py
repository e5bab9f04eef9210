"""The engine ranks that take a trainer's weights, as one trainer rank sees them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.refit.card import Address, Card
from xrank.refit.peer_rank import PeerRank, make_failure
from xrank.refit.status import Phase, Status

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
