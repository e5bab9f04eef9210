"""The work that is simulated: an operation's real plan, and who holds, reads and writes what of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np

from xrank.decisions.found_source import FoundSource
from xrank.decisions.layout_sources import is_layout_file, read_source
from xrank.decisions.options import GatherOptions
from xrank.decisions.output_plan import OutputPlan, plan_export, plan_gather, read_layouts
from xrank.decisions.own_config import OwnConfig
from xrank.decisions.reshard_plan import plan_reshard, plan_reshard_of
from xrank.errors import UsageError
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray
from xrank.plan.planner import Plan
from xrank.plan.source import NO_CHECKSUM, StoredModel
from xrank.simulation.laid_out_model import laid_out_model, read_layouts_on, told_survey

__all__ = ["Operation", "PlannedWork", "planned_work"]

Operation: TypeAlias = Literal["gather", "export", "reshard"]

_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWork:
    """A conversion that is planned and proven, and nobody makes."""

    operation: Operation
    path: str
    source: StoredModel
    plan: Plan
    num_ranks: int
    """How many processes work."""
    holder: IntArray | None
    """By record, the rank in whose memory it lies; None: records of files."""
    held_nbytes: IntArray
    """By rank, what of the model lies in its memory all the time."""
    mesh: DeviceMesh | None
    """Of the ranks that hold the model, where one is known."""
    notes: tuple[tuple[str, str], ...]


def planned_work(
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
    """Return the proven plan of an operation; reads metadata alone.

    Args:
        path: a checkpoint or workspace, or a layout file, whose tensors are those that it tells the sizes of.
        operation: what is to be simulated.
        mesh: in place of a layout file's.
        to: the new layout file, of a reshard.
        num_ranks: how many processes share a gather or reshard; an export is made by the ranks that hold the model.
        dtype: of a layout file's tensors: ``"bf16"``, ``"fp16"``, ``"fp32"``; ``"bf16"`` if None.
        recipe: as for a gather; None leaves the names of a layout file alone.
        needs_mesh: whether the mesh of a checkpoint's ranks is wanted, too.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError, ContradictionError, CorruptError, UnsafeError: as the operation itself.
    """
    _check(operation, to, num_ranks)
    if is_layout_file(path):
        work = _laid_out(path, operation, mesh=mesh, to=to, dtype=dtype, recipe=recipe)
    else:
        for name, value in (("--mesh", mesh), ("--dtype", dtype)):
            if value is not None:
                raise UsageError(
                    f"{name} was given, and {path} is no layout file",
                    file=path,
                    got=f"{name} {value}",
                    want="a layout file, whose mesh and element type nobody else tells",
                    next_step=f"leave {name} out; or start from a layout file: xrank layout show {path} --toml",
                )
        work = _found(path, operation, to=to, recipe=recipe, needs_mesh=needs_mesh)
    if work.holder is not None:
        return work
    count = num_ranks or 1
    return replace(work, num_ranks=count, held_nbytes=np.zeros(count, np.int64))


def _check(operation: str, to: str | os.PathLike[str] | None, num_ranks: int | None) -> None:
    if operation not in get_args(Operation):
        raise UsageError(
            f"there is no operation {operation!r} to simulate",
            got=repr(operation),
            want=", ".join(get_args(Operation)),
            next_step="give one of them to --operation",
        )
    if (to is not None) != (operation == "reshard"):
        raise UsageError(
            f"--to was {'not given' if to is None else 'given'}, and the operation is {operation}",
            got=f"--operation {operation}",
            want="--to FILE, the new layout, with a reshard alone",
            next_step="add --to FILE" if to is None else "leave --to out, or give --operation reshard",
        )
    if num_ranks is not None and (operation == "export" or num_ranks < 1):
        raise UsageError(
            "--ranks says how many processes share a gather or a reshard",
            got=f"--operation {operation} --ranks {num_ranks}",
            want="1 or more; an export is made by the ranks that hold the model",
            next_step="leave --ranks out",
        )


def _found(
    path: str,
    operation: str,
    *,
    to: str | os.PathLike[str] | None,
    recipe: str | os.PathLike[str] | None,
    needs_mesh: bool,
) -> PlannedWork:
    """Return the work on what lies at a path."""
    if to is not None:
        made = plan_reshard(path, to, GatherOptions(), recipe=recipe)
        return _of_files("reshard", path, made.source, made.plan, made.notes)
    gather = plan_gather(path, GatherOptions(), recipe=recipe)
    if operation == "gather":
        return _of_files("gather", path, gather.source, gather.plan, gather.notes)
    mesh = next(iter(read_source(path).survey.meshes.values()), None) if needs_mesh else None
    told = "the ranks are taken to hold in memory what they wrote; replicas that were not written are unknown"
    return _of_memory(path, gather, mesh, (("as-written", told),))


def _laid_out(
    path: str,
    operation: str,
    *,
    mesh: str | None,
    to: str | os.PathLike[str] | None,
    dtype: str | None,
    recipe: str | os.PathLike[str] | None,
) -> PlannedWork:
    """Return the work on what ranks would hold by a layout file."""
    if dtype is not None and dtype not in _DTYPES:
        raise UsageError(
            f"--dtype takes no {dtype!r}", got=repr(dtype), want=", ".join(_DTYPES), next_step="give one of them"
        )
    layouts = read_layouts_on(path, mesh)
    found, notes = told_survey(layouts, path, _DTYPES[dtype or "bf16"])
    stored = laid_out_model(found, path)
    if to is not None:
        source = FoundSource(stored, None, None, ())
        made = plan_reshard_of(source, path, read_layouts(to), GatherOptions(), recipe=recipe)
        kept = [note for note in made.notes if note[0] not in ("new-run-id", "no-config")]
        return _of_files("reshard", path, made.source, made.plan, (*notes, *kept), layouts.device_mesh)
    gather = plan_export(stored, GatherOptions(), OwnConfig(), layouts=layouts, recipe=recipe or "none")
    kept = [note for note in gather.notes if note[0] != "no-config"]
    if operation == "gather":
        return _of_files("gather", path, gather.source, gather.plan, (*notes, *kept), layouts.device_mesh)
    return _of_memory(path, gather, layouts.device_mesh, (*notes, *kept))


def _of_files(
    operation: Operation,
    path: str,
    source: StoredModel,
    plan: Plan,
    notes: Sequence[tuple[str, str]],
    mesh: DeviceMesh | None = None,
) -> PlannedWork:
    return PlannedWork(operation, path, source, plan, 1, None, np.zeros(1, np.int64), mesh, tuple(notes))


def _of_memory(path: str, gather: OutputPlan, mesh: DeviceMesh | None, notes: Sequence[tuple[str, str]]) -> PlannedWork:
    """Return the export of what each rank left, or would hold, from its memory."""
    source, records = gather.source, gather.source.records
    holder = np.zeros(len(records), np.int64)
    is_held = np.zeros(len(records), np.bool_)
    for shard in source.shards:
        holder[shard.record] = shard.rank
        is_held[shard.record] = True
    num_ranks = max(source.world_size or 1, 1 + int(holder.max(initial=0)))
    held = np.zeros(num_ranks, np.int64)
    np.add.at(held, holder[is_held], records.nbytes[is_held])
    # Nothing in memory has a checksum.
    source = replace(source, records=replace(records, crc32=np.full(len(records), NO_CHECKSUM, np.int64)))
    return PlannedWork(
        "export", path, source, replace(gather.plan, source=source), num_ranks, holder, held, mesh, tuple(notes)
    )
