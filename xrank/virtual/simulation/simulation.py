"""Simulates a conversion: its real plan, its traffic and its time at given rates, with a table and an HTML page."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrank.engine.executor import Budget
from xrank.engine.report import OutputFacts, ProofFacts, Report, SimulationDetails, source_facts
from xrank.engine.rounds import divide
from xrank.errors import names_own_arguments
from xrank.layout.nest_table import IntArray
from xrank.pictures.picture import Bar, draw_stacked_bars, page, page_text
from xrank.recipes.options import GatherOptions
from xrank.system import peak_rss_nbytes
from xrank.virtual.simulation.traffic import (
    ASSUMED,
    PARTS,
    ConversionTraffic,
    Prediction,
    Rates,
    count_compared_nbytes,
    count_rounds,
    predict,
    read_rates,
)
from xrank.virtual.simulation.work import PlannedWork, count_refit, place_engine, plan_work
from xrank.words import one_line, plural, size_text

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
        from xrank.engine.report import align_rows

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
    plan, holder = work.plan, work.holder
    if work.operation == "refit":
        return count_refit(work)
    division = divide(plan, range(len(plan.files)), work.num_ranks, holder=holder)
    rounds = count_rounds(plan, division, holder, staging_nbytes)
    compared = np.zeros(work.num_ranks, np.int64)
    if holder is not None:
        compared = count_compared_nbytes(plan, holder, work.num_ranks)
    return ConversionTraffic(rounds, compared, is_each_read=False)


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
    """Return the labelled lines above the table."""
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
        counted = "reads of whole windows: messages are estimated, and so are bytes that lie between wanted ones"
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
            rows.append(["all", *_sums(columns)])
        return _align([heads, *rows])
    return _align([["", "least", "median", "most", "of rank", "all"], *_spread(columns)])


def _sums(columns: Sequence[_Column]) -> list[str]:
    return ["" if column.text is seconds_text else column.text(float(column.values.sum())) for column in columns]


def _spread(columns: Sequence[_Column]) -> list[list[str]]:
    return [
        [
            column.name,
            column.text(float(column.values.min())),
            column.text(float(np.median(column.values))),
            column.text(float(column.values.max())),
            str(int(column.values.argmax())),
            total,
        ]
        for column, total in zip(columns, _sums(columns), strict=True)
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
