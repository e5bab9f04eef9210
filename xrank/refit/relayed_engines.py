"""The engines at an address that lend the steps they hold."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from xrank.errors import CorruptError, RankFailedError, RankTimeoutError
from xrank.refit.card import Address, Card
from xrank.refit.peer_rank import PeerRank
from xrank.refit.relayed_engine import RelayedEngine


class RelayedEngines:
    """The engines at an address that lend their steps; connections are kept, so that a stopped rank is noticed.

    Args:
        place: the address.
        loan: closes the connections.
        own: name of an engine that is left out.
    """

    def __init__(self, place: Address, loan: ExitStack, own: str) -> None:
        self._place, self._loan, self._own = place, loan, own
        self._known: dict[tuple[str, ...], RelayedEngine] = {}
        """Ids of the ranks' cards -> the engine."""

    def find(self) -> tuple[list[RelayedEngine], RankFailedError | RankTimeoutError | None]:
        """Return the engines of which all ranks lend a step, the one with the newest first, and another's failure."""
        by_engine: dict[str, dict[int, Card]] = {}
        ranks_of: dict[str, tuple[int, ...]] = {}
        for card in self._place.read_relays():
            content = card.describe("an engine's rank", "engine, rank and all ranks")
            name, rank = content["engine"].text(), content["rank"].count(below=1 << 31)
            by_engine.setdefault(name, {})[rank] = card
            ranks_of.setdefault(name, content["ranks"].counts(below=1 << 31))
        found: list[tuple[int, RelayedEngine]] = []
        failure: RankFailedError | RankTimeoutError | None = None
        for name, cards in by_engine.items():
            ranks = ranks_of[name]
            if name == self._own or set(ranks) != set(cards):
                continue  # a rank has not taken a step yet, or has ended
            try:
                engine = self._connect(name, [cards[rank] for rank in ranks])
                found.append((min(status.step for status in engine.read()), engine))
            except (RankFailedError, RankTimeoutError) as error:
                failure = error
        return [engine for _, engine in sorted(found, key=lambda one: -one[0])], failure

    def _connect(self, name: str, cards: Sequence[Card]) -> RelayedEngine:
        ids = tuple(card.id for card in cards)
        if ids not in self._known:
            self._known[ids] = _connect(name, cards)
            self._loan.callback(self._known[ids].close)
        return self._known[ids]


def _connect(name: str, cards: Sequence[Card]) -> RelayedEngine:
    with ExitStack() as loan:
        peers = []
        for card in cards:
            content = card.describe("an engine's rank", "the description of its status")
            rank, status = content["rank"].count(below=1 << 31), content["status"].table()
            try:
                peers.append(PeerRank(f"engine rank {rank} ({name})", rank, status))
            except CorruptError as error:
                content["status"].refuse(f"the description of a status ({error.got})")
            loan.callback(peers[-1].close)
        loan.pop_all()
        return RelayedEngine(name, tuple(cards), tuple(peers))
    raise AssertionError
