"""``xrank layout``: shows, compares and proves layouts."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import click

from xrank.cli import options
from xrank.cli.command import Output, reporting
from xrank.cli.help import CommandGroup
from xrank.cli.options import PATH
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report
    from xrank.layout.layout_map import LayoutChange, LayoutDiff


@click.group(cls=CommandGroup, short_help="Show, compare and prove layouts.", examples=["layout show demo/workspace"])
def layout_command() -> None:
    """Show, compare and prove which rank holds which part of each tensor."""


@layout_command.command(
    short_help="Show which rank holds which part.",
    examples=["layout show demo/workspace --tensor '.*norm.*'", "layout show model.toml --html layout.html"],
)
@click.argument("path", metavar="PATH|FILE", type=PATH)
@click.option("--tensor", metavar="REGEX", help="Show only tensors whose whole name matches.")
@click.option("--html", type=PATH, metavar="FILE", help="Write a self-contained HTML page.")
@click.option("--toml", is_flag=True, help="Print a layout file instead of the picture.")
@reporting
def show(output: Output, path: str, tensor: str | None, html: str | None, toml: bool) -> None:
    """Show which rank holds which part of each tensor, from metadata alone.

    PATH is a workspace or a model folder. FILE is a layout file; only tensors with sizes in FILE are drawn.
    """
    from xrank.commands.layout import show_layouts, write_page

    report, found, text = show_layouts(path, tensor=tensor, toml=toml)
    if html is not None:
        from xrank.pictures import survey_html

        report = write_page(report, survey_html(found), html)
        if not toml:
            rows = [("wrote", f"{report.path}: {plural(len(found.tensors), 'tensor')}")]
            output.report(report, rows)
            return
    if text is None:
        from xrank.pictures import survey_text

        text = survey_text(found, width=_width())
    output.report(report, picture=text)


@layout_command.command(
    short_help="List the differences between two layouts.", examples=["layout diff old.toml new.toml --exit-code"]
)
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
@click.option("--exit-code", is_flag=True, help="Exit with 4 if there are differences, for scripts.")
@reporting
def diff(output: Output, a: str, b: str, exit_code: bool) -> None:
    """List the differences of the layouts at A and B, which are layout files or sources with recorded layouts."""
    from xrank.commands.layout import diff_layouts
    from xrank.errors import ContradictionError

    report, found = diff_layouts(a, b)
    if found and exit_code:
        rows = _diff_rows(found)
        first = f"{rows[0][0]} {rows[0][1]}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else "")
        output.fail(
            ContradictionError(f"the layouts at {a} and {b} differ", file=b, got=first, want=f"those at {a}"), report
        )
    output.report(report, _diff_rows(found) or [("equal", "no differences")])


@layout_command.command(short_help="Prove the layouts in a file.", examples=["layout check new.toml demo/workspace"])
@click.argument("file", metavar="FILE", type=PATH)
@click.argument("path", metavar="[PATH]", required=False, type=PATH)
@options.base_model("the global shapes that PATH and FILE do not contain.")
@reporting
def check(output: Output, file: str, path: str | None, base_model: str | None) -> None:
    """Prove that the layouts in FILE hold every element of every tensor exactly once per replica.

    PATH, a workspace or a model folder, gives names and shapes. Without it, only tensors with sizes in FILE are proven.
    """
    from xrank.commands.layout import check_file

    report = check_file(file, path, base_model=base_model)
    if report.fault is not None:
        output.fail(report.fault, report)
    output.report(report, _check_rows(report))


@layout_command.command(
    short_help="Record the layout of an inference engine.",
    examples=["layout record --engine vllm --model model --tp 8 --toml engine.toml"],
)
@click.option("--engine", required=True, metavar="vllm", help="Engine whose own loader shows the layout.")
@click.option("--model", required=True, type=PATH, metavar="DIR", help="Model folder; no weights are read.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Number of tensor parallel ranks.")
@click.option("--pp", type=click.IntRange(1), default=1, show_default=True, help="Number of pipeline stages.")
@click.option("--ep", is_flag=True, help="Distribute the experts over the tensor parallel ranks.")
@click.option("--toml", "out", required=True, type=PATH, metavar="FILE", help="Layout file to write.")
@reporting
def record(output: Output, engine: str, model: str, out: str, tp: int, pp: int, ep: bool) -> None:
    """Record which part of each tensor each rank of an engine loads, without starting it.

    The engine must be installed; no device and no weights are needed.
    """
    from xrank.commands.layout import record_engine_layout

    report = record_engine_layout(engine, model, out, tp=tp, pp=pp, ep=ep)
    ranks = plural(report.source["world_size"], "rank")
    rows = [("engine", f"{engine}, {ranks}"), ("wrote", f"{out}: {plural(report.details['num_rules'], 'rule')}")]
    output.report(report, rows)


def _width() -> int:
    stream = sys.stdout
    return shutil.get_terminal_size((100, 24)).columns if stream is not None and stream.isatty() else 120


def _check_rows(report: Report) -> list[tuple[str, str]]:
    counts = f"{plural(report.num_tensors, 'tensor')}, every element exactly once per replica"
    rows = [("ok", f"{counts}; {plural(report.proof.num_rules, 'rule')} in {report.path}")]
    held = [row["nbytes"] for row in report.details["ranks"]]
    if any(held):
        low, high = size_text(min(held)), size_text(max(held))
        rows.append(("ranks", f"{plural(len(held), 'rank')}, {low if low == high else f'{low} to {high}'} each"))
    return rows


def _diff_rows(found: LayoutDiff) -> list[tuple[str, str]]:
    def rows(label: str, changes: tuple[LayoutChange, ...]) -> list[tuple[str, str]]:
        return [(label, str(change)) for change in changes]

    return [
        *rows("mesh", found.mesh),
        *rows("size", found.sizes),
        *(("removed", f"{change.name}: {change.old}") for change in found.removed),
        *(("added", f"{change.name}: {change.new}") for change in found.added),
        *rows("changed", found.changed),
        *rows("alias", found.aliases),
    ]
