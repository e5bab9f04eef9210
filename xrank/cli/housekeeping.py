"""``xrank clean``, ``doctor``, ``help`` and ``completion``: remains, this machine, help, and words for a shell."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from xrank.cli import options
from xrank.cli.command import Output, reporting
from xrank.cli.help import Command
from xrank.cli.options import PATH, completing
from xrank.words import plural, size_text


@click.command(
    "clean", cls=Command, short_help="Remove temporary files of dead gathers.", examples=["clean outputs --dry-run"]
)
@click.argument("paths", nargs=-1, metavar="[PATH]...", type=PATH)
@options.allow_http
@click.option("--dry-run", is_flag=True, help="List the files without removing them.")
@reporting
def clean_command(output: Output, paths: tuple[str, ...], dry_run: bool) -> None:
    """Remove what dead gathers left in the folders PATH: hidden folders of unfinished outputs, and messages.

    PATH may be the URL of an output in a store: abandoned uploads are aborted. In a folder of versions (weight_v000001
    and so on) those before the newest whole one are removed, too, as no reader needs them.
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


@click.command(
    "doctor",
    cls=Command,
    short_help="Show what xrank can use on this machine and in a folder.",
    examples=["doctor /nfs"],
)
@click.argument("path", metavar="[PATH]", default=".", type=PATH)
@reporting
def doctor_command(output: Output, path: str) -> None:
    """Show what xrank can use here: versions, memory, system calls, the file system of the folder PATH, GPUs.

    Each feature is tested, with small files in PATH that are removed. The exit code is 0 even if something is missing:
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


_SHELLS = ("bash", "zsh", "fish")


def _complete_commands(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    assert context.parent is not None and isinstance(context.parent.command, click.Group)
    names = context.parent.command.list_commands(context.parent)
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help", cls=Command, short_help="Show the help of a command.", examples=["help layout show"])
@click.argument("words", nargs=-1, metavar="[COMMAND]...", shell_complete=_complete_commands)
@click.pass_context
def help_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Show the help of COMMAND, as `xrank COMMAND --help` does."""
    assert context.parent is not None
    found = context.parent
    for word in words:
        command = found.command.get_command(found, word) if isinstance(found.command, click.Group) else None
        if command is None:
            raise click.UsageError(f"No such command '{' '.join(words)}'.", found)
        found = type(found)(command, found, word)
    click.echo(found.get_help())


@click.command(
    "completion",
    cls=Command,
    short_help="Print the completion script of a shell.",
    examples=["completion bash >> ~/.bashrc"],
)
@click.argument(
    "shell", type=click.Choice(_SHELLS), metavar="bash|zsh|fish", shell_complete=completing(lambda: _SHELLS)
)
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script that completes commands, options, recipes, formats and element types in bash, zsh or fish.

    Append it to ~/.bashrc or ~/.zshrc; for fish, write it to ~/.config/fish/completions/xrank.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None and context.parent is not None
    click.echo(kind(context.parent.command, {}, "xrank", "_XRANK_COMPLETE").source())
