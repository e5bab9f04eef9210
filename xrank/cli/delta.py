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
    short_help="Write and apply the changes between versions of a model.",
    examples=["delta make step-1 step-2 -o deltas/weight_v000002"],
)
def delta_command() -> None:
    """Write and apply the changes between versions of a model, in the folder format of SGLang and slime."""


def _complete(words: tuple[str, ...]) -> Any:
    return options.completing(lambda: words)


_out = click.option(
    "-o", "--out", required=True, type=PATH, metavar="DIR", help="Folder of the version, named weight_v and six digits."
)
_max_shard_size = click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Maximum bytes of changes in one file."
)
_overwrite = click.option("--overwrite", is_flag=True, help="Replace an existing version.")


@delta_command.command(
    short_help="Write the changes from one model to the next.",
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
    help="Encoding of the changes.",
)
@click.option(
    "--checksum",
    default="xxh3-128",
    metavar="xxh3-128|blake3|adler32",
    show_default=True,
    shell_complete=_complete(("xxh3-128", "blake3", "adler32")),
    help="Checksum of each new tensor.",
)
@click.option("--step", type=int, metavar="N", help="Training step to record.")
@options.base_model("names and shapes that neither side records.")
@options.layout("a side")
@options.recipe("Recipe that renames tensors for Hugging Face, for each side that it fits.", "none")
@_max_shard_size
@options.max_memory
@options.workers
@_overwrite
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Reuse the finished parts of an interrupted run."
)
@options.allow_http
@reporting
def make(output: Output, old: str, new: str, out: str, layout: str | None, **arguments: Any) -> None:
    """Write the changes from OLD to NEW: folders or checkpoints of any format, with the same tensors."""
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


@delta_command.command(
    short_help="Fold consecutive versions into one.",
    examples=["delta fold deltas/weight_v00000[1-4] -o folded/weight_v000004"],
)
@click.argument("versions", nargs=-1, required=True, metavar="DIR...", type=PATH)
@_out
@_max_shard_size
@_overwrite
@options.allow_http
@reporting
def fold(output: Output, versions: tuple[str, ...], out: str, **arguments: Any) -> None:
    """Fold the consecutive versions in DIR into one; their base model is not needed."""
    from xrank.commands.delta_folding import fold_deltas

    report = fold_deltas(versions, out, **arguments)
    output.report(report, _rows(report))


_deltas = click.argument("deltas", nargs=-1, required=True, metavar="DIR...", type=PATH)


@delta_command.command(
    short_help="Write the model of a version; run again to update it.",
    examples=["delta apply model deltas -o engine", "delta apply model deltas/weight_v000001 -o step-1"],
)
@click.argument("base", metavar="BASE", type=PATH)
@_deltas
@click.option("-o", "--out", required=True, type=PATH, metavar="OUT", help="Folder of the model, or its URL.")
@click.option("--version", type=click.IntRange(0), metavar="N", help="Version to make.  [default: the newest]")
@click.option(
    "--max-shard-size", default="5GB", metavar="SIZE", show_default=True, help="Maximum bytes of tensors in one file."
)
@options.max_memory
@options.workers
@click.option("--overwrite", is_flag=True, help="Replace a model even if this command has not written it.")
@click.option(
    "--resume/--no-resume", default=True, show_default=True, help="Reuse the finished parts of an interrupted run."
)
@click.option("--verify", is_flag=True, help="Read each file back before it gets its final name.")
@options.allow_http
@reporting
def apply(output: Output, base: str, deltas: tuple[str, ...], out: str, **arguments: Any) -> None:
    """Apply the versions in DIR to the model BASE, and write the newest model to OUT.

    DIR is the folder of a version, or a folder that contains several. Run the command again to update OUT.
    """
    from xrank.commands.delta_applying import apply_deltas

    with following_progress(output) as progress:
        report = apply_deltas(base, deltas, out, progress=progress, **arguments)
    details = report.details
    if report.output is None:
        rows = [("there", f"{report.path} has version {details['version']} already")]
    else:
        rows = [("applied", f"{plural(details['num_applied'], 'version')} to {details['base']}")]
        rows = [*rows, ("wrote", f"{report.path}: version {details['version']}, {size_text(report.nbytes)}")]
    output.report(report, rows)


@delta_command.command(
    short_help="Read versions and compare all their checksums.", examples=["delta verify model deltas"]
)
@click.argument("base", metavar="BASE", type=PATH)
@click.argument("deltas", nargs=-1, metavar="[DIR]...", type=PATH)
@options.workers
@options.allow_http
@reporting
def verify(output: Output, base: str, deltas: tuple[str, ...], workers: int | None) -> None:
    """Apply the versions in DIR to the model BASE without writing, and compare every checksum, digest and state.

    Without DIR, BASE is the folder of the versions, and the first one is a whole model.
    """
    from xrank.commands.delta_applying import verify_deltas

    report = verify_deltas(base if deltas else None, deltas or base, workers=workers)
    details = report.details
    counts = f"{plural(details['num_checksums'], 'checksum')}, {plural(details['num_digests'], 'digest')} good"
    output.report(report, [("ok", f"{plural(len(details['versions']), 'version')}: {counts}")])


@delta_command.command(short_help="List versions.", examples=["delta inspect deltas --json"])
@_deltas
@options.allow_http
@reporting
def inspect(output: Output, deltas: tuple[str, ...]) -> None:
    """List the versions in DIR: what each changes, and how."""
    from xrank.commands.delta_applying import inspect_deltas

    report = inspect_deltas(deltas)
    output.report(report, [(f"version {row['version']}", _describe(row)) for row in report.details["versions"]])


def _describe(row: dict[str, Any]) -> str:
    size = f"{plural(row['num_tensors'], 'tensor')}, {size_text(row['nbytes'])}"
    if row["is_whole"]:
        return f"whole: {size}"
    step = "" if row["step"] is None else f", step {row['step']}"
    return f"changes of version {row['base_version']}{step}: {size} of {row['encoding']} bodies, {row['checksum']}"
