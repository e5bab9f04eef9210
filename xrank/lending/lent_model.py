"""A live model as a conversion sees it: every rank tells what it holds, all plan alike, each reads of all memories."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from xrank.decisions.folder_plan import FolderPlan, plan_export
from xrank.decisions.options import GatherOptions
from xrank.decisions.own_config import OwnConfig, read_own_config
from xrank.decisions.transformed_plan import plan_held_tensors
from xrank.decisions.transforms import Transform
from xrank.errors import ContradictionError, IncompleteError, RankFailedError, UsageError
from xrank.faces import AGAIN
from xrank.layout import LayoutMap
from xrank.layout.nest_table import IntArray
from xrank.lending.local_bytes import local_bytes
from xrank.lending.peer_source import MemoryOffer, PeerSource
from xrank.plan.faults import difference_error
from xrank.plan.planner import Plan
from xrank.plan.replicas import digest_twins, find_different_twin
from xrank.readers.live.local_model import LocalModel, local_model
from xrank.readers.live.ranks import LiveModel, read_ranks
from xrank.teams.agreement import check_plans, nbytes_text, path_text, value_text
from xrank.teams.team import Team

if TYPE_CHECKING:
    import torch

__all__ = ["LentModel", "ModelRequest", "lend_model"]


@dataclass(frozen=True, slots=True, eq=False)
class ModelRequest:
    """Which model a call converts, and how; see `xrank.conversion.export.export_model`."""

    model: torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, Any]
    options: GatherOptions
    layouts: LayoutMap | None = None
    mesh: Any = None
    recipe: str | os.PathLike[str] | None = None
    base_model: str | os.PathLike[str] | None = None
    config_overrides: Mapping[str, Any] | None = None
    transform: Transform | None = None
    timeout_seconds: float = 1800.0
    call: str = "export_model"
    place: str | None = None
    """The output, where there is one."""
    takers: str | None = None
    """The ranks that get tensors, where any do."""

    def describe(self) -> dict[str, str | None]:
        """Return what all ranks must ask alike, as text.

        Not layouts and a mesh: a rank may know of its own tensors alone, and where two differ about a tensor, that one
        is named. Aliases are of the whole model.
        """
        aliases = {} if self.layouts is None else dict(self.layouts.aliases)
        return {
            "call": self.call,
            "out": None if self.place is None else os.path.abspath(self.place),
            "dtype": self.options.dtype,
            "max_shard_size": nbytes_text(self.options.max_shard_nbytes),
            "max_memory": nbytes_text(self.options.max_memory_nbytes),
            "overwrite": str(self.options.overwrite),
            "adapter": self.options.adapter,
            "recipe": path_text(self.recipe),
            "base_model": path_text(self.base_model),
            "config_overrides": None if self.config_overrides is None else value_text(dict(self.config_overrides)),
            "transform": None if self.transform is None else "a function",
            "layouts.aliases": value_text(aliases),
            "ranks": self.takers,
        }


@dataclass(frozen=True, slots=True, eq=False)
class LentModel:
    """A model in the memory of all ranks, as one of them reads it."""

    gather: FolderPlan
    """The proven plan, the same on every rank."""
    source: PeerSource
    """Whoever has it closes it."""
    holder: IntArray
    """By record, the position in the team of the rank in whose memory it lies."""


def _world_size() -> int:
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave much out
    is_initialised = distributed.is_available() and distributed.is_initialized()
    return int(distributed.get_world_size()) if is_initialised else 0


def lend_model(
    asked: ModelRequest, team: Team, lent: ExitStack, *, check: Callable[[], None] = lambda: None
) -> LentModel:
    """Lend this rank's part to all others, and return the whole as this rank reads it, planned and compared.

    Args:
        asked: what all ranks ask for alike.
        team: the ranks, together.
        lent: ends the loan; to be closed when all ranks have ended.
        check: called on the first rank once all have told what they hold; what it raises, all raise.

    Raises:
        XrankError: as `xrank.conversion.export.export_model`, before anything is written or handed out.
    """
    rank, ranks = team.rank, team.ranks

    def own_part() -> tuple[LocalModel, OwnConfig]:
        # The ranks of a group may hold parts of what lies on more ranks: then those are named.
        world_size = max(max(ranks) + 1, _world_size() if team.size > 1 else 0)
        local = local_model(asked.model, layouts=asked.layouts, mesh=asked.mesh, rank=rank, world_size=world_size)
        return local, read_own_config(asked.model)

    # What is wrong on all ranks is each one's own error.
    (local, config), _ = team.agree("what this rank holds", own_part, lambda _: None, lambda _, __: None)
    offer = MemoryOffer([local_bytes(view) for view in local.views], across_hosts=not team.is_one_host)
    lent.callback(offer.close)
    lent.push(partial(_raise_own, rank, offer))
    told = json.dumps({"model": local.describe(), "offer": offer.describe(), "own": asdict(config)})

    def collect_all(_: object, parts: Sequence[str]) -> list[str]:
        check()
        return list(parts)

    _, parts = team.agree("what ranks hold", lambda: told, lambda text: text, collect_all)
    held = [json.loads(one) for one in parts]

    def plan() -> tuple[FolderPlan, LiveModel]:
        live = _read([one["model"] for one in held], ranks)
        nothing = json.loads(json.dumps(asdict(OwnConfig())))
        own = next((one["own"] for one in held if one["own"] != nothing), nothing)
        others = {r: one["own"] for r, one in zip(ranks, held, strict=True) if one["own"] not in (own, nothing)}
        made = plan_export(
            live.stored,
            asked.options,
            OwnConfig(**{**own, "unsaved": tuple(own["unsaved"])}),
            base_model=asked.base_model,
            layouts=asked.layouts,
            recipe=asked.recipe,
            config_overrides=asked.config_overrides,
            transform=asked.transform,
        )
        if others and made.decision.small.config_text is not None:
            other, theirs = next(iter(others.items()))
            told = f"rank {other}'s module has another config than what is written: {_first_difference(own, theirs)}"
            made = replace(made, notes=(*made.notes, ("config-differs", told)))
        return made, live

    (gather, live), _ = team.agree("the plan", plan, _describe_plan, partial(_check_plans, team))
    source = PeerSource(
        offer,
        rank,
        {other: one["offer"] for other, one in zip(ranks, held, strict=True)},
        live.rank.tolist(),
        live.view.tolist(),
        check=team.make_failure_check(),
        timeout_seconds=asked.timeout_seconds,
    )
    holder = live.stored.records.file
    if team.size > 1:
        try:
            _compare_replicas(plan_held_tensors(gather.plan, gather.transforms), source, holder, team)
        except BaseException:
            source.close()
            raise
    return LentModel(gather, source, holder)


def _raise_own(rank: int, offer: MemoryOffer, _: object, error: BaseException | None, __: object) -> None:
    """Raise this rank's own error where it only hears that it failed, from one that asked it for what it lends."""
    if isinstance(error, RankFailedError) and error.rank == rank and offer.failure is not None:
        raise offer.failure from error


def _describe_plan(made: tuple[FolderPlan, LiveModel]) -> dict[str, Any]:
    gather = made[0]
    names = [shard.name for shard in gather.source.shards]
    transformed = None if gather.transforms is None else gather.transforms.describe_kinds(names)
    return {"digest": gather.digest, "transformed": transformed}


def _check_plans(team: Team, made: tuple[FolderPlan, LiveModel], told: Sequence[dict[str, Any]]) -> None:
    """Refuse plans that are not the same; two functions may make what looks alike, and a plan does not tell them apart.

    Raises:
        ContradictionError: it names a rank, and the tensor that it would transform otherwise than the first.
    """
    names, first = [shard.name for shard in made[0].source.shards], told[0]["transformed"]
    for rank, one in zip(team.ranks, told, strict=True):
        for name, its, want in zip(names, one["transformed"] or (), first or (), strict=False):
            if its != want:
                ways = {"": "copied", "-": "left out"}
                raise ContradictionError(
                    f"{name}: transform makes something else of it on rank {rank} than on rank {team.ranks[0]}",
                    tensor=name,
                    rank=rank,
                    got=f"{ways.get(its, 'transformed')} on rank {rank}",
                    want=f"{ways.get(want, 'transformed')}, into the same names, shapes and dtypes on all ranks",
                    next_step="give all ranks the same function, one that does not look at the rank",
                )
    check_plans(team.ranks)(made, [one["digest"] for one in told])


def _read(told: Sequence[str], ranks: Sequence[int]) -> LiveModel:
    """Return what ranks told as one model; errors as `read_ranks`."""
    try:
        return read_ranks(told, ranks=ranks)
    except IncompleteError as error:
        if error.rank is None or error.rank in ranks:
            raise
        raise UsageError(
            f"the mesh of {error.tensor} has rank {error.rank}, which is not in the group",
            tensor=error.tensor,
            rank=error.rank,
            got=f"a group of ranks {list(ranks)}",
            want="a group with all ranks of the mesh",
            next_step=f"let all ranks of the mesh {AGAIN}, or give the group of them",
        ) from error


def _compare_replicas(plan: Plan, source: PeerSource, holder: IntArray, team: Team) -> None:
    """Compare all replicas by digests that each rank takes of its own.

    Raises:
        ContradictionError: two ranks hold different copies; on every rank.
    """
    failures = team.make_failure_check()
    own = digest_twins(plan, holder, team.position, source, failures)

    def compare(_: object, parts: Sequence[Any]) -> None:
        different = find_different_twin(plan, holder, [part.numpy().tobytes() for part in parts])
        if different is not None:
            raise difference_error(plan, *different, source)

    import torch

    digests = torch.frombuffer(bytearray(own) or bytearray(1), dtype=torch.uint8)
    team.agree("digests of replicas", lambda: digests, lambda digests: digests, compare)


def _first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for part in own:
        if own[part] != other[part]:
            if part != "config" or own[part] is None or other[part] is None:
                return part.removesuffix("_text")
            a, b = own[part], other[part]
            return next(f"{k} {b.get(k)!r}, not {a.get(k)!r}" for k in sorted({*a, *b}) if a.get(k) != b.get(k))
    return "nothing"
