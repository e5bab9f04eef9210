"""Displays of a simulation: a table for the terminal, and an HTML page with charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from xrank.engine.report import OutputFacts, ProofFacts, Report, SimulationDetails, source_facts
from xrank.pictures.page import Bar, draw_stacked_bars, page, page_text
from xrank.system import peak_rss_nbytes
from xrank.virtual.simulation.rates import ASSUMED, PARTS
from xrank.virtual.simulation.simulation import Simulation
from xrank.words import one_line, plural, size_text

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


def _count_text(count: float) -> str:
    return f"{count:,.0f}"


def _columns(found: Simulation) -> list[_Column]:
    """Return the amounts of each rank, without those that are 0 for all ranks."""
    traffic = found.traffic
    columns = [
        _Column("compared", traffic.compared_nbytes, size_text),
        _Column("from files", traffic.total("read_nbytes"), size_text),
        _Column("reads", traffic.total("reads"), _count_text),
        _Column("own memory", traffic.total("own_nbytes"), size_text),
        _Column("from others", traffic.total("taken_nbytes"), size_text),
        _Column("messages", traffic.total("messages"), _count_text),
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
    body = [f"<h1>{page_text(f'{work.operation} of {work.path}')}</h1>", "<table>"]
    body += [f"<tr><th>{page_text(k)}<td>{page_text(v)}" for k, v in (*simulation_rows(found), *_note_rows(found))]
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


def _note_rows(found: Simulation) -> list[tuple[str, str]]:
    return [("note", message) for _, message in found.work.notes]


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
