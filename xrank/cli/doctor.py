"""``xrank doctor``: describes what this machine offers."""

from __future__ import annotations

import click

from xrank.cli.command import Output, reporting
from xrank.cli.help import Command
from xrank.cli.options import PATH


@click.command(
    "doctor",
    cls=Command,
    short_help="Show what this machine, this Python and a folder offer.",
    examples=["doctor /nfs"],
)
@click.argument("path", metavar="[PATH]", default=".", type=PATH)
@reporting
def doctor_command(output: Output, path: str) -> None:
    """Show what xrank can use here: versions, memory, kernel calls, the file system of the folder PATH, GPUs.

    Each thing is tried. Small files are made in PATH and removed. The exit status is 0 whatever is missing: xrank does
    without it. Put the output into a report of a problem.
    """
    from xrank.commands.doctor import examine_machine

    report = examine_machine(path)
    rows, subject = [], ""
    for check in report.details["checks"]:
        if check["subject"] != subject:
            subject = check["subject"]
            rows.append((subject, ""))
        sign = {True: "+", False: "-", None: " "}[check["is_there"]]
        rows.append((f"{sign} {check['name']}", check["text"]))
    output.report(report, rows)
