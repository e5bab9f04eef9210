"""The trainer's side: its ranks lend their weights, step by step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import GatherOptions
from xrank.extras import require_torch
from xrank.lending.lent_model import ModelPart, ModelRequest, lend_model, locate_part
from xrank.public_calls import names_own_arguments
from xrank.refit.card import Address
from xrank.refit.held_memory import list_places
from xrank.refit.offer_card import check_no_trainer, write_offer
from xrank.refit.own_part import OwnPart
from xrank.refit.peer_rank import PeerRank
from xrank.refit.status import StatusBlock
from xrank.refit.weights_offer import WeightsOffer
from xrank.system import require_linux
from xrank.teams.agreement import check_alike
from xrank.teams.launches import find_group_team

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap

__all__ = ["offer_weights"]


@names_own_arguments
def offer_weights(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    address: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    snapshot: bool = False,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> WeightsOffer:
    """Offer a trainer's weights to engines of other jobs; every rank of the trainer makes this call.

    When it returns, all ranks have proven that together they hold each element of each tensor, have compared their
    replicas, and engines find the offer at the address. Nothing can be read before `WeightsOffer.publish`. The offer
    keeps the addresses of the tensors: training changes them in place, as optimizers do.

    Args:
        model: as `xrank.export_model`; so are `layouts`, `mesh`, `recipe` and `base_model`.
        address: a directory that the ranks of both jobs see; it is created if it is absent. One trainer at a time.
        layouts: the layouts of plain tensors.
        mesh: the mesh of `layouts`, if they have none.
        recipe: from training names to Hugging Face's.
        base_model: a model folder whose config and names count, for modules without a config, such as Megatron's.
        snapshot: whether `publish` copies this rank's part aside and returns at once. The copies take as many bytes of
            host memory as the part. Without a snapshot, `publish` returns when the engines have taken the step.
        group: the ranks of the trainer; None: all of the world.
        timeout_seconds: how long ranks may take to arrive.

    Raises:
        UsageError: another trainer offers its weights at the address.
        XrankError: as `xrank.export_model`, before anything is offered.

    Example:
        >>> import torch, xrank
        >>> trained, served = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> with xrank.offer_weights(trained, "refit", snapshot=True) as offer:
        ...     report = offer.publish(1)
        ...     with xrank.take_weights(served, "refit") as weights:
        ...         weights.update().step, served.weight.equal(trained.weight)
        (1, True)
    """
    require_torch("offer_weights")
    require_linux("offer_weights")
    check_meeting(group, timeout_seconds)
    place = Address(address)
    team = find_group_team(group, os.path.join(place.path, "offer"), timeout_seconds=timeout_seconds)
    loan, block = ExitStack(), StatusBlock()
    part = OwnPart(snapshot, team)

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh)
        return ModelRequest(
            model,
            GatherOptions(),
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            base_model,
            timeout_seconds=timeout_seconds,
            call="offer_weights",
            place=place.path,
        )

    def describe(request: ModelRequest) -> dict[str, str | None]:
        return {**request.describe(), "snapshot": str(snapshot)}

    try:
        with team.together():
            request, _ = team.agree("the arguments", read_arguments, describe, check_alike(team.ranks))
            located = locate_part(request, team, part.view)
            located = ModelPart(located.description, [*located.views, block], located.config)
            lent = lend_model(
                request, team, loan, part=located, check=partial(check_no_trainer, place), across_hosts=True
            )
            lent.source.close()  # no rank reads another one's part any more
            card = write_offer(place, team, request, lent.parts)
        siblings = [
            PeerRank(f"trainer rank {rank}", rank, one["offer"])
            for rank, one in zip(team.ranks, lent.parts, strict=True)
            if rank != team.rank
        ]
    except BaseException:
        loan.close()
        raise
    loan.callback(place.remove, card)
    return WeightsOffer(place, card, block, siblings, loan, part, partial(list_places, model))
