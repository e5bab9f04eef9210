"""Simulates a conversion: its real plan, its traffic and its time at given rates, with a table and an HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from xrank import dtypes
from xrank.engine.executor import Budget
from xrank.engine.holdings import Holdings, Survey, compute_shapes, find_problem, survey
from xrank.engine.planner import Plan, make_plan
from xrank.engine.replicas import spread_copies
from xrank.engine.report import OutputFacts, ProofFacts, Report, SimulationDetails, align_rows, source_facts
from xrank.engine.rounds import divide
from xrank.errors import LayoutError, UsageError, names_own_arguments, option
from xrank.layout import DeviceMesh, LayoutMap
from xrank.layout.nest_table import IntArray, NestTable, count_runs, int_array, rows_of
from xrank.layout.nests import Nest, restrict, swap
from xrank.layout.output_files import OutputTensor
from xrank.layout.stored_model import NO_CHECKSUM, RecordTable, SourceFile, StoredModel, StoredShard
from xrank.layout.tensor_name import has_groups, parse_name
from xrank.pictures.picture import Bar, draw_stacked_bars, page, page_text
from xrank.recipes.decision import FolderPlan, plan_gather, read_layouts
from xrank.recipes.found_source import FoundSource, OwnConfig
from xrank.recipes.layout_sources import is_layout_file, read_layout_source
from xrank.recipes.lent_model import ModelRequest, plan_export
from xrank.recipes.options import GatherOptions
from xrank.recipes.reshard_plan import Reshard, plan_reshard, plan_reshard_of
from xrank.system import peak_rss_nbytes
from xrank.virtual.simulation.traffic import (
    ASSUMED,
    PARTS,
    ConversionTraffic,
    Flow,
    Prediction,
    Rates,
    build_round,
    count_compared_nbytes,
    count_rounds,
    predict,
    read_rates,
)
from xrank.words import one_line, plural, size_text


def expand_names(stored: StoredModel) -> StoredModel:
    """Return a model whose tensors have the names of a checkpoint, each a part of its tensor of a name with dims."""
    return replace(stored, shards=tuple(part for shard in stored.shards for part in _expand(shard)))


def _expand(shard: StoredShard) -> Iterator[StoredShard]:
    if not has_groups(shard.name):
        yield shard
        return
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
                f"{one.name}: its ranks have partial sums over {', '.join(one.sums)}, which cannot be copied",
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
    """Plan and verify an operation from metadata alone; `needs_mesh` asks for the mesh of a checkpoint's ranks."""
    _check(operation, to, num_ranks)
    is_partial = operation == "refit"  # an engine need not take all tensors of a trainer
    options, found_mesh = GatherOptions(), None
    made: FolderPlan | Reshard
    if is_layout_file(path):
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
        if to is None:
            made = plan_export(stored, OwnConfig(), ModelRequest({}, options, layouts, recipe=recipe or "none"))
        else:
            # Rules of the two files may count other numbers in braces, so a refit is planned by names.
            found_source = FoundSource(expand_names(stored) if is_partial else stored, None, None, ())
            made = plan_reshard_of(found_source, path, read_layouts(to), options, recipe=recipe, is_partial=is_partial)
        notes += tuple(note for note in made.notes if note[0] not in ("new-run-id", "no-config"))
        found_mesh = layouts.device_mesh
    else:
        for name, value in (("mesh", mesh), ("dtype", dtype)):
            if value is not None:
                raise UsageError(
                    f"{option(name)} was given, but {path} is not a layout file",
                    file=path,
                    got=option(name, value),
                    want="a layout file: only for it can the mesh and element type be chosen",
                    next_step=f"leave {option(name)} out; or start from a layout file: xrank layout show {path} --toml",
                )
        if to is not None:
            made = plan_reshard(path, to, options, recipe=recipe, is_partial=is_partial)
        else:
            made = plan_gather(path, options, recipe=recipe)
        notes = tuple(made.notes)
        if operation == "export":
            if needs_mesh:
                found_mesh = next(iter(read_layout_source(path).survey.meshes.values()), None)
            assumed = (
                "the ranks are assumed to have in memory what they wrote; replicas that were not written are unknown"
            )
            notes = (("as-written", assumed),)
    source, records = made.source, made.source.records
    if operation in ("gather", "reshard"):
        count = num_ranks or 1
        none = np.zeros(count, np.int64)
        return PlannedWork(operation, path, source, made.plan, count, None, none, found_mesh, notes)  # type: ignore[arg-type]
    # The export of each rank's part of the model from its memory; a refit begins with it.
    holder = np.zeros(len(records), np.int64)
    is_held = np.zeros(len(records), np.bool_)
    for shard in source.shards:
        holder[shard.record] = shard.rank
        is_held[shard.record] = True
    held = np.zeros(max(source.world_size or 1, 1 + int(holder.max(initial=0))), np.int64)
    np.add.at(held, holder[is_held], records.nbytes[is_held])
    # Data in memory has no checksums.
    source = replace(source, records=replace(records, crc32=np.full(len(records), NO_CHECKSUM, np.int64)))
    plan = replace(made.plan, source=source)
    return PlannedWork("export", path, source, plan, len(held), holder, held, found_mesh, notes)


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
            want=f"{option('to', metavar='FILE')}, the new layout, only with a reshard or refit",
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


def place_engine(work: PlannedWork) -> PlannedWork:
    """Return the export of a trainer's ranks as a refit: the plan's files are the parts of an engine's ranks."""

    def compare_all(tensor: OutputTensor) -> OutputTensor:
        # A reshard compares the replicas of equal parts once; here each engine rank reads replicas of its own, as in
        # `xrank.take_weights`.
        part = tensor.part
        return tensor if part is None else replace(tensor, part=replace(part, compared=part.nests))

    outputs = [replace(file.output, tensors=tuple(map(compare_all, file.output.tensors))) for file in work.plan.files]
    plan = make_plan(work.plan.source, outputs)
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


_WORKERS = 4
"""Threads per rank, which determine its buffers: the default on a machine with enough cores."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The result of a simulation."""

    work: PlannedWork
    traffic: ConversionTraffic
    rates: Rates | None
    prediction: Prediction | None
    """None if no rates were given."""
    buffer_nbytes: int
    """Upper limit of each rank's buffers, in bytes."""
    seconds: float
    """Seconds that the simulation itself took."""

    @property
    def memory_nbytes(self) -> IntArray:
        """Bytes of each rank: its part of the model, and its buffers."""
        return self.work.held_nbytes + self.buffer_nbytes

    def __str__(self) -> str:
        """Return what `xrank simulate` prints."""
        return f"{align_rows(simulation_rows(self))}\n\n{simulation_table(self)}"


@names_own_arguments
def simulate(
    path: str | os.PathLike[str],
    operation: str = "gather",
    *,
    mesh: str | None = None,
    link: str | os.PathLike[str] | Rates | None = None,
    to: str | os.PathLike[str] | None = None,
    num_ranks: int | None = None,
    dtype: str | None = None,
    recipe: str | os.PathLike[str] | None = None,
) -> Simulation:
    """Predict the traffic of a gather, an export, a reshard or a refit, and its time.

    A refit has the ranks of the trainer and, after them, those of the engine (`xrank.take_weights`).

    Args:
        path: a checkpoint or workspace; or a layout file of a model that need not exist.
        operation: ``"gather"``, ``"export"``, ``"reshard"`` or ``"refit"``.
        mesh: replaces the mesh of a layout file; such as ``"pp=8 dp=16 tp=32"``.
        link: rates of the machine (`read_rates`); None predicts no seconds.
        to: the new layout file of a reshard, or that of a refit's engine.
        num_ranks: number of processes that share a gather or reshard; 1 if None.
        dtype: element type of a layout file's tensors; ``"bf16"`` if None.
        recipe: as for a gather; None keeps the names of a layout file.

    Raises:
        UsageError, LayoutError: the call must change.
        IncompleteError, ContradictionError, CorruptError, UnsafeError: as in the operation itself.

    Example:
        >>> import torch, xrank
        >>> workspace = xrank.NFSWorkspace("simulated", rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({}, {"weight": torch.ones(2, 3)})
        >>> found = xrank.simulate("simulated", num_ranks=2)
        >>> found.traffic.total("read_nbytes").tolist()
        [24, 0]
    """
    started = time.monotonic()
    rates = link if isinstance(link, Rates) or link is None else read_rates(link)
    work = plan_work(
        os.fspath(path),
        operation,
        mesh=mesh,
        to=to,
        num_ranks=num_ranks,
        dtype=dtype,
        recipe=recipe,
        needs_mesh=rates is not None and bool(rates.link.axes),
    )
    work = place_engine(work) if operation == "refit" else work
    options = GatherOptions(workers=_WORKERS)
    budget = Budget.from_memory(options.max_memory_nbytes, _WORKERS)
    traffic = compute_traffic(work, budget.staging_nbytes)
    prediction = None if rates is None else predict(traffic, rates, work.mesh)
    return Simulation(work, traffic, rates, prediction, budget.nbytes, time.monotonic() - started)


def compute_traffic(work: PlannedWork, staging_nbytes: int) -> ConversionTraffic:
    """Compute the traffic of planned work, with a buffer of so many bytes for each worker."""
    plan, holder, none = work.plan, work.holder, np.zeros(work.num_ranks, np.int64)
    if work.operation != "refit":
        division = divide(plan, range(len(plan.files)), work.num_ranks, holder=holder)
        rounds = count_rounds(plan, division, holder, staging_nbytes)
        compared = none if holder is None else count_compared_nbytes(plan, holder, work.num_ranks)
        return ConversionTraffic(rounds, compared, is_each_read=False)
    # One round between the two sides; a message is a run of bytes in both memories.
    assert holder is not None
    flows = []
    for number, file in enumerate(plan.files, work.num_ranks - len(plan.files)):
        for tensor in file.tensors:
            copies, width = tensor.copies, dtypes.dtype(tensor.source_dtype).nbytes
            taker, giver = np.full(len(copies), number), holder[copies.record]
            flows.append(Flow(taker, giver, copies.nests.sizes * width, count_runs(copies.nests)))
    return ConversionTraffic((build_round(none, flows),), none, is_each_read=True)


_MAX_LISTED = 16
"""Number of ranks up to which the table has a row per rank."""
_MAX_BARS = 64
"""Maximum number of bars in a chart; with more ranks, a bar is the slowest of several adjacent ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class _Column:
    """One amount of all ranks."""

    name: str
    values: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    text: Callable[[float], str]

    @property
    def total(self) -> str:
        """Text of the sum; empty for seconds, which pass at once on all ranks."""
        return "" if self.text is seconds_text else self.text(float(self.values.sum()))


def seconds_text(seconds: float) -> str:
    """Format a time: ``4.1 us``, ``96 ms``, ``12.3 s``, ``1,204 s``."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 0.9995e-3 else f"{seconds * 1e6:.3g} us"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _columns(found: Simulation) -> list[_Column]:
    """Return the amounts of each rank, without those that are 0 for all ranks."""
    traffic = found.traffic
    columns = [
        _Column("compared", traffic.compared_nbytes, size_text),
        _Column("from files", traffic.total("read_nbytes"), size_text),
        _Column("reads", traffic.total("reads"), "{:,.0f}".format),
        _Column("own memory", traffic.total("own_nbytes"), size_text),
        _Column("from others", traffic.total("taken_nbytes"), size_text),
        _Column("messages", traffic.total("messages"), "{:,.0f}".format),
        _Column("to others", traffic.total("given_nbytes"), size_text),
        _Column("written", traffic.total("written_nbytes"), size_text),
        _Column("memory", found.memory_nbytes, size_text),
    ]
    if found.prediction is not None:
        columns += [_Column(f"to {name}", found.prediction.parts[name], seconds_text) for name in PARTS]
        columns += [_Column("busy", found.prediction.busy, seconds_text)]
    return [column for column in columns if column.values.any()]


def simulation_rows(found: Simulation) -> list[tuple[str, str]]:
    """Return the labeled lines above the table."""
    work, traffic, prediction = found.work, found.traffic, found.prediction
    source = work.source
    facts = [work.path if source.format == "layout file" else f"{work.path}: {source.format}"]
    facts += [work.mesh.grid] if work.mesh is not None else []
    held = f"{plural(source.world_size, 'rank')} hold " if source.world_size is not None else ""
    facts.append(f"{held}{size_text(source.nbytes)}")
    tensors = len({tensor.output.name for tensor in work.plan.tensors})
    made = f"{plural(tensors, 'tensor')}, {plural(len(work.plan.files), 'file')}, {size_text(work.plan.nbytes)}"
    rows = [
        ("source", one_line("; ".join(facts))),
        (work.operation, f"{made}, by {plural(work.num_ranks, 'rank')}; every element exactly once"),
    ]
    if prediction is None:
        rows.append(("seconds", "not predicted: no rates were given"))
    else:
        parts = [f"{seconds_text(prediction.start_seconds)} to start"] if prediction.start_seconds else []
        compare = float(prediction.parts["compare"].max())
        parts += [f"{seconds_text(compare)} to compare replicas"] if compare else []
        left = prediction.seconds - prediction.start_seconds - compare
        parts.append(f"{seconds_text(left)} in {plural(len(traffic.rounds), 'round')}")
        slowest = f"; rank {int(prediction.busy.argmax())} is busiest" if work.num_ranks > 1 else ""
        rows += [
            ("seconds", f"{seconds_text(prediction.seconds)}: {', '.join(parts)}{slowest}"),
            *(("assumed", text) for text in ASSUMED),
        ]
    if not traffic.is_each_read:
        counted = "reads cover whole windows, so messages and the bytes between wanted ones are estimates"
        rows.append(("counted", counted))
    return rows


def simulation_table(found: Simulation) -> str:
    """Return the table: a row per rank, or for many ranks a row per amount with its least, median and most."""
    columns = _columns(found)
    if found.work.num_ranks <= _MAX_LISTED:
        heads = ["rank", *(column.name for column in columns)]
        rows = [
            [str(rank), *(column.text(float(column.values[rank])) for column in columns)]
            for rank in range(found.work.num_ranks)
        ]
        if len(rows) > 1:
            rows.append(["all", *(column.total for column in columns)])
        return _align([heads, *rows])
    return _align([["", "least", "median", "most", "of rank", "all"], *_spread(columns)])


def _spread(columns: Sequence[_Column]) -> list[list[str]]:
    return [
        [
            column.name,
            column.text(float(column.values.min())),
            column.text(float(np.median(column.values))),
            column.text(float(column.values.max())),
            str(int(column.values.argmax())),
            column.total,
        ]
        for column in columns
    ]


def _align(rows: Sequence[Sequence[str]]) -> str:
    """Align the first column left and the others right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        [text.rjust(width) if i else text.ljust(width) for i, (text, width) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def simulation_html(found: Simulation) -> str:
    """Return the HTML page: facts, a chart of seconds, a chart of bytes, and the table."""
    work = found.work
    notes = [("note", message) for _, message in work.notes]
    body = [f"<h1>{page_text(f'{work.operation} of {work.path}')}</h1>", "<table>"]
    body += [f"<tr><th>{page_text(k)}<td>{page_text(v)}" for k, v in (*simulation_rows(found), *notes)]
    body += ["</table>"]
    if found.prediction is not None:
        parts = [found.prediction.parts[name] for name in PARTS]
        body += ["<h2>Seconds of each rank</h2>", *_chart(PARTS, parts, seconds_text)]
    traffic = found.traffic
    names = ("compared", "from files", "own memory", "from others", "written")
    amounts = [traffic.compared_nbytes]
    amounts += [traffic.total(name) for name in ("read_nbytes", "own_nbytes", "taken_nbytes", "written_nbytes")]
    body += ["<h2>Bytes of each rank</h2>", *_chart(names, amounts, size_text)]
    columns = _columns(found)
    body += ["<h2>All ranks</h2><table><tr><th><th>least<th>median<th>most<th>of rank<th>all"]
    for row in _spread(columns):
        body.append(f"<tr><th>{page_text(row[0])}" + "".join(f'<td class="number">{page_text(t)}' for t in row[1:]))
    return page(f"{work.operation} of {work.path}", [*body, "</table>"])


def _chart(
    names: Sequence[str], parts: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float64]], text: Callable[[float], str]
) -> Iterator[str]:
    """Yield a bar per rank, or for the slowest of several adjacent ranks, without parts that are 0 everywhere."""
    shown = [(name, part.astype(np.float64)) for name, part in zip(names, parts, strict=True) if part.any()]
    total = sum((part for _, part in shown), np.zeros(len(parts[0])))
    step = -(-len(total) // _MAX_BARS)
    bars = []
    for low in range(0, len(total), step):
        high = min(low + step, len(total))
        rank = low + int(total[low:high].argmax())
        label = f"rank {rank}" if step == 1 else f"rank {rank}, most of {low}-{high - 1}"
        bars.append(Bar(label, tuple(float(part[rank]) for _, part in shown), text(float(total[rank]))))
    yield from draw_stacked_bars([name for name, _ in shown], bars)


_AMOUNTS = ("read_nbytes", "reads", "own_nbytes", "taken_nbytes", "given_nbytes", "messages", "written_nbytes")
"""Reported amounts of each rank: arrays of `RoundTraffic`."""


def simulation_report(found: Simulation) -> Report:
    """Convert a simulation to a report."""
    work, traffic, prediction = found.work, found.traffic, found.prediction
    outputs = [tensor.output for tensor in work.plan.tensors]
    columns = {name: traffic.total(name) for name in _AMOUNTS}
    columns["compared_nbytes"] = traffic.compared_nbytes
    columns["memory_nbytes"] = found.memory_nbytes
    seconds = {} if prediction is None else {name: prediction.parts[name] for name in PARTS}
    rows = [
        {
            "rank": rank,
            **{name: int(column[rank]) for name, column in columns.items()},
            **({"seconds": {name: round(float(part[rank]), 6) for name, part in seconds.items()}} if seconds else {}),
        }
        for rank in range(work.num_ranks)
    ]
    details = SimulationDetails(
        operation=work.operation,
        num_ranks=work.num_ranks,
        mesh=None if work.mesh is None else work.mesh.grid,
        num_rounds=len(traffic.rounds),
        is_each_read=traffic.is_each_read,
        rates=None if found.rates is None else found.rates.to_dict(),
        prediction=None
        if prediction is None
        else {
            "seconds": round(prediction.seconds, 6),
            "start_seconds": prediction.start_seconds,
            "slowest_rank": int(prediction.busy.argmax()),
            "assumed": list(ASSUMED),
        },
        totals={name: int(column.sum()) for name, column in columns.items()},
        ranks=rows,
    )
    return Report(
        command="simulate",
        path=work.path,
        seconds=found.seconds,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=source_facts(work.source),
        proof=ProofFacts(coverage="proven"),
        plan=OutputFacts(
            num_tensors=len({output.name for output in outputs}),
            num_parameters=sum(output.num_elements for output in outputs),
            nbytes=sum(output.nbytes for output in outputs),
            num_files=len(work.plan.files),
            files_nbytes=work.plan.nbytes,
        ),
        notes=work.notes,
        details=details,
    )
