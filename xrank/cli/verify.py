"""``xrank verify``: reads every byte of a model or checkpoint and compares it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from xrank.cli import options
from xrank.cli.command import Output, report_shared, reporting, sharing
from xrank.cli.help import Command
from xrank.cli.options import PATH
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report


@click.command(
    "verify",
    cls=Command,
    short_help="Read every byte and compare digests, checksums and replicas.",
    examples=[
        *("verify model", "verify checkpoint-2000 --against model", "verify model --public-key key.pub"),
    ],
)
@click.argument("path", type=PATH)
@click.option("--against", type=PATH, metavar="PATH2", help="Compare with this model or checkpoint, value by value.")
@options.layout("a checkpoint")
@options.base_model("the names and shapes that PATH must have; fills in unrecorded shapes.")
@options.recipe("The recipe that the gather used.")
@options.part("PATH")
@options.world_size("PATH")
@click.option("--adapter-config", type=PATH, metavar="FILE", help="The adapter_config.json that the gather used.")
@click.option("--signature", type=PATH, metavar="FILE", help="Compare with this signature.  [default: PATH/model.sig]")
@click.option("--public-key", type=PATH, metavar="KEY", help="Public key (PEM) of the signature.")
@options.max_memory
@options.workers
@options.allow_http
@sharing
@reporting
def verify_command(
    output: Output,
    path: str,
    against: str | None,
    layout: str | None,
    timeout: float,
    distributed: bool,
    **arguments: Any,
) -> None:
    """Verify a model against its manifest, or a checkpoint against its checksums and its own proof.

    Ranks that torchrun, srun or mpirun started share the reading; rank 0 reports.
    """
    from xrank.commands.verify import verify_model

    def convert(**shared: Any) -> Report:
        report = verify_model(path, against=against, layouts=layout, **arguments, **shared)
        if report.fault is not None:
            output.fail(report.fault, report)
        return report

    report_shared(output, convert, partial(_rows, against=against), timeout=timeout, distributed=distributed)


def _rows(report: Report, against: str | None) -> list[tuple[str, str]]:
    if report.proof.signature is not None:
        counts = f"{plural(report.made.num_files, 'file')}, {size_text(report.made.files_nbytes)}"
        return [("ok", f"{counts}: every byte as signed in {report.proof.signature}")]
    counts = f"{plural(report.num_tensors, 'tensor')}, {size_text(report.nbytes)}"
    if against is not None:
        fact = f"every value as in {against}"
    elif report.proof.manifest is not None:
        fact = f"every digest as in {report.proof.manifest}"
    else:
        replicas = report.proof.num_replicas_compared
        fact = f"every element exactly once; {plural(report.proof.num_checksums, 'checksum')} good"
        fact += f"; {plural(replicas, 'replica')} equal" if replicas else ""
        states = report.proof.num_optimizer_tensors
        fact += f"; {plural(states, 'tensor')} of the optimizer, too" if states else ""
    if report.proof.base_model:
        fact += f"; {report.proof.base_model} as in the base model"
    return [("ok", f"{counts}: {fact}")]
