"""Load: from any source into the tensors of a live module, each rank its own part."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xrank.conversion.report import count_outputs, peak_rss_nbytes, source_facts
from xrank.decisions.decision import Purpose, Request, decide
from xrank.decisions.folder_plan import layout_notes
from xrank.decisions.found_source import read_source
from xrank.decisions.given_layouts import live_layouts
from xrank.decisions.live_arguments import check_meeting, check_types
from xrank.decisions.load_check import check_loads, describe_load
from xrank.decisions.load_plan import Load, plan_load
from xrank.decisions.options import default_workers, parse_size
from xrank.lending.tensor_target import check_fillable
from xrank.making.manifest_digests import ManifestDigests
from xrank.making.module_filling import fill_module
from xrank.plan.executor import Budget, Outcome
from xrank.plan.report import OutputFacts, ProofFacts, Report
from xrank.plan.source import StoredModel
from xrank.public_calls import names_own_arguments
from xrank.readers.live.local_model import LocalModel, local_model
from xrank.readers.live.module_tensors import FilledModule, check_materialised, names_left_out
from xrank.teams.agreement import check_alike, nbytes_text, path_text
from xrank.teams.launches import find_group_team
from xrank.words import list_text

if TYPE_CHECKING:
    from xrank.layout import LayoutMap

__all__ = ["load_model"]


@names_own_arguments
def load_model(
    module: FilledModule,
    path: str | os.PathLike[str],
    *,
    layouts: LayoutMap | str | os.PathLike[str] | None = None,
    mesh: Any = None,
    recipe: str | os.PathLike[str] | None = None,
    max_memory: str | int = "64MB",
    group: Any = None,
    timeout_seconds: float = 1800.0,
) -> Report:
    """Fill a module's tensors from a model folder, or from any sharded checkpoint; every rank reads its own part.

    Every rank of the group makes this call. All is proven from metadata on all ranks before any tensor is touched: the
    names are those of the source, all of them and no others, shapes and layouts fit, each rank sees the same source.
    Then each rank reads what it holds, straight to where it lies: no parameter is allocated anew, of whatever device
    and strides it is, and autograd counts the change. After an error beyond that point the tensors' values are
    undefined; the same call again, or with another source, fills them.

    Of the source is read what a rank holds, and of cuts of inner dims what lies between as long as a quarter is wanted.
    Checksums are compared where a rank reads all of what one is over; replicas that the source has, by one rank; the
    digests of ``xrank_manifest.json``, of tensors that a rank holds whole, in the source's type.

    What is no part of a checkpoint is left as it is: buffers that are not persistent (a report's note names them), such
    as the frequencies of rotary embeddings, which `torch.nn.Module.to_empty` leaves without values.

    Args:
        module: with DTensors of any mesh (FSDP2, tensor parallelism, both), plain tensors, or both; or its state dict;
            or Megatron's chunks of one. Names of one tensor are one: the source may have some of them only.
        path: whatever `xrank.open_checkpoint` takes that records its own layouts.
        layouts: the layouts of plain tensors that are cut, or a layout file; others are held whole.
        mesh: the mesh of `layouts`, xrank's or torch's, where they have none; and of Megatron's modules
            (`xrank.dialects.megatron.mesh`).
        recipe: the name of a recipe that comes with xrank, or a file: training names of the source become Hugging
            Face's, or these the module's training names, whose padding of the vocabulary becomes zeros. ``"none"``
            keeps the names; so does None, but for experts that transformers fuses in memory and keeps apart in files.
        max_memory: bytes of all buffers of a rank, such as ``"64MB"``; the same on all.
        group: the process group whose ranks take part; None: the world, or this process alone where there is none.
        timeout_seconds: how long ranks may take to come. Once they have met, a death is noticed in seconds.

    Returns:
        What this rank loaded.

    Raises:
        UsageError: a name, shape or element type of the module is not the source's, or it lies on the meta device.
        LayoutError: a layout does not fit its tensor.
        IncompleteError: something is missing and may still come.
        ContradictionError, CorruptError, UnsafeError: the source is not to be trusted, or ranks see different ones.
        RankFailedError, RankTimeoutError: another rank failed, died or did not come.
    """
    started = time.monotonic()
    place = os.fspath(path)

    def read_arguments() -> int:
        check_types(None if isinstance(layouts, str | os.PathLike) else layouts, mesh)
        nbytes = parse_size(max_memory, "max_memory")
        Budget.from_memory(nbytes, default_workers())
        return nbytes

    def describe(max_memory_nbytes: int) -> dict[str, str | None]:
        size = nbytes_text(max_memory_nbytes)
        return {"call": "load_model", "recipe": path_text(recipe), "max_memory": size}

    def plan() -> _Planned:
        check_materialised(module)
        on_mesh = live_layouts(layouts, mesh)
        rank, world_size = _find_rank()
        local = local_model(module, layouts=on_mesh, mesh=mesh, rank=rank, world_size=world_size)
        source, may_pad = _rename_source(place, recipe, local)
        load = plan_load(local, source, on_mesh, may_pad)
        for view, tensor in zip(load.views, load.plan.tensors, strict=True):
            check_fillable(tensor.output.name, local.views[view])
        notes = (*source.notes, *layout_notes(on_mesh, source), *_notes(module, load))
        return _Planned(local, source, load, ManifestDigests(source, load.plan), notes)

    check_meeting(group, timeout_seconds)
    team = find_group_team(group, place, timeout_seconds=timeout_seconds, joins_launch=False)
    with team.together():
        max_memory_nbytes, _ = team.agree("what is read_arguments", read_arguments, describe, check_alike(team.ranks))
        budget = Budget.from_memory(max_memory_nbytes, default_workers())
        planned, _ = team.agree(
            "the plan",
            plan,
            lambda planned: describe_load(planned.source, planned.load),
            lambda planned, loads: check_loads(planned.source, team.ranks, loads),
        )
        outcome = fill_module(module, planned.local, planned.load, planned.digests, budget, team)
    return _report(planned, outcome, started)


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """One rank's load before any tensor is touched."""

    local: LocalModel
    source: StoredModel
    """Under the module's names."""
    load: Load
    digests: ManifestDigests
    notes: tuple[tuple[str, str], ...]


def _find_rank() -> tuple[int, int]:
    """Return this process' rank in the world, and the world's size."""
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave much out
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def _rename_source(
    path: str, recipe: str | os.PathLike[str] | None, local: LocalModel
) -> tuple[StoredModel, frozenset[str]]:
    """Return the source under the names that a recipe gives it, and those that a trainer may pad."""
    decision = decide(read_source(path), Request(Purpose.MODULE, recipe=recipe, module_names=local.tensors.keys()))
    return decision.source, decision.padded_names


def _notes(module: FilledModule, load: Load) -> Iterator[tuple[str, str]]:
    """Yield what the report says of tensors that are not as in the source, or not loaded."""
    if load.cast:
        kinds = ", ".join(sorted(set(load.cast.values())))
        yield "cast", f"{len(load.cast)} tensors have the module's element type, not the source's: {kinds}"
    if load.padded:
        rows = ", ".join(f"{rows:,} of {name}" for name, rows in load.padded.items())
        yield "padded", f"rows that the source has not are zeros: {rows}"
    if names := names_left_out(module):
        yield "not-loaded", f"buffers that no checkpoint has are left as they are: {list_text(names, 3)}"


def _report(planned: _Planned, outcome: Outcome, started: float) -> Report:
    plan, source = planned.load.plan, planned.source
    return Report(
        command="load",
        path=source.path,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(source),
        proof=ProofFacts(
            coverage="proven",
            num_replicas_compared=sum(len(tensor.replicas) for tensor in plan.tensors),
            num_checksums=outcome.num_checksums,
            num_digests=planned.digests.num_compared,
        ),
        output=OutputFacts(**count_outputs([t.output for t in plan.tensors]), cast=dict(planned.load.cast)),
        notes=planned.notes,
    )
