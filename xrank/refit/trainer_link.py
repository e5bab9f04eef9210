"""An engine rank's link to one trainer: its ranks, the proven plan and the connections, kept over all steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

from xrank.decisions.options import default_workers
from xrank.lending.memory_offer import MemoryOffer
from xrank.lending.peer_source import PeerSource
from xrank.plan.executor import Budget
from xrank.plan.replicas import spread_copies
from xrank.refit.card import Card
from xrank.refit.held_memory import MemoryPlaces
from xrank.refit.offer_card import find_trainer_ranks, number_of
from xrank.refit.peer_rank import PeerRank
from xrank.refit.status import Status
from xrank.refit.targets import Filling, Target
from xrank.refit.trainer_model import read_trainer_model
from xrank.refit.transfer import Transfer, make_transfer

__all__ = ["TrainerLink", "connect_trainer"]

_OWN = -1
"""Rank of this process among the trainer's: none of them."""
_GRACE_SECONDS = 0.2
_SILENT_SECONDS = 1.5


@dataclass(slots=True, eq=False)
class TrainerLink:
    """A trainer as this rank reads it; see `connect_trainer`."""

    card: Card
    number: int
    """Number of the offer in statuses."""
    peers: list[PeerRank]
    filling: Filling
    transfer: Transfer
    places: MemoryPlaces
    """The places of this rank's tensors that the plan has."""
    plan_seconds: float
    loan: ExitStack
    held_step: int = -1
    """The last step taken or missed from this trainer."""

    def read(self) -> list[Status]:
        """Return the statuses of all trainer ranks; errors as `PeerRank.read`."""
        return [peer.read() for peer in self.peers]

    def close(self) -> None:
        """Close all connections."""
        self.loan.close()


def connect_trainer(
    card: Card, target: Target, offer: MemoryOffer, max_memory_nbytes: int, check: Callable[[], object], number: int
) -> TrainerLink:
    """Return a link to the trainer of a card: its ranks answer, and the plan is proven.

    Args:
        card: the trainer's card.
        target: this rank's tensors.
        offer: this rank's own offer.
        max_memory_nbytes: bytes of the buffers for tensors that pass them.
        check: called while bytes pass the buffers; it may raise.
        number: of this rank among the engine's; it reads other replicas than the ranks beside it.

    Raises:
        RankFailedError, RankTimeoutError: a trainer rank has ended, or does not answer.
        XrankError: as `read_trainer_model` and `Target.plan`.
    """
    with ExitStack() as loan:
        peers = []
        for rank, description in find_trainer_ranks(card):
            peers.append(PeerRank(f"trainer rank {rank}", rank, description))
            loan.callback(peers[-1].close)
        for peer in peers:
            peer.read()
        started = monotonic()
        model = read_trainer_model(card)
        filling = target.plan(model)
        source = PeerSource(
            offer,
            _OWN,
            dict(find_trainer_ranks(card)),
            model.live.rank.tolist(),
            model.live.view.tolist(),
            check=check,
            timeout_seconds=_SILENT_SECONDS,
            grace_seconds=_GRACE_SECONDS,
        )
        loan.callback(source.close)
        budget = Budget.from_memory(max_memory_nbytes, default_workers())
        transfer = make_transfer(spread_copies(filling.plan, number), filling.tensors, source, budget)
        places, seconds = target.list_places(), monotonic() - started
        return TrainerLink(card, number_of(card), peers, filling, transfer, places, seconds, loan.pop_all())
    raise AssertionError
