"""``xrank verify``: reads every byte of a model or checkpoint and compares it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli.command import Output, reporting
from xrank.cli.paths import PATH
from xrank.cli.sharing import report_shared, sharing
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.plan.report import Report

__all__ = ["verify_command"]


@click.command("verify", short_help="Read every byte and compare digests, checksums and replicas.")
@click.argument("path", type=PATH)
@click.option("--against", type=PATH, metavar="PATH2", help="Compare with this model or checkpoint, value by value.")
@click.option("--layout", type=PATH, metavar="FILE", help="Layout file for a checkpoint without recorded layouts.")
@click.option(
    "--base-model",
    metavar="DIR|ID",
    help="Model folder or cached ID with the names and shapes that PATH must have; fills in unrecorded shapes.",
)
@click.option("--recipe", metavar="NAME|FILE", help="The recipe that the gather was run with.")
@click.option("--part", metavar="NAME", help="Part to read, if PATH has several, such as model and ema.")
@click.option(
    "--world-size", type=click.IntRange(1), metavar="N", help="Number of ranks that wrote PATH, if it records none."
)
@click.option(
    "--adapter-config",
    type=PATH,
    metavar="FILE",
    help="The adapter_config.json that the gather was run with.",
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
@sharing
@reporting
def verify_command(
    output: Output,
    path: str,
    against: str | None,
    layout: str | None,
    timeout: float,
    distributed: bool,
    **options: Any,
) -> None:
    """Verify a model against its manifest, or a checkpoint against its checksums and its own proof.

    Ranks that torchrun, srun or mpirun started share the reading; rank 0 reports.
    """
    from xrank.conversion.verify import verify_model

    def convert(**shared: Any) -> Report:
        report = verify_model(path, against=against, layouts=layout, **options, **shared)
        if report.fault is not None:
            output.fail(report.fault, report)
        return report

    report_shared(output, convert, partial(_rows, against=against), timeout=timeout, distributed=distributed)


def _rows(report: Report, against: str | None) -> list[tuple[str, str]]:
    counts = f"{plural(report.num_tensors, 'tensor')}, {size_text(report.nbytes)}"
    if against is not None:
        fact = f"every value as in {against}"
    elif report.proof.manifest is not None:
        fact = f"every digest as in {report.proof.manifest}"
    else:
        replicas = report.proof.num_replicas_compared
        fact = f"every element exactly once; {plural(report.proof.num_checksums, 'checksum')} good"
        fact += f"; {plural(replicas, 'replica')} equal" if replicas else ""
    if report.proof.base_model:
        fact += f"; {report.proof.base_model} as in the base model"
    return [("ok", f"{counts}: {fact}")]
