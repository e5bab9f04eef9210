"""Tensors of a name with dims, such as ``layers.{8}.w``, as one tensor for each name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.holdings import Holdings, Survey, compute_shapes, find_problem, survey
from xrank.engine.planner import Plan, make_plan
from xrank.engine.replicas import spread_copies
from xrank.errors import LayoutError, UsageError, option
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nest_table import IntArray, NestTable, count_runs, int_array, rows_of
from xrank.layout.nests import Nest, restrict, swap
from xrank.layout.output_files import OutputFile, OutputTensor
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.layout.tensor_name import has_groups, parse_name
from xrank.recipes.decision import FolderPlan, plan_export, plan_gather, read_layouts
from xrank.recipes.found_source import FoundSource, OwnConfig
from xrank.recipes.layout_sources import is_layout_file, read_layout_source
from xrank.recipes.options import GatherOptions
from xrank.recipes.reshard_plan import Reshard, plan_reshard, plan_reshard_of
from xrank.virtual.simulation.traffic import ConversionTraffic, Flow, build_round


def expand_names(stored: StoredModel) -> StoredModel:
    """Return a model whose tensors have the names of a checkpoint, each a part of its tensor of a name with dims."""
    shards: list[StoredShard] = []
    for shard in stored.shards:
        shards.extend(_expand(shard) if has_groups(shard.name) else [shard])
    return replace(stored, shards=tuple(shards))


def _expand(shard: StoredShard) -> Iterator[StoredShard]:
    name = parse_name(shard.name)
    counts, shape = shard.shape[: len(name.dims)], shard.shape[len(name.dims) :]
    size = prod(shape)
    rows: Mapping[int, list[tuple[int, Nest]]] = {number: [] for number in range(prod(counts))}
    for row in range(len(shard.record)):
        turned = swap(shard.nests[row])
        last = turned.x + sum((n - 1) * x for n, x, _ in turned.loops)
        for number in range(turned.x // size, last // size + 1):
            for part in restrict(turned, number * size, (number + 1) * size):
                rows[number].append((row, swap(part._replace(x=part.x - number * size))))
    for indices, its in zip(product(*map(range, counts)), rows.values(), strict=True):
        picked = np.array([row for row, _ in its], np.int64)
        nests = NestTable.from_nests([nest for _, nest in its])
        yield replace(
            shard,
            name=name.with_indices(*indices),
            shape=shape,
            rank=shard.rank[picked],
            record=shard.record[picked],
            nests=nests,
        )


_SOME_CHECKSUM = 0
"""Any checksum: saved states have one per tensor, and verifying it reads bytes (mostly padding) that no copy needs."""


def read_layouts_on(file: str, mesh: str | None) -> LayoutMap:
    """Read a layout file, and replace its mesh if another one is given."""
    try:
        return LayoutMap.read(file, mesh=None if mesh is None else DeviceMesh.parse_grid(mesh))
    except LayoutError as error:
        if mesh is not None:
            error.advise(f"give {option('mesh')} the axes that {file} names, or correct the file")
        raise


def survey_layouts(layouts: LayoutMap, file: str, dtype: str) -> tuple[Survey, tuple[tuple[str, str], ...]]:
    """Survey all tensors whose sizes a layout file defines, and return notes on the others."""
    shapes, untold = compute_shapes(layouts, is_strict=True)
    if not shapes:
        raise LayoutError(
            f"{file} defines the size of no tensor",
            file=file,
            got=next(iter(untold.values()), "no rule"),
            want="numbers in the layouts or in [sizes]",
            next_step=f"write numbers in place of the names in {file}, or define them in its [sizes]",
        )
    found = survey(layouts, shapes, dtypes=dict.fromkeys(shapes, dtype))
    for one in found.tensors:
        if (problem := find_problem(one)) is not None:
            raise problem
    for one in found.tensors:
        if one.sums:
            raise LayoutError(
                f"{one.name}: its ranks have addends of a sum over {', '.join(one.sums)}, which cannot be copied",
                tensor=one.name,
                got=one.text,
                want="parts or replicas",
                next_step="give the layout of the reduced tensor",
            )
    notes = (("no-shape", f"the rule {rule!r} is left out: {reason}") for rule, reason in untold.items())
    return found, tuple(notes)


def build_layout_model(found: Survey, path: str) -> StoredModel:
    """Build the stored model of a survey: one file per rank, and one record per tensor on a rank."""
    held = [one for one in found.tensors if one.parts is not None and len(one.parts.ranks)]
    meshes = [one.mesh for one in held if one.mesh is not None]
    ranks = sorted({rank for mesh in dict.fromkeys(meshes) for rank in mesh.ranks})
    if not ranks or ranks != list(range(len(ranks))):
        raise UsageError(
            f"the ranks of {path} are not numbered from 0 without a gap",
            file=path,
            got=f"{len(ranks)} ranks, up to {ranks[-1]}" if ranks else "no rank",
            want="ranks 0, 1, 2, ...",
            next_step=f'leave "ranks" out of [mesh], or give {option("mesh")}',
        )
    used = np.zeros(len(ranks), np.int64)
    file, offset, nbytes, shards, count = [], [], [], [], 0
    for one in held:
        shard, sizes = _shard(one, count)
        holders = one.parts.ranks if one.parts is not None else shard.rank
        file.append(holders)
        # In each rank's file, records follow one another in the order of the tensors.
        offset.append(used[holders])
        nbytes.append(sizes)
        used[holders] += sizes
        shards.append(shard)
        count += len(holders)
    table = [np.concatenate(column) for column in (file, offset, nbytes)]
    total = [int(n) for n in used]
    return StoredModel(
        format="layout file",
        path=path,
        files=tuple(SourceFile(os.fspath(f"rank {r}"), n, inode=r, mtime_ns=0) for r, n in enumerate(total)),
        records=RecordTable(table[0], table[1], table[2], np.full(count, _SOME_CHECKSUM, np.int64)),
        shards=tuple(shards),
        world_size=len(ranks),
        nbytes=sum(total),
    )


def _shard(one: Holdings, first: int) -> tuple[StoredShard, IntArray]:
    """Return a tensor's shard, with records numbered from `first`, and the bytes of each record."""
    parts, dtype = one.parts, one.dtype
    assert parts is not None and dtype is not None
    rows, holder = rows_of(parts.owner, parts.part, len(parts.local_sizes))
    shard = StoredShard(
        one.name, dtype, one.shape, parts.ranks[holder], int_array(first + holder), parts.nests.take(rows)
    )
    return shard, parts.local_sizes[parts.part] * dtypes.dtype(dtype).nbytes


SimulatedOperation: TypeAlias = Literal["gather", "export", "reshard", "refit"]

_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


class PlannedWork(Struct, frozen=True, eq=False):
    """A planned and verified conversion that is not executed."""

    operation: SimulatedOperation
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
    """Plan and verify an operation from metadata alone; arguments as in `simulate`.

    `needs_mesh` is whether to determine the mesh of a checkpoint's ranks.
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
    if operation not in get_args(SimulatedOperation):
        raise UsageError(
            f"{operation!r} cannot be simulated",
            got=repr(operation),
            want=", ".join(get_args(SimulatedOperation)),
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
        return _make_work(operation, path, made, None, made.notes)
    gather = plan_gather(path, GatherOptions(), recipe=recipe)
    if operation == "gather":
        return _make_work(operation, path, gather, None, gather.notes)
    mesh = next(iter(read_layout_source(path).survey.meshes.values()), None) if needs_mesh else None
    assumed = "the ranks are assumed to have in memory what they wrote; replicas that were not written are unknown"
    return _make_work(operation, path, gather, mesh, (("as-written", assumed),))


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
    made: FolderPlan | Reshard
    if to is None:
        made = plan_export(stored, GatherOptions(), OwnConfig(), layouts=layouts, recipe=recipe or "none")
    else:
        # Rules of the two files may count other numbers in braces, so a refit is planned by names.
        source = FoundSource(expand_names(stored) if operation == "refit" else stored, None, None, ())
        is_partial = operation == "refit"  # an engine need not take all tensors of a trainer
        made = plan_reshard_of(source, path, read_layouts(to), GatherOptions(), recipe=recipe, is_partial=is_partial)
    kept = [note for note in made.notes if note[0] not in ("new-run-id", "no-config")]
    return _make_work(operation, path, made, layouts.device_mesh, (*notes, *kept))


def _make_work(
    operation: str,
    path: str,
    made: FolderPlan | Reshard,
    mesh: DeviceMesh | None,
    notes: Sequence[tuple[str, str]],
) -> PlannedWork:
    """Return a gather or reshard of files, or else the export of each rank's part of the model from its memory."""
    source, records = made.source, made.source.records
    if operation in ("gather", "reshard"):
        none = np.zeros(1, np.int64)
        return PlannedWork(operation, path, source, made.plan, 1, None, none, mesh, tuple(notes))  # type: ignore[arg-type]
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
    plan = replace(made.plan, source=source)
    return PlannedWork("export", path, source, plan, num_ranks, holder, held, mesh, tuple(notes))


def place_engine(work: PlannedWork) -> PlannedWork:
    """Return the export of a trainer's ranks as a refit: the plan's files are the parts of an engine's ranks.

    Each engine rank reads replicas of its own, as in `xrank.take_weights`.
    """
    plan = make_plan(work.plan.source, [_compare_all(file.output) for file in work.plan.files])
    spread = [spread_copies(replace(plan, files=(file,)), rank).files[0] for rank, file in enumerate(plan.files)]
    held = [sum(tensor.output.nbytes for tensor in file.tensors) for file in plan.files]
    return replace(
        work,
        operation="refit",
        plan=replace(plan, files=tuple(spread)),
        num_ranks=work.num_ranks + len(held),
        held_nbytes=np.concatenate((work.held_nbytes, np.array(held, np.int64))),
        mesh=None,  # no mesh has the ranks of both sides
    )


def _compare_all(file: OutputFile) -> OutputFile:
    """Return an engine rank's file with all replicas of its parts: a reshard compares those of equal parts once."""

    def compare(tensor: OutputTensor) -> OutputTensor:
        part = tensor.part
        return tensor if part is None else replace(tensor, part=replace(part, compared=part.nests))

    return replace(file, tensors=tuple(map(compare, file.tensors)))


def count_refit(work: PlannedWork) -> ConversionTraffic:
    """Count the bytes between the ranks of a refit in one round; a message is a run of bytes in both memories."""
    assert work.holder is not None
    flows = []
    for number, file in enumerate(work.plan.files, work.num_ranks - len(work.plan.files)):
        for tensor in file.tensors:
            copies, width = tensor.copies, dtypes.dtype(tensor.source_dtype).nbytes
            taker, giver = np.full(len(copies), number), work.holder[copies.record]
            flows.append(Flow(taker, giver, copies.nests.sizes * width, count_runs(copies.nests)))
    none = np.zeros(work.num_ranks, np.int64)
    return ConversionTraffic((build_round(none, flows),), none, is_each_read=True)
