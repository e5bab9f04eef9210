"""The content of a trainer's card: all ranks' tensors, offers and configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

from xrank.decisions.base_model import open_base_model
from xrank.errors import CorruptError, RankFailedError, RankTimeoutError, UsageError
from xrank.lending.lent_model import ModelRequest
from xrank.refit.card import Address, Card
from xrank.refit.peer_rank import PeerRank
from xrank.refit.status import Phase
from xrank.teams.agreement import path_text
from xrank.teams.team import Team

MADE = "xrank.made/"
"""Before the Hugging Face name of a tensor that a rank has made, which no tensor of the trainer's model has."""


def number_of(card: Card) -> int:
    """Return the number by which statuses refer to an offer."""
    return crc32(card.id.encode())


def write_offer(
    place: Address,
    team: Team,
    request: ModelRequest,
    parts: Sequence[Mapping[str, Any]],
    dropped: Sequence[str] = (),
) -> Card:
    """Write the trainer's card on the first rank, and return it on every rank.

    Args:
        place: the address.
        team: the trainer's ranks, together.
        request: the arguments of the call.
        parts: by position in the team, each rank's model, offer and config.
        dropped: tensors under Hugging Face's names that engines do not get.
    """
    card = None
    if team.is_first:
        base = None if request.base_model is None else open_base_model(request.base_model)
        content = {
            "ranks": list(team.ranks),
            "parts": list(parts),
            "recipe": path_text(request.recipe),
            "aliases": {} if request.layouts is None else dict(request.layouts.aliases),
            "config": None if base is None else base.config,
            "names": [] if base is None else list(base.tensors),
            "dropped": list(dropped),
        }
        card = place.write_trainer(content)
    card_id = team.broadcast("the offer's card", None if card is None else card.id)
    return card or Card(card_id, {}, place.trainer_path)


def check_no_trainer(place: Address) -> None:
    """Check that no live trainer offers its weights at the address.

    Raises:
        UsageError: one does, or may do so on another host.
    """
    card = place.read_trainer()
    if card is None:
        return
    rank, offer = find_trainer_ranks(card)[0]
    try:
        peer = PeerRank(f"trainer rank {rank}", rank, offer)
    except CorruptError:
        return
    try:
        if peer.read().phase is Phase.ENDED:
            return
    except (RankFailedError, RankTimeoutError):
        if not peer.may_return:
            return
    finally:
        peer.close()
    raise UsageError(
        f"another trainer offers its weights at {place.path}",
        file=card.path,
        got=f"an offer of {peer.place}",
        want="one trainer at an address",
        next_step="close the other offer, or choose another directory",
    )


def find_trainer_ranks(card: Card) -> list[tuple[int, dict[str, Any]]]:
    """Return the ranks of a trainer's card, each with its offer.

    Raises:
        CorruptError: the card lacks them.
    """
    content = card.describe("a trainer's ranks", "ranks, and each one's model and offer")
    ranks = content["ranks"].counts(below=1 << 31)
    parts = content["parts"].entries(length=len(ranks))
    if not ranks:
        content["ranks"].refuse("a list with a rank")
    return [(rank, part["offer"].table()) for rank, part in zip(ranks, parts, strict=True)]
