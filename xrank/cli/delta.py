"""``xrank delta``: versions of a model as what has changed from one to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from xrank.cli import options
from xrank.cli.command import Output, following_progress, reporting
from xrank.cli.help import CommandGroup
from xrank.cli.options import PATH
from xrank.words import plural, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report


@click.group(
    cls=CommandGroup,
    short_help="Write and apply what has changed between versions of a model.",
    examples=["delta make step-1 step-2 -o deltas/weight_v000002"],
)
def delta_command() -> None:
    """Write and apply what has changed between versions of a model, in the folders that SGLang and slime share."""


def _complete(words: tuple[str, ...]) -> Any:
    return options.completing(lambda: words)


_out = click.option(
    "-o", "--out", required=True, type=PATH, metavar="DIR", help="Folder of the version, weight_v and six digits."
)
_max_shard_size = click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Bytes of changes in a file."
)
_overwrite = click.option("--overwrite", is_flag=True, help="Replace an existing version.")


@delta_command.command(
    short_help="Write what has changed from one model to another.",
    examples=["delta make step-1 step-2 -o deltas/weight_v000002", "delta make model checkpoint -o weight_v000001"],
)
@click.argument("old", metavar="OLD", type=PATH)
@click.argument("new", metavar="NEW", type=PATH)
@_out
@click.option(
    "--encoding",
    default="xor",
    metavar="xor|overwrite",
    show_default=True,
    shell_complete=_complete(("xor", "overwrite")),
    help="Form of the changes.",
)
@click.option(
    "--checksum",
    default="xxh3-128",
    metavar="xxh3-128|blake3|adler32",
    show_default=True,
    shell_complete=_complete(("xxh3-128", "blake3", "adler32")),
    help="Kind of the checksums of new tensors.",
)
@click.option("--step", type=int, metavar="N", help="Training step, for readers.")
@options.base_model("names and shapes that neither side records.")
@options.layout("a side")
@options.recipe("Recipe from training names to Hugging Face's, for the sides that it fits.", "none")
@_max_shard_size
@options.max_memory
@options.workers
@_overwrite
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Keep the finished parts of an interrupted run."
)
@options.allow_http
@reporting
def make(output: Output, old: str, new: str, out: str, layout: str | None, **arguments: Any) -> None:
    """Write what has changed from OLD to NEW, which are folders or checkpoints of any format with the same tensors."""
    from xrank.commands.delta import make_delta

    with following_progress(output) as progress:
        report = make_delta(old, new, out, layouts=layout, progress=progress, **arguments)
    output.report(report, _rows(report))


def _rows(report: Report) -> list[tuple[str, str]]:
    details = report.details
    changed = f"{details['num_changed']:,} of {plural(details['num_compared'], 'tensor')}"
    size = size_text(report.nbytes)
    return [
        ("changed", f"{changed}; {size} of {details['encoding']} bodies"),
        ("wrote", f"{report.path}: version {details['version']} on base {details['base_version']}"),
    ]
