"""The engine ranks that take a trainer's weights, as one trainer rank sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError, UsageError, XrankError
from xrank.refit.card import Address, Card
from xrank.refit.peer_rank import PeerRank
from xrank.refit.status import Phase, Status

__all__ = ["Survey", "Takers"]

_REFRESH_SECONDS = 0.05
"""Time between two looks into the directory."""

_RETRY_SECONDS = 0.5
"""Time in which an engine rank that has failed may repeat its call; then the trainer goes on without it."""


@dataclass(slots=True)
class Survey:
    """The engine ranks at one moment, by their part in a step."""

    waiting: list[PeerRank] = field(default_factory=list)
    """Ranks that have not yet taken the step."""
    taken: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    reading: list[PeerRank] = field(default_factory=list)
    """Those of `waiting` that write to their tensors, or wait until what they wrote is confirmed."""
    must_confirm: bool = False
    """Whether one of them waits for that now: the others need no checks yet."""


class Takers:
    """Finds engine ranks by their cards, and reads their statuses.

    Args:
        place: the address.
        offer: number of the trainer's offer.
    """

    def __init__(self, place: Address, offer: int) -> None:
        self._place, self._offer = place, offer
        self._cards: dict[str, Card] = {}
        self._peers: dict[str, PeerRank] = {}
        self._seen: set[str] = set()
        """Ranks whose status was read at least once."""
        self._reported: dict[str, int] = {}
        """Rank -> the call of `update` whose failure was reported."""
        self._paused: set[str] = set()
        """Stopped or silent ranks, which are left alone until the next step."""
        self._failed: dict[str, tuple[int, float]] = {}
        """Rank -> the call of `update` that has failed, and the time since which this is known in the present step."""
        self._next_refresh = 0.0
        self.failures: list[XrankError] = []
        """Failures of engine ranks that the caller has not raised yet."""

    def begin_step(self) -> None:
        """Look again for ranks that were stopped or silent during the last step."""
        self._paused.clear()
        self._failed.clear()
        self._next_refresh = 0.0

    def survey(self, step: int) -> Survey:
        """Return the engine ranks' parts in a step. Ranks that have ended, or failed some time ago, are left out."""
        self._refresh()
        found = Survey()
        for name, peer in list(self._peers.items()):
            try:
                status = peer.read()
            except (RankFailedError, RankTimeoutError) as error:
                self._lose(name, peer, error)
                continue
            self._seen.add(name)
            self._sort(found, name, peer, status, step)
        return found

    def raise_failures(self) -> None:
        """Raise the failures of engine ranks since the last call.

        Raises:
            RankFailedError, RankTimeoutError: it names the first rank; `failures` has all.
        """
        failures, self.failures = self.failures, []
        if not failures:
            return
        first = failures[0]
        if isinstance(first, RankFailedError):
            first.failures = tuple(failures)
        raise first

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _sort(self, found: Survey, name: str, peer: PeerRank, status: Status, step: int) -> None:
        if status.phase is Phase.ENDED:
            self._drop(name)
        elif status.phase is Phase.FAILED:
            if self._may_retry(name, status.round):
                found.waiting.append(peer)
            elif self._reported.get(name) != status.round:
                self._reported[name] = status.round
                self.failures.append(peer.make_error(status.cause))
        elif status.offer == self._offer and status.step >= step:
            (found.missed if status.phase is Phase.MISSED else found.taken).append(peer.role)
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
        for name, card in cards.items():
            if name not in self._cards and name not in self._paused:
                self._add(name, card)
        self._cards = {name: card for name, card in cards.items() if name not in self._paused}

    def _add(self, name: str, card: Card) -> None:
        try:
            rank, engine = int(card.content["rank"]), str(card.content["engine"])
            self._peers[name] = PeerRank(f"engine rank {rank} ({engine})", rank, card.content["offer"])
        except (KeyError, TypeError, ValueError, CorruptError, UsageError):
            # The trainer goes on: an engine with a damaged card cannot take anything.
            self._place.remove(card)

    def _lose(self, name: str, peer: PeerRank, error: XrankError) -> None:
        """Drop a rank that has failed; a card that its dead process left earlier is only removed.

        A rank that closes removes its card before its status can no longer be read.
        """
        if name in self._seen and self._place.has(self._cards[name]):
            self.failures.append(error)
        if peer.may_return:
            self._paused.add(name)
            self._forget(name)
            self._cards.pop(name, None)
        else:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._forget(name)
        if name in self._cards:
            self._place.remove(self._cards[name])

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.close()
        self._seen.discard(name)
