"""``xrank reshard``: writes a checkpoint as the states of ranks in another layout."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli import options
from xrank.cli.command import Output, report_shared, reporting, sharing
from xrank.cli.gather import output_rows, proof_row, source_row
from xrank.cli.help import Command
from xrank.cli.options import PATH
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report


@click.command(
    cls=Command,
    short_help="Write a workspace or model folder in another layout.",
    examples=["reshard demo/workspace --layout new.toml -o resharded"],
)
@click.argument("source", metavar="SRC", type=PATH)
@click.option("--layout", "layouts", required=True, type=PATH, metavar="FILE", help="File of the new layout.")
@options.out("Output workspace; it appears by one rename.")
@options.recipe("Recipe that renames and splits tensors, in either direction.  [default: the names stay]")
@options.base_model("the companions and config.json to copy.")
@options.part("SRC")
@options.world_size("SRC")
@options.dtype("keep", "bf16", "fp16", "fp32", default="keep")
@options.max_memory
@options.workers
@click.option("--overwrite", is_flag=True, help="Replace an output of xrank; old or new is visible, never a mixture.")
@options.allow_http
@options.dry_run
@sharing
@reporting
def reshard_command(
    output: Output, source: str, layouts: str, timeout: float, distributed: bool, **arguments: Any
) -> None:
    """Write SRC, a workspace or any other checkpoint, as the states of ranks in another layout.

    After an interruption the same command resumes. Ranks that torchrun, srun or mpirun started share
    the work; rank 0 reports.
    """
    from xrank.commands.reshard import reshard_checkpoint

    convert = partial(reshard_checkpoint, source, layouts, arguments.pop("out"), **arguments)
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
    if "made-before" in dict(report.notes):
        return [*rows, ("found", f"{report.path}: {states}; see the note")]
    speed = size_text(report.nbytes / max(report.seconds, 1e-9))
    resumed = f", {size_text(made.resumed_nbytes)} of it by an earlier run" if made.resumed_nbytes else ""
    companions = f"; with {', '.join(made.companions)}" if made.companions else ""
    memory = size_text(report.peak_rss_nbytes)
    wrote = f"{report.path}: {states}{resumed}, {speed}/s, peak memory {memory}{companions}"
    return [*rows, ("wrote", wrote)]
