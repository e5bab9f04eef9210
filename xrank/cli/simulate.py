"""``xrank simulate``: what a conversion would move, and how long it would take, over ranks no one has."""

from __future__ import annotations

from typing import Any

import click

from xrank.cli.command import Output, reporting
from xrank.cli.paths import PATH
from xrank.cli.text import rows_text

__all__ = ["simulate_command"]


@click.command("simulate", short_help="Predict bytes, messages, seconds and memory of each rank.")
@click.argument("path", metavar="PATH|FILE", type=PATH)
@click.option("--operation", default="gather", metavar="gather|export|reshard", show_default=True, help="What to do.")
@click.option("--mesh", metavar="TEXT", help='The ranks, such as "pp=8 dp=16 tp=32", in place of FILE\'s.')
@click.option(
    "--link",
    metavar="TEXT|FILE",
    help='Rates: "read=2GB/s write=1GB/s memory=8GB/s bandwidth=25GB/s latency=5us dp.bandwidth=10GB/s start=1s", or a '
    "TOML file that says them. Without it no seconds are told.",
)
@click.option("--to", type=PATH, metavar="FILE", help="The new layout, of a reshard.")
@click.option(
    "--ranks", "num_ranks", type=int, metavar="N", help="Processes that share a gather or reshard.  [default: 1]"
)
@click.option("--dtype", metavar="bf16|fp16|fp32", help="Element type of FILE's tensors.  [default: bf16]")
@click.option(
    "--recipe", metavar="NAME|FILE|none", help="As for a gather; by default the names of FILE stay as they are."
)
@click.option("--html", type=PATH, metavar="FILE", help="Write one page with charts, which needs no other.")
@reporting
def simulate_command(output: Output, path: str, operation: str, html: str | None, **options: Any) -> None:
    """Predict what a gather, an export or a reshard reads, exchanges, writes and takes, from its real plan.

    PATH is a checkpoint or a workspace; FILE is a layout file, whose ranks nobody need have, and of which those tensors
    count whose sizes it tells. No byte of a tensor is read. An export is made by the ranks that hold the model.
    """
    from xrank.simulation.display import simulation_html, simulation_rows, simulation_table
    from xrank.simulation.report import simulation_report
    from xrank.simulation.simulation import simulate

    found = simulate(path, operation, **options)
    report = simulation_report(found)
    if html is not None:
        from xrank.conversion.layout_show import write_page

        report = write_page(report, simulation_html(found), html)
        output.report(report, [*simulation_rows(found), ("wrote", str(report.path))])
        return
    output.picture(report, f"{rows_text(simulation_rows(found))}\n\n{simulation_table(found)}")
