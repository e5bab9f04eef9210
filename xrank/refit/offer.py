"""The trainer's side: its ranks lend their weights, step by step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import GatherOptions, dtype_choice
from xrank.decisions.quantization import Quantization
from xrank.decisions.transforms import Transform
from xrank.errors import UsageError, names_own_arguments, option, require_torch
from xrank.lending.lent_model import ModelPart, ModelRequest, lend_model, locate_part
from xrank.lending.memory_offer import MemoryOffer, add_token
from xrank.lending.mooncake_memory import is_mooncake
from xrank.refit.card import Address
from xrank.refit.held_memory import list_places
from xrank.refit.offer_card import check_no_trainer, write_offer
from xrank.refit.outcome import OutcomeBlock
from xrank.refit.own_part import OwnPart
from xrank.refit.peer_rank import PeerRank
from xrank.refit.prepared_part import prepare_part
from xrank.refit.status import Status, StatusBlock
from xrank.refit.trainer_ranks import TrainerRanks
from xrank.refit.weights_offer import Watch, WeightsOffer
from xrank.system import require_linux
from xrank.teams.agreement import check_alike
from xrank.teams.launches import find_group_team
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap

_NO_OUTCOME = Status(committed=-1)


@names_own_arguments
def offer_weights(
    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any],
    address: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    base_model: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    transform: Transform | None = None,
    snapshot: bool = False,
    wire: str | None = None,
    on_engine_failure: str = "report",
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
        dtype: element type of floating-point tensors, which each rank casts at `publish`: as `xrank.export_model`.
        transform: an `xrank.Quantization`, with which each rank quantises its own parts at `publish`. The bits are
            those of the whole tensors, and scales are further tensors. Or a function as of `xrank.export_model`: at
            each `publish` one rank makes a tensor whole, calls it, and lends the result. Casts and transforms take
            memory of the host for the bytes that they lend.
        snapshot: whether `publish` copies this rank's part aside and returns at once. The copies take as many bytes of
            host memory as the part. Without a snapshot, `publish` returns when the engines have taken the step.
        wire: ``"mooncake"``: engines may copy by Mooncake's transfer engine, too, if they ask for it; its ports demand
            no token. None: the kernel copies on one host, sockets between hosts.
        on_engine_failure: what `publish` does when engine ranks fail or end. ``"report"``: it names them in its report
            (`PublishReport.failed`), and the training goes on. ``"raise"``: it raises on all ranks of the trainer, once
            for each failure.
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
    team = find_group_team(
        group, os.path.join(place.path, "offer"), timeout_seconds=timeout_seconds, call="offer_weights"
    )
    quantization = transform if isinstance(transform, Quantization) else None

    def read_arguments() -> ModelRequest:
        check_types(layouts, mesh)
        is_mooncake(wire, "offer_weights")
        if on_engine_failure not in ("report", "raise"):
            raise UsageError(
                f"{option('on_engine_failure')} must be one of report, raise",
                got=repr(on_engine_failure),
                want="'report' or 'raise'",
            )
        return ModelRequest(
            model,
            GatherOptions(dtype=dtype_choice(dtype)),
            live_layouts(layouts, mesh),
            mesh,
            recipe,
            base_model,
            transform=None if quantization is not None else transform,
            timeout_seconds=timeout_seconds,
            call="offer_weights",
            place=place.path,
        )

    def describe(request: ModelRequest) -> dict[str, str | None]:
        return {
            **request.describe(),
            "snapshot": str(snapshot),
            "quantization": repr(quantization),
            "wire": wire,
            "on_engine_failure": on_engine_failure,
        }

    loan, part = ExitStack(), OwnPart(snapshot, team)
    try:
        with team.together():
            request, _ = team.agree("the arguments", read_arguments, describe, check_alike(team.ranks))
            lend = _lend_as_they_are
            if request.transform is not None or quantization is not None or request.options.dtype != "keep":
                lend = partial(_lend_prepared, quantization)
            check = partial(check_no_trainer, place)
            lent = lend(request, team, loan, part, check, by_mooncake=is_mooncake(wire, "offer_weights"))
            dropped = () if part.prepared is None else part.prepared.dropped
            card = write_offer(place, team, request, lent.parts, dropped)
        siblings = [
            PeerRank(f"trainer rank {rank}", rank, one["offer"])
            for rank, one in zip(team.ranks, lent.parts, strict=True)
            if rank != team.rank
        ]
    except BaseException:
        loan.close()
        raise
    loan.callback(place.remove, card)
    ranks = TrainerRanks(lent.block, lent.outcomes, siblings, is_first=team.is_first)
    places = partial(list_places, model)
    return WeightsOffer(
        place, card, ranks, team.rank, loan, part, places, lent.watch, raises=on_engine_failure == "raise"
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Lent:
    """All ranks' parts as their engines read them."""

    parts: Sequence[dict[str, Any]]
    block: StatusBlock
    outcomes: OutcomeBlock
    watch: Watch


def _lend_as_they_are(
    request: ModelRequest,
    team: Team,
    loan: ExitStack,
    part: OwnPart,
    check: Callable[[], None],
    *,
    by_mooncake: bool,
) -> _Lent:
    """Lend this rank's tensors, in place or copied."""
    block, outcomes = StatusBlock(_NO_OUTCOME), OutcomeBlock()
    located = locate_part(request, team, part.view)
    located = ModelPart(located.description, [*located.views, outcomes, block], located.config)
    lent = lend_model(request, team, loan, part=located, check=check, across_hosts=True, by_mooncake=by_mooncake)
    lent.source.close()  # no rank reads another one's part any more
    return _Lent(lent.parts, block, outcomes, Watch(lambda: None))


def _lend_prepared(
    quantization: Quantization | None,
    request: ModelRequest,
    team: Team,
    loan: ExitStack,
    part: OwnPart,
    check: Callable[[], None],
    *,
    by_mooncake: bool,
) -> _Lent:
    """Lend this rank's tensors in another form. The ranks of the trainer alone read those in place."""
    is_snapshot, part.is_snapshot = part.is_snapshot, False
    located = locate_part(request, team, part.view)
    part.is_snapshot = is_snapshot
    block, outcomes, watch = StatusBlock(_NO_OUTCOME), OutcomeBlock(), Watch(team.make_failure_check())
    lent = lend_model(request, team, loan, part=located, check=check, failures=watch)
    prepared, _ = team.agree(
        "the prepared tensors",
        lambda: prepare_part(lent, part.tensors, quantization, team, is_snapshot=is_snapshot),
        lambda _: None,
        lambda _, __: None,
    )
    loan.callback(prepared.close)
    views = [*prepared.views, outcomes, block]
    offer = MemoryOffer(views, across_hosts=True, by_mooncake=by_mooncake, secret=team.secret)
    loan.callback(offer.close)
    own = {**lent.parts[team.position], "model": prepared.description, "offer": offer.describe()}
    text = json.dumps(own)
    _, texts = team.agree("the lent tensors", lambda: text, lambda text: text, lambda _, texts: list(texts))
    parts = [json.loads(one) for one in texts]
    for part_of_rank in parts:
        part_of_rank["offer"] = add_token(part_of_rank["offer"], team.secret)
    prepared.connect(offer, team, [one["offer"] for one in parts], watch)
    part.prepared = prepared
    return _Lent(parts, block, outcomes, watch)
