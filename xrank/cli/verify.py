"""``xrank verify``: reads every byte and says whether all is as it must be."""

from __future__ import annotations

import click

from xrank.cli.command import Output, reporting
from xrank.cli.text import plural, size_text

__all__ = ["verify_command"]


@click.command("verify", short_help="Read every byte and compare.")
@click.argument("path", type=click.Path())
@click.option(
    "--against", type=click.Path(), metavar="PATH2", help="Compare with this model or checkpoint, value by value."
)
@click.option(
    "--max-memory",
    default="64MB",
    metavar="SIZE",
    envvar="XRANK_MAX_MEMORY",
    show_default=True,
    help="Bytes of all buffers.",
)
@click.option("--workers", type=int, metavar="N", envvar="XRANK_WORKERS", help="Threads.  [default: min(4, cores)]")
@reporting
def verify_command(output: Output, path: str, against: str | None, max_memory: str, workers: int | None) -> None:
    """Verify a model against its manifest, or a checkpoint against its checksums and its own proof."""
    from xrank.conversion.verify import verify

    report, error = verify(path, against=against, max_memory=max_memory, workers=workers)
    if error is not None:
        output.fail(error, report)
    counts = f"{plural(report.num_tensors, 'tensor')}, {size_text(report.nbytes)}"
    if against is not None:
        fact = f"every value as in {against}"
    elif "manifest" in report.proof:
        fact = f"every digest as in {report.proof['manifest']}"
    else:
        replicas = report.proof["num_replicas_compared"]
        fact = f"every element exactly once; {plural(report.proof['num_checksums'], 'checksum')} good"
        fact += f"; {plural(replicas, 'replica')} equal" if replicas else ""
    output.report(report, [("ok", f"{counts}: {fact}")])
