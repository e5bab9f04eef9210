"""Take weights: fill an engine's tensors from a trainer of another job."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.options import default_workers, parse_size
from xrank.errors import UsageError, names_own_arguments, option, require_torch
from xrank.lending.memory_offer import MemoryOffer, add_token
from xrank.lending.mooncake_memory import is_mooncake
from xrank.plan.executor import Budget
from xrank.readers.live.module_tensors import FilledModule
from xrank.refit.card import Address
from xrank.refit.engine_ranks import EngineRanks
from xrank.refit.peer_rank import PeerRank
from xrank.refit.relay import Relay
from xrank.refit.status import StatusBlock
from xrank.refit.taken_weights import TakenWeights
from xrank.refit.targets import Loader, LoaderTarget, ModuleTarget, Target
from xrank.system import require_linux
from xrank.teams.agreement import check_alike, nbytes_text
from xrank.teams.launches import find_group_team, find_world
from xrank.teams.team import Team

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from xrank.layout import LayoutMap


@names_own_arguments
def take_weights(
    target: FilledModule,
    address: str | os.PathLike[str],
    *,
    layouts: LayoutMap | None = None,
    mesh: Any = None,
    loader: Loader | None = None,
    relay: bool = False,
    max_memory: str | int = "64MB",
    wire: str | None = None,
    group: ProcessGroup | None = None,
    timeout_seconds: float = 1800.0,
) -> TakenWeights:
    """Prepare to take a trainer's weights; every rank of the engine makes this call, in any order with the trainer.

    The engine is a job of its own, with a world of its own or none. `TakenWeights.update` then takes step after step.
    The first one plans: it composes the trainer's layouts with those of the target, and proves that each element of
    each tensor is written once.

    Args:
        target: the rank's module or state dict, as for `xrank.load_model`, under Hugging Face's names; or, with
            `loader`, the engine's module in its own form.
        address: the directory of the trainer's `xrank.offer_weights`.
        layouts: the layouts of plain tensors that are cut; other plain tensors are whole.
        mesh: the mesh of `layouts`, if they have none, or of a Megatron module.
        loader: the engine's own function that takes (Hugging Face name, tensor) pairs and fills `target`, such as
            vLLM's ``model.load_weights``. It runs once on tensors without memory, which shows its copies; tensors that
            it changes on the way are given to it whole at each update (`UpdateReport.whole`). No layouts are needed.
        relay: whether other engines may copy this rank's step out of its memory, by `TakenWeights.copy_from_engines`.
            Each update then computes digests of the rank's bytes.
        max_memory: bytes of the buffers for tensors that are cast, strided, on a device, or of another host.
        wire: ``"mooncake"``: Mooncake's transfer engine copies runs of bytes, from a trainer whose `wire` is the same.
            None: the kernel copies on one host, sockets between hosts.
        group: the ranks of the engine, which take each step all together; None: all of the world.
        timeout_seconds: how long the engine's ranks may take to arrive.

    Raises:
        UsageError: an argument is wrong, or a tensor has no memory to fill.

    Example:
        >>> import torch, xrank
        >>> weights = xrank.take_weights({"weight": torch.zeros(2, 2)}, "refit")
        >>> offer = xrank.offer_weights({"weight": torch.ones(2, 2)}, "refit", snapshot=True)
        >>> _ = offer.publish(7)
        >>> weights.update().moved_nbytes
        16
        >>> weights.close(); offer.close()
    """
    require_torch("take_weights")
    require_linux("take_weights")
    check_meeting(group, timeout_seconds)
    place = Address(address)
    team = find_group_team(
        group, os.path.join(place.path, "engine"), timeout_seconds=timeout_seconds, call="take_weights"
    )
    loan, block = ExitStack(), StatusBlock()

    def read_arguments() -> tuple[Target, int]:
        check_types(layouts, mesh)
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        is_mooncake(wire, "take_weights")
        return _make_target(target, layouts, mesh, loader), nbytes

    def describe(made: tuple[Target, int]) -> dict[str, str | None]:
        return {
            "call": "take_weights",
            "relay": str(relay),
            "address": place.path,
            "max_memory": nbytes_text(made[1]),
            "wire": wire,
        }

    try:
        with team.together():
            (made, nbytes), _ = team.agree("the arguments", read_arguments, describe, check_alike(team.ranks))
            offer = MemoryOffer([block], across_hosts=True, secret=team.secret)
            loan.callback(offer.close)
            own = add_token(offer.describe(), team.secret)
            _, texts = team.agree(
                "the engine's ranks",
                lambda: json.dumps(offer.describe()),
                lambda text: text,
                lambda _, texts: list(texts),
            )
            engine = team.broadcast("the engine's name", secrets.token_hex(4) if team.is_first else None)
            card = place.write_engine(engine, team.rank, {"engine": engine, "rank": team.rank, "offer": own})
            loan.callback(place.remove, card)
        lender = Relay(place, engine, team.rank, team.ranks, own) if relay else None
        siblings = _find_siblings(texts, team)
    except BaseException:
        loan.close()
        raise
    ranks = EngineRanks(block, siblings)
    return TakenWeights(
        place,
        made,
        block,
        offer,
        ranks,
        loan,
        nbytes,
        team.rank,
        engine,
        lender,
        by_mooncake=is_mooncake(wire, "take_weights"),
    )


def _make_target(target: FilledModule, layouts: LayoutMap | None, mesh: Any, loader: Loader | None) -> Target:
    if loader is None:
        rank, world_size = find_world()
        return ModuleTarget(target, live_layouts(layouts, mesh), mesh, rank, world_size)
    if layouts is not None or mesh is not None:
        raise UsageError(
            f"{option('loader')} shows how it cuts tensors; {option('layouts')} and {option('mesh')} have no use",
            got="a loader, and layouts or a mesh",
            want="one of the two",
            next_step="leave layouts and mesh out",
        )
    return LoaderTarget(target, loader)


def _find_siblings(texts: Sequence[str], team: Team) -> list[PeerRank]:
    return [
        PeerRank(f"engine rank {rank}", rank, add_token(json.loads(text), team.secret))
        for rank, text in zip(team.ranks, texts, strict=True)
        if rank != team.rank
    ]
