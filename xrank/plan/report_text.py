"""A report as text and as HTML, for people who work in Python and in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from xrank.plan.report import Report
from xrank.words import one_line, plural, size_text

Row = tuple[str, str]


def report_rows(report: Report) -> list[Row]:
    """Return a report as rows of a label and a text: its state, the source, the proof, the output, notes, the fault."""
    rows = [(report.command, f"{report.status}, {report.seconds:.1f} s" + (f": {report.path}" if report.path else ""))]
    rows += [*_source_rows(report), *_proof_rows(report), *_made_rows(report)]
    for name, value in report.details.items():
        if isinstance(value, list | tuple) and value:
            rows.append((name, f"{len(value):,}"))
    rows += [("note", str(message)) for _, message in report.notes]
    if report.fault is not None:
        rows.append((type(report.fault).__name__, str(report.fault)))
        rows += [(label, str(text)) for label, text in _remedies(report) if text]
    return rows


def _source_rows(report: Report) -> list[Row]:
    source = report.source
    if source.format is None:
        return []
    ranks = f", by {plural(source.world_size, 'rank')}" if source.world_size else ""
    step = f", step {source.step}" if source.step is not None else ""
    recipe = f", named by the recipe {source.recipe}" if source.recipe else ""
    left_out = f", {size_text(source.skipped_nbytes)} left out" if source.skipped_nbytes else ""
    return [("source", f"{source.format}{ranks}{step}, {size_text(source.nbytes)}{left_out}{recipe}")]


def _proof_rows(report: Report) -> list[Row]:
    proof = report.proof
    facts = ["every element exactly once"] if proof.coverage == "proven" else []
    counts = ((proof.num_checksums, "checksum", "good"), (proof.num_digests, "digest", "good"))
    facts += [f"{plural(count, noun)} {state}" for count, noun, state in counts if count]
    if proof.num_replicas_compared:
        facts.append(f"{plural(proof.num_replicas_compared, 'replica')} equal")
    if proof.base_model:
        facts.append(f"{proof.base_model} as in the base model")
    return [("proof", "; ".join(facts))] if facts else []


def _made_rows(report: Report) -> list[Row]:
    made = report.made
    if not made.num_tensors:
        return []
    label = "plan" if report.output is None else "output"
    files = f" in {plural(len(made.files), 'file')}" if made.files else ""
    counts = (
        f"{plural(made.num_tensors, 'tensor')}, {made.num_parameters:,} parameters, {size_text(made.nbytes)}{files}"
    )
    return [(label, counts)]


def _remedies(report: Report) -> list[tuple[str, object]]:
    fault = report.fault
    return [] if fault is None else [("got", fault.got), ("want", fault.want), ("try", fault.next_step)]


def align_rows(rows: Sequence[Row]) -> str:
    """Return rows as lines, the texts in one column."""
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{label:<{width}}  {one_line(text)}" for label, text in rows)


def report_html(report: Report) -> str:
    """Return a report as a table of a notebook, in the notebook's own colours."""
    rows = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in report_rows(report))
    style = "text-align: left; vertical-align: top"
    return f'<table class="xrank-report" style="{style}">{"".join(rows)}</table>'.replace(
        "<td>", f'<td style="{style}">'
    )
