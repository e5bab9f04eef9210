"""``xrank simulate``: predicts bytes, messages, seconds and memory of a conversion over hypothetical ranks."""

from __future__ import annotations

from typing import Any

import click

from xrank.cli import options
from xrank.cli.command import Output, reporting
from xrank.cli.help import Command
from xrank.cli.options import PATH


@click.command(
    "simulate",
    cls=Command,
    short_help="Predict bytes, messages, seconds and memory of each rank.",
    examples=["simulate checkpoint-2000", "simulate layout.toml --operation export --mesh 'pp=8 dp=16'"],
)
@click.argument("path", metavar="PATH|FILE", type=PATH)
@click.option(
    "--operation",
    default="gather",
    metavar="gather|export|reshard|refit",
    show_default=True,
    help="Conversion to predict.",
    shell_complete=options.completing(lambda: ("gather", "export", "reshard", "refit")),
)
@click.option("--mesh", metavar="TEXT", help='Mesh of ranks, such as "pp=8 dp=16 tp=32", instead of FILE\'s mesh.')
@click.option(
    "--link",
    metavar="TEXT|FILE",
    help='Rates: "read=2GB/s write=1GB/s memory=8GB/s bandwidth=25GB/s latency=5us dp.bandwidth=10GB/s start=1s", or a '
    "TOML file with these keys. Without rates, no seconds are predicted.",
)
@click.option("--to", type=PATH, metavar="FILE", help="File of the new layout, for a reshard or refit.")
@click.option(
    "--ranks",
    "num_ranks",
    type=int,
    metavar="N",
    help="Number of processes that share a gather or reshard.  [default: 1]",
)
@options.dtype("bf16", "fp16", "fp32", text="Element type of FILE's tensors.  [default: bf16]")
@options.recipe("Recipe, as for a gather.  [default: the names of FILE stay]", "none")
@click.option("--html", type=PATH, metavar="FILE", help="Write a self-contained HTML page with charts.")
@reporting
def simulate_command(output: Output, path: str, operation: str, html: str | None, **arguments: Any) -> None:
    """Predict the bytes, messages, memory and seconds of a conversion from its real plan.

    PATH is a checkpoint or a workspace. FILE is a layout file; its ranks need not exist, and only tensors with sizes in
    FILE are counted. No tensor is read. An export runs on the ranks that hold the model; a refit runs on these and on
    an engine's ranks, which are numbered after them.
    """
    from xrank.virtual.simulation.simulation import (
        simulate,
        simulation_html,
        simulation_report,
        simulation_rows,
        simulation_table,
    )

    found = simulate(path, operation, **arguments)
    report = simulation_report(found)
    if html is not None:
        from xrank.commands.layout import write_page

        report = write_page(report, simulation_html(found), html)
        output.report(report, [*simulation_rows(found), ("wrote", str(report.path))])
        return
    output.report(report, simulation_rows(found), simulation_table(found))
