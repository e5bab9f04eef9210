"""``xrank help`` and ``xrank completion``: help pages by name, and what a shell needs to complete words."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem, get_completion_class

from xrank.cli.help import Command
from xrank.cli.options import completing

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
    short_help="Print the script that completes words in a shell.",
    examples=["completion bash >> ~/.bashrc"],
)
@click.argument(
    "shell", type=click.Choice(_SHELLS), metavar="bash|zsh|fish", shell_complete=completing(lambda: _SHELLS)
)
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print the script by which bash, zsh or fish completes commands, options, recipes, formats and element types.

    Append it to ~/.bashrc or ~/.zshrc; for fish, write it to ~/.config/fish/completions/xrank.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None and context.parent is not None
    click.echo(kind(context.parent.command, {}, "xrank", "_XRANK_COMPLETE").source())
