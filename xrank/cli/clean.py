"""``xrank clean``: removes the remains of dead processes."""

from __future__ import annotations

import click

from xrank.cli import options
from xrank.cli.command import Output, reporting
from xrank.cli.help import Command
from xrank.cli.options import PATH
from xrank.words import plural, size_text


@click.command(
    "clean", cls=Command, short_help="Remove the remains of dead gathers.", examples=["clean outputs --dry-run"]
)
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=PATH)
@options.allow_http
@click.option("--dry-run", is_flag=True, help="List the remains without removing them.")
@reporting
def clean_command(output: Output, paths: tuple[str, ...], dry_run: bool) -> None:
    """Remove the stages and messages that dead gathers left in the folders PATH.

    PATH may be the URL of an output in a store: abandoned uploads are aborted.
    Only what xrank made is removed; its shared memory has no name and ends with its last process.
    """
    from xrank.commands.clean import clean

    report = clean(paths, dry_run=dry_run)
    details = report.details
    verb = "would go" if dry_run else "removed"
    rows = [
        (verb if row["removed"] else "kept", f"{row['path']}: {size_text(row['nbytes'])}; {row['why']}")
        for row in (*details["stages"], *details["messages"])
    ]
    total = f"{plural(details['num_removed'], 'thing')}, {size_text(details['removed_nbytes'])}"
    output.report(report, [*rows, (verb, total)])
