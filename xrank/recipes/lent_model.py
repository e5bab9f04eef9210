"""A live model for a conversion: ranks describe their parts, make the same plan, and read each other's memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from xrank.engine.faults import difference_error
from xrank.engine.planner import Plan, select_tensors
from xrank.engine.replicas import digest_twins, find_different_twin, prefer_own_copies
from xrank.engine.tensor_target import TensorsAhead, empty_tensor, make_whole_tensors, split_budget
from xrank.engine.transforms import Transform, apply_transform, plan_held_tensors
from xrank.errors import (
    AGAIN,
    ContradictionError,
    CorruptError,
    IncompleteError,
    NoSpaceError,
    RankFailedError,
    UsageError,
    option,
)
from xrank.layout import LayoutMap
from xrank.layout.nest_table import IntArray
from xrank.layout.stored_model import StoredModel
from xrank.ranks.loans import MemoryOffer, PeerSource, share_offers
from xrank.ranks.memory import LocalBytes, local_bytes
from xrank.ranks.store import group_place
from xrank.ranks.team import Team, path_text, value_text
from xrank.readers.live.models import LiveModel, local_model, read_ranks
from xrank.recipes.adapter_names import find_adapter
from xrank.recipes.decision import FolderPlan, Purpose, Request, decide, plan_output
from xrank.recipes.found_source import OwnConfig, choose_config, read_own_config
from xrank.recipes.options import GatherOptions
from xrank.recipes.sources import find_live_source, open_base_model
from xrank.storage import places
from xrank.storage.entries import Entry
from xrank.system import anonymous_memory, available_memory_nbytes
from xrank.words import list_text, repr_text, size_text

if TYPE_CHECKING:
    import torch

    from xrank.engine.tensor_target import Tensors


_ALIGNMENT = 64
"""Bytes; for the element types of all tensors."""


def copy_part(
    views: Sequence[torch.Tensor], *, rank: int, num_here: int, room_nbytes: int | None
) -> Sequence[LocalBytes]:
    """Return copies of tensors' bytes, all in one map of memory, which is freed with the last of them.

    They may take `room_nbytes` (else UsageError); if None, this rank's share of the memory that the host has left for
    the `num_here` ranks on it that copy at once (else NoSpaceError).
    """
    import torch

    sources = [local_bytes(view) for view in views]
    starts, nbytes = [], 0
    for source in sources:
        starts.append(nbytes)
        nbytes += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    takes, without = f"the copy of rank {rank}'s part takes {size_text(nbytes)}", option("background", True)
    available = available_memory_nbytes() if room_nbytes is None else None
    if room_nbytes is not None and nbytes > room_nbytes:
        room = max(room_nbytes, 0)
        raise UsageError(
            f"{takes}, and {option('max_memory')} leaves {size_text(room)} in addition to the buffers",
            rank=rank,
            got=f"{nbytes:,} bytes of tensors on rank {rank}",
            want=f"at most {room:,} bytes",
            next_step=f"give a larger {option('max_memory')}, or leave {without} out, which copies nothing",
        )
    if available is not None and nbytes > available // num_here:
        problem = f"{takes}, and the host has {size_text(available)} of memory left for {num_here} rank(s)"
        step = f"leave {without} out, which copies nothing; {option('max_memory')} lifts this check"
        needed = nbytes * num_here
        raise NoSpaceError(problem, rank=rank, needed_nbytes=needed, free_nbytes=available, next_step=step)
    memory = anonymous_memory(nbytes or 1)  # no map is empty
    content, copies = torch.frombuffer(memory, dtype=torch.uint8), []
    for start, source in zip(starts, sources, strict=True):
        source.read_into(0, memoryview(memory)[start : start + source.nbytes])
        copies.append(local_bytes(content[start : start + source.nbytes]))
    return copies


class ModelRequest(Struct, frozen=True, eq=False):
    """The arguments of a call that converts a live model, as `xrank.commands.export.export_model`."""

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
    """Path of the output, if there is one."""
    background: bool = False
    """Whether the ranks copy their parts and convert the copies while their callers go on."""
    delta_from: str | None = None
    """Path of the folder of which the output is a delta; None: the output is a whole model."""
    adapter_only: bool = False
    """Whether only the tensors of the model's LoRA adapter are lent."""
    takers: str | None = None
    """Ranks that get tensors: ``"first"`` or ``"all"``; None: the output is a folder."""

    def describe(self) -> dict[str, str | None]:
        """Return the arguments that must be the same on all ranks, as text.

        Layouts and a mesh may differ: a rank may know its own tensors only, and a later check names a tensor with two
        layouts. Aliases are for the whole model.
        """
        aliases = {} if self.layouts is None else dict(self.layouts.aliases)
        return {
            "call": self.call,
            "out": None if self.place is None else places.absolute(self.place),
            "dtype": self.options.dtype,
            "max_shard_size": f"{self.options.max_shard_nbytes:,} bytes",
            "max_memory": f"{self.options.max_memory_nbytes:,} bytes",
            "overwrite": str(self.options.overwrite),
            "adapter": self.options.adapter,
            "adapter_only": str(self.adapter_only),
            "quantize": self.options.quantize,
            "quantize_ignore": value_text([*self.options.quantize_ignore]),
            "dialect": self.options.dialect,
            "recipe": path_text(self.recipe),
            "base_model": path_text(self.base_model),
            "config_overrides": None if self.config_overrides is None else value_text(dict(self.config_overrides)),
            "transform": None if self.transform is None else "a function",
            "layouts.aliases": value_text(aliases),
            "background": str(self.background),
            "delta_from": path_text(self.delta_from),
            "ranks": self.takers,
        }


class ModelPart(Struct, frozen=True, eq=False):
    """One rank's part of a model, ready to be lent."""

    description: str
    """Its tensors and their places, for `xrank.readers.live.models`."""
    views: Sequence[LocalBytes]
    """Bytes of its tensors, in place or copied."""
    config: OwnConfig


class LentModel(Struct, frozen=True, eq=False):
    """A model in the memory of all ranks, as one of them reads it."""

    gather: FolderPlan
    """The proven plan, the same on every rank."""
    source: PeerSource
    """To be closed by the caller."""
    stored: StoredModel
    """The model under the names of the ranks."""
    holder: IntArray
    """Record -> position in the team of the rank that holds it."""
    parts: Sequence[dict[str, Any]]
    """By position in the team, as JSON: the rank's model, its offer, and the config of its module."""


def locate_part(
    request: ModelRequest, team: Team, view: Callable[[Sequence[torch.Tensor]], Sequence[LocalBytes]] | None = None
) -> ModelPart:
    """Return this rank's part of the model. Each rank raises its own error, and others name it.

    `view` returns the bytes of tensors; None: in place.
    """

    def make() -> ModelPart:
        # A mesh may have ranks of the world that are not in the group. With the world's size they can be named.
        world_size = max(max(team.ranks) + 1, (group_place() or (0, 1))[1] if team.size > 1 else 0)
        local = local_model(
            request.model,
            layouts=request.layouts,
            mesh=request.mesh,
            rank=team.rank,
            world_size=world_size,
            is_read=True,
        )
        if request.adapter_only:
            if (names := find_adapter([*local.tensors], "the model")) is None:
                raise UsageError(
                    f"rank {team.rank} has no tensors of a LoRA adapter to offer",
                    rank=team.rank,
                    got=f"{len(local.tensors)} tensors, none named like <module>.lora_A.<adapter>.weight",
                    next_step=f"give the PeftModel, or leave {option('adapter_only', True)} out",
                )
            local = local.select(names.saved)
        views = [local_bytes(one) for one in local.views] if view is None else view(local.views)
        return ModelPart(local.describe(), views, read_own_config(request.model))

    return team.agree("this rank's part", make, lambda _: None, lambda _, __: None)[0]


def lend_model(
    request: ModelRequest,
    team: Team,
    loan: ExitStack,
    *,
    part: ModelPart | None = None,
    check: Callable[[], None] = lambda: None,
    across_hosts: bool = False,
    failures: Callable[[], object] | None = None,
    by_mooncake: bool = False,
) -> LentModel:
    """Lend this rank's part to all other ranks, and return the whole model as this rank reads it.

    Args:
        request: the arguments of the call; the same on all ranks.
        team: the ranks, together.
        loan: ends the loan; to be closed when all ranks have ended.
        part: this rank's part; None: that of the request, in place.
        check: called on the first rank once all ranks have described their parts; all ranks raise its error.
        across_hosts: whether processes that are not ranks also read; they may be on other hosts.
        failures: raises if a rank has failed, while the source reads; None: the team's.
        by_mooncake: whether processes that are not ranks read by Mooncake.
    """
    # Every rank reports its own error here. In the next exchange a rank raises only the first rank's.
    part = locate_part(request, team) if part is None else part
    offer = MemoryOffer(
        part.views,
        across_hosts=across_hosts or team.needs_ports,
        by_mooncake=by_mooncake,
        addresses=() if across_hosts else team.addresses,
        secret=team.secret,
        is_alone=team.size == 1 and not across_hosts,
    )
    loan.callback(offer.close)

    def raise_own(_: object, error: BaseException | None, __: object) -> None:
        """Raise the error of this rank's own service, if another rank reported it after a failed read."""
        if isinstance(error, RankFailedError) and error.rank == team.rank and offer.failure is not None:
            raise offer.failure from error

    loan.push(raise_own)
    content = {"model": part.description, "own": to_builtins(part.config)}
    parts = share_offers(team, "all ranks' parts", offer, content, check)
    (gather, live), _ = team.agree(
        "the plan", partial(_make_plan, request, team.ranks, parts), _describe_plan, partial(_check_plans, team)
    )
    source = PeerSource(
        offer,
        team.rank,
        {rank: part["offer"] for rank, part in zip(team.ranks, parts, strict=True)},
        live.rank.tolist(),
        live.view.tolist(),
        check=team.make_failure_check() if failures is None else failures,
        timeout_seconds=request.timeout_seconds,
    )
    holder = live.stored.records.file
    # Before any byte of the output: from now on each rank may read its own copy of a part in place of another's.
    if team.size > 1:
        try:
            _compare_replicas(plan_held_tensors(gather.plan, gather.transforms), source, holder, team)
        except BaseException:
            source.close()
            raise
    return LentModel(gather, source, live.stored, holder, parts)


def _make_plan(
    request: ModelRequest, ranks: Sequence[int], parts: Sequence[dict[str, Any]]
) -> tuple[FolderPlan, LiveModel]:
    try:
        live = read_ranks([part["model"] for part in parts], ranks=ranks)
    except IncompleteError as error:
        if error.rank is None or error.rank in ranks:
            raise
        problem = f"the mesh of {error.tensor} has rank {error.rank}, which is not in the group of ranks {list(ranks)}"
        step = f"let all ranks of the mesh {AGAIN}, or give the group of them"
        raise UsageError(problem, tensor=error.tensor, rank=error.rank, next_step=step) from error
    own, others = choose_config([OwnConfig.from_entry(Entry(part["own"], CorruptError)) for part in parts])
    plan = plan_export(live.stored, own, request)
    if others and plan.decision.small.config_text is not None:
        position, other = next(iter(others.items()))
        difference = _first_difference(to_builtins(own), to_builtins(other))
        note = f"rank {ranks[position]}'s module has a different config than the one that is written: {difference}"
        plan = replace(plan, notes=(*plan.notes, ("config-differs", note)))
    return plan, live


def plan_export(stored: StoredModel, own: OwnConfig, asked: ModelRequest) -> FolderPlan:
    """Plan an export and prove the plan. Errors are those of `xrank.commands.export.export_model`."""
    base = None if asked.base_model is None else open_base_model(asked.base_model)
    _ = asked.options.budget  # refuses too small buffers before any work
    found = find_live_source(stored, own, base)
    aliases = asked.layouts.aliases if asked.layouts is not None else {}
    request = Request(Purpose.MODEL, asked.options, asked.recipe, aliases, asked.config_overrides)
    decision = decide(found, request, base)
    notes = [] if decision.adapted is None else [*decision.adapted.notes]
    if own.conversions and decision.source.recipe is None:
        text = "tensors have their names and shapes in memory; save_pretrained would change some of this model's"
        notes.append(("names-as-in-memory", f"{text}, and other programs may not know these"))
    if found.unsaved:
        notes.append(("not-saved", f"save_pretrained leaves out: {list_text(found.unsaved, 4)}"))
    return plan_output(decision, notes, asked.transform)


def _describe_plan(made: tuple[FolderPlan, LiveModel]) -> dict[str, Any]:
    gather = made[0]
    names = [shard.name for shard in gather.source.shards]
    transformed = None if gather.transforms is None else gather.transforms.describe_kinds(names)
    return {"digest": gather.digest, "transformed": transformed}


def _check_plans(team: Team, made: tuple[FolderPlan, LiveModel], plans: Sequence[dict[str, Any]]) -> None:
    """Refuse plans that differ. The outputs of a transform are compared too, because a plan's digest lacks them."""
    names, first = [shard.name for shard in made[0].source.shards], plans[0]["transformed"]
    for rank, one in zip(team.ranks, plans, strict=True):
        for name, its, want in zip(names, one["transformed"] or (), first or (), strict=False):
            if its != want:
                ways = {"": "copied", "-": "left out"}
                raise ContradictionError(
                    f"{name}: transform returns other outputs on rank {rank} than on rank {team.ranks[0]}",
                    tensor=name,
                    rank=rank,
                    got=f"{ways.get(its, 'transformed')} on rank {rank}",
                    want=f"{ways.get(want, 'transformed')}, into the same names, shapes and dtypes on all ranks",
                    next_step="give all ranks the same function, one that does not depend on the rank",
                )
    team.check_plans(made, [one["digest"] for one in plans])


def _compare_replicas(plan: Plan, source: PeerSource, holder: IntArray, team: Team) -> None:
    """Compare all replicas by digests, which each rank computes from its own memory."""
    failures = team.make_failure_check()
    own = digest_twins(plan, holder, team.position, source, failures)

    def compare(_: object, parts: Sequence[Any]) -> None:
        different = find_different_twin(plan, holder, [part.numpy().tobytes() for part in parts])
        if different is not None:
            raise difference_error(plan, *different, source)

    import torch

    # torch refuses an empty buffer; a rank without replicas sends a byte that nothing reads.
    digests = torch.frombuffer(bytearray(own) or bytearray(1), dtype=torch.uint8)
    team.agree("digests of replicas", lambda: digests, lambda digests: digests, compare)


def _first_difference(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for part in own:
        if own[part] != other[part]:
            if part != "config" or own[part] is None or other[part] is None:
                return part.removesuffix("_text")
            a, b = own[part], other[part]
            return next(
                f"{repr_text(k)} {repr_text(b.get(k))}, not {repr_text(a.get(k))}"
                for k in sorted({*a, *b})
                if a.get(k) != b.get(k)
            )
    return "nothing"


def make_tensors(ask: Callable[[], ModelRequest], team: Team, errors: AbstractContextManager[None]) -> Tensors:
    """Yield an empty tensor once the plan is made, then the tensors that this rank takes.

    `errors` wraps the whole iteration.
    """
    import torch

    with errors, ExitStack() as loan, team.together():
        request, _ = team.agree("the arguments", ask, ModelRequest.describe, team.check_alike)
        model = lend_model(request, team, loan)
        with closing(model.source):
            try:
                yield "", torch.empty(0)  # the plan is made
                if request.takers == "all" or team.is_first:
                    yield from _take_tensors(request, model, team)
            except GeneratorExit:
                pass  # the caller stopped early, which is not a failure
            # Ranks lend their parts until the last rank has taken its tensors.
            team.meet("the end of the iteration")
            model.source.check_unchanged()


def _take_tensors(request: ModelRequest, model: LentModel, team: Team) -> Tensors:
    """Yield all tensors, made ahead. The calling thread applies a caller's transform when it takes a tensor."""
    options, gather = request.options, model.gather
    budget, room_nbytes = split_budget(options.max_memory_nbytes, options.num_workers)
    transforms = gather.transforms
    compared = {tensor.output.name: tensor for tensor in plan_held_tensors(gather.plan, transforms).tensors}
    names = [output.name for output in gather.selection.outputs] if transforms is None else transforms.order
    plan = select_tensors(gather.plan, [compared[name] for name in names])
    if team.size > 1:
        plan = prefer_own_copies(plan, model.holder, team.position)  # all replicas have been compared
    replaced = {} if transforms is None else {tensor.name: tensor for tensor in transforms.tensors}
    encoded = {number: one for number, name in enumerate(names) if (one := replaced.get(name)) and one.encoding}
    maxima: dict[int, Any] = {}

    def make(numbers: Sequence[int], cancelled: Callable[[], bool]) -> list[dict[str, torch.Tensor]]:
        """Return, for each number, tensors by name: the one of the plan, or those that it is encoded to."""
        plain = [number for number in numbers if number not in encoded]
        whole = dict(zip(plain, make_whole_tensors(plan, model.source, budget, plain, cancelled), strict=True))
        chosen = [encoded[number] for number in numbers if number in encoded]
        made = {output.name: empty_tensor(output) for one in chosen for output in one.outputs}
        if transforms is not None and chosen:
            from xrank.engine.encoded_tensors import encode_into  # few iterations need this module

            of_source = [one.number for one in chosen]
            encode_into(transforms, of_source, model.source, budget, made, maxima=maxima, cancelled=cancelled)
        return [
            {output.name: made[output.name] for output in encoded[number].outputs}
            if number in encoded
            else {names[number]: whole[number]}
            for number in numbers
        ]

    nbytes = [
        sum(output.nbytes for output in encoded[number].outputs) if number in encoded else file.output.nbytes
        for number, file in enumerate(plan.files)
    ]
    with closing(TensorsAhead(make, nbytes, room_nbytes, team.make_failure_check())) as ahead:
        for number, name in enumerate(names):
            taken = ahead.take(number)
            if name in replaced and number not in encoded:
                assert transforms is not None and transforms.function is not None
                outputs = replaced[name].outputs
                made = apply_transform(transforms.function, name, taken.pop(name), outputs)
                taken = {output.name: made.pop(0).detach() for output in outputs}
            # This frame keeps no reference to a yielded tensor, so that the caller can free it.
            for output_name in [*taken]:
                yield output_name, taken.pop(output_name)
