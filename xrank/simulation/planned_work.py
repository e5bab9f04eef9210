"""The simulated work: an operation's real plan, and the ranks that own, read and write its data."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from xrank.decisions.folder_plan import FolderPlan, plan_export, plan_gather, read_layouts
from xrank.decisions.layout_sources import is_layout_file, read_source
from xrank.decisions.reshard_plan import Reshard, plan_reshard, plan_reshard_of
from xrank.errors import UsageError, option
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray
from xrank.plan.planner import Plan
from xrank.plan.source import NO_CHECKSUM, StoredModel
from xrank.recipes.found_source import FoundSource
from xrank.recipes.options import GatherOptions
from xrank.recipes.own_config import OwnConfig
from xrank.simulation.expanded_names import expand_names
from xrank.simulation.layout_model import build_layout_model, read_layouts_on, survey_layouts

Operation: TypeAlias = Literal["gather", "export", "reshard", "refit"]

_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A planned and verified conversion that is not executed."""

    operation: Operation
    path: str
    source: StoredModel
    plan: Plan
    num_ranks: int
    """Number of working processes."""
    holder: IntArray | None
    """The rank whose memory contains each record; None if the records are in files."""
    held_nbytes: IntArray
    """Bytes of the model in each rank's memory during the whole operation."""
    mesh: DeviceMesh | None
    """Mesh of the ranks that have the model, if known."""
    notes: tuple[tuple[str, str], ...]


def plan_work(
    path: str,
    operation: str,
    *,
    mesh: str | None = None,
    to: str | os.PathLike[str] | None = None,
    num_ranks: int | None = None,
    dtype: str | None = None,
    recipe: str | os.PathLike[str] | None = None,
    needs_mesh: bool = False,
) -> PlannedWork:
    """Plan and verify an operation from metadata alone.

    Args:
        path: a checkpoint or workspace, or a layout file with sizes.
        operation: the operation to simulate.
        mesh: replaces the mesh of a layout file.
        to: the new layout file of a reshard, or that of a refit's engine.
        num_ranks: number of processes that share a gather or reshard; the ranks that have the model make the others.
        dtype: element type of a layout file's tensors: ``"bf16"`` (default), ``"fp16"``, ``"fp32"``.
        recipe: as for a gather; None keeps the names of a layout file.
        needs_mesh: whether to determine the mesh of a checkpoint's ranks.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError, ContradictionError, CorruptError, UnsafeError: as in the operation itself.
    """
    _check(operation, to, num_ranks)
    if is_layout_file(path):
        work = _plan_layout(path, operation, mesh=mesh, to=to, dtype=dtype, recipe=recipe)
    else:
        for name, value in (("mesh", mesh), ("dtype", dtype)):
            if value is not None:
                raise UsageError(
                    f"{option(name)} was given, but {path} is not a layout file",
                    file=path,
                    got=option(name, value),
                    want="a layout file, which alone leaves the mesh and element type open",
                    next_step=f"leave {option(name)} out; or start from a layout file: xrank layout show {path} --toml",
                )
        work = _plan_stored(path, operation, to=to, recipe=recipe, needs_mesh=needs_mesh)
    if work.holder is not None:
        return work
    count = num_ranks or 1
    return replace(work, num_ranks=count, held_nbytes=np.zeros(count, np.int64))


def _check(operation: str, to: str | os.PathLike[str] | None, num_ranks: int | None) -> None:
    if operation not in get_args(Operation):
        raise UsageError(
            f"{operation!r} cannot be simulated",
            got=repr(operation),
            want=", ".join(get_args(Operation)),
            next_step=f"give one of them to {option('operation')}",
        )
    if (to is not None) != (operation in ("reshard", "refit")):
        raise UsageError(
            f"{option('to')} was {'not given' if to is None else 'given'}, and the operation is {operation}",
            got=option("operation", operation),
            want=f"{option('to', metavar='FILE')}, the new layout, with a reshard or refit alone",
            next_step=f"add {option('to', metavar='FILE')}"
            if to is None
            else f"leave {option('to')} out, or give {option('operation', 'reshard')}",
        )
    if num_ranks is not None and (operation in ("export", "refit") or num_ranks < 1):
        raise UsageError(
            f"{option('num_ranks')} is for a gather or a reshard, whose work processes share",
            got=f"{option('operation', operation)} {option('num_ranks', num_ranks)}",
            want="1 or more; an export and a refit are made by the ranks that hold the model",
            next_step=f"leave {option('num_ranks')} out",
        )


def _plan_stored(
    path: str,
    operation: str,
    *,
    to: str | os.PathLike[str] | None,
    recipe: str | os.PathLike[str] | None,
    needs_mesh: bool,
) -> PlannedWork:
    """Plan an operation on a stored checkpoint."""
    if to is not None:
        made = plan_reshard(path, to, GatherOptions(), recipe=recipe, is_partial=operation == "refit")
        if operation == "refit":
            return _export_work(path, made, None, made.notes)
        return _file_work("reshard", path, made.source, made.plan, made.notes)
    gather = plan_gather(path, GatherOptions(), recipe=recipe)
    if operation == "gather":
        return _file_work("gather", path, gather.source, gather.plan, gather.notes)
    mesh = next(iter(read_source(path).survey.meshes.values()), None) if needs_mesh else None
    assumed = "the ranks are assumed to have in memory what they wrote; replicas that were not written are unknown"
    return _export_work(path, gather, mesh, (("as-written", assumed),))


def _plan_layout(
    path: str,
    operation: str,
    *,
    mesh: str | None,
    to: str | os.PathLike[str] | None,
    dtype: str | None,
    recipe: str | os.PathLike[str] | None,
) -> PlannedWork:
    """Plan an operation on the model of a layout file."""
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(
            f"{option('dtype')} must be one of {', '.join(_DTYPES)}; got {dtype!r}",
            got=repr(dtype),
            want=", ".join(_DTYPES),
            next_step="give one of these values",
        )
    layouts = read_layouts_on(path, mesh)
    found, notes = survey_layouts(layouts, path, _DTYPES[dtype or "bf16"])
    stored = build_layout_model(found, path)
    if to is not None:
        # Rules of the two files may count other numbers in braces, so a refit is planned by names.
        source = FoundSource(expand_names(stored) if operation == "refit" else stored, None, None, ())
        is_partial = operation == "refit"  # an engine need not take all tensors of a trainer
        made = plan_reshard_of(source, path, read_layouts(to), GatherOptions(), recipe=recipe, is_partial=is_partial)
        kept = [note for note in made.notes if note[0] not in ("new-run-id", "no-config")]
        if operation == "refit":
            return _export_work(path, made, None, (*notes, *kept))
        return _file_work("reshard", path, made.source, made.plan, (*notes, *kept), layouts.device_mesh)
    gather = plan_export(stored, GatherOptions(), OwnConfig(), layouts=layouts, recipe=recipe or "none")
    kept = [note for note in gather.notes if note[0] != "no-config"]
    if operation == "gather":
        return _file_work("gather", path, gather.source, gather.plan, (*notes, *kept), layouts.device_mesh)
    return _export_work(path, gather, layouts.device_mesh, (*notes, *kept))


def _file_work(
    operation: Operation,
    path: str,
    source: StoredModel,
    plan: Plan,
    notes: Sequence[tuple[str, str]],
    mesh: DeviceMesh | None = None,
) -> PlannedWork:
    return PlannedWork(operation, path, source, plan, 1, None, np.zeros(1, np.int64), mesh, tuple(notes))


def _export_work(
    path: str, gather: FolderPlan | Reshard, mesh: DeviceMesh | None, notes: Sequence[tuple[str, str]]
) -> PlannedWork:
    """Return the export of each rank's part of the model from its memory."""
    source, records = gather.source, gather.source.records
    holder = np.zeros(len(records), np.int64)
    is_held = np.zeros(len(records), np.bool_)
    for shard in source.shards:
        holder[shard.record] = shard.rank
        is_held[shard.record] = True
    num_ranks = max(source.world_size or 1, 1 + int(holder.max(initial=0)))
    held = np.zeros(num_ranks, np.int64)
    np.add.at(held, holder[is_held], records.nbytes[is_held])
    # Data in memory has no checksums.
    source = replace(source, records=replace(records, crc32=np.full(len(records), NO_CHECKSUM, np.int64)))
    return PlannedWork(
        "export", path, source, replace(gather.plan, source=source), num_ranks, holder, held, mesh, tuple(notes)
    )
