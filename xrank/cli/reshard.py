"""``xrank reshard``: writes a checkpoint as the states of ranks in another layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli.command import Output, reporting
from xrank.cli.gather import output_rows, proof_row, source_row
from xrank.cli.paths import PATH
from xrank.cli.sharing import report_shared, sharing
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.plan.report import Report

__all__ = ["reshard"]


@click.command(short_help="Write a workspace or model folder in another layout.")
@click.argument("source", metavar="SRC", type=PATH)
@click.option("--layout", "layouts", required=True, type=PATH, metavar="FILE", help="File of the new layout.")
@click.option("--out", required=True, type=PATH, metavar="DIR", help="Output workspace; it appears by one rename.")
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    help="Recipe that renames and splits tensors, in either direction.  [default: the names stay]",
)
@click.option(
    "--base-model", metavar="DIR|ID", help="Model folder or cached ID with the companions and config.json to copy."
)
@click.option("--part", metavar="NAME", help="Part to read, if SRC has several, such as model and ema.")
@click.option(
    "--world-size", type=click.IntRange(1), metavar="N", help="Number of ranks that wrote SRC, if it records none."
)
@click.option(
    "--dtype",
    default="keep",
    metavar="keep|bf16|fp16|fp32",
    show_default=True,
    help="Element type of floating-point tensors.",
)
@click.option(
    "--max-memory",
    default="64MB",
    metavar="SIZE",
    envvar="XRANK_MAX_MEMORY",
    show_default=True,
    help="Upper bound of all buffers, such as 512MB.",
)
@click.option(
    "--workers",
    type=int,
    metavar="N",
    envvar="XRANK_WORKERS",
    help="Number of worker threads.  [default: min(4, cores)]",
)
@click.option("--overwrite", is_flag=True, help="Replace an output of xrank; old or new is visible, never a mixture.")
@click.option("--dry-run", is_flag=True, help="Prove and plan without writing.")
@sharing
@reporting
def reshard(output: Output, source: str, layouts: str, timeout: float, distributed: bool, **options: Any) -> None:
    """Write SRC, a workspace or any other checkpoint, as the states of ranks in another layout.

    After an interruption the same command resumes. Ranks that torchrun, srun or mpirun started share
    the work; rank 0 reports.
    """
    from xrank.conversion.reshard import reshard_checkpoint

    convert = partial(reshard_checkpoint, source, layouts, options.pop("out"), **options)
    report_shared(output, convert, _rows, timeout=timeout, distributed=distributed)


def _rows(report: Report) -> list[tuple[str, str]]:
    made = report.made
    rows = [source_row(report), proof_row(report), ("layout", f"{made.mesh}; run {made.run_id}")]
    rows += output_rows(made, "whose bytes they share")
    files = made.files
    sizes = sorted(file.nbytes for file in files)
    share = size_text(sizes[0]) if sizes[0] == sizes[-1] else f"{size_text(sizes[0])} to {size_text(sizes[-1])}"
    states = f"{plural(len(files), 'state')} of {share}"
    if report.output is None:
        buffers = size_text(made.peak_buffer_nbytes)
        rows.append(("plan", f"{report.path}: {states}, {buffers} of buffers; nothing was written"))
        rows += [
            ("file", f"{file.name}: {size_text(file.nbytes)}, {plural(file.num_tensors, 'tensor')}") for file in files
        ]
        return rows
    speed = size_text(report.nbytes / max(report.seconds, 1e-9))
    resumed = f", {size_text(made.resumed_nbytes)} of it by an earlier run" if made.resumed_nbytes else ""
    companions = f"; with {', '.join(made.companions)}" if made.companions else ""
    memory = size_text(report.peak_rss_nbytes)
    wrote = f"{report.path}: {states}{resumed}, {speed}/s, peak memory {memory}{companions}"
    return [*rows, ("wrote", wrote)]
