"""The ``xrank`` command. A command's module is imported when it is called, and nothing heavy before it runs."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from io import TextIOWrapper
from typing import NoReturn

import click

from xrank import environment, system
from xrank.cli.command import Output, command_name, say, wants_color
from xrank.cli.help import CommandGroup
from xrank.errors import UsageError

_M_ARENA_MAX = -8  # of glibc's malloc.h
_COMMANDS = {
    "gather": "gather",
    "reshard": "gather",
    "delta": "delta",
    "inspect": "inspect",
    "verify": "verify",
    "simulate": "simulate",
    "layout": "layout",
    "recipe": "recipe",
    "clean": "housekeeping",
    "doctor": "housekeeping",
    "completion": "housekeeping",
    "help": "housekeeping",
}
"""Command -> its module in `xrank.cli`, which has an attribute of the command's name and "_command"."""
_SECTIONS = {
    "Convert": ("gather", "reshard", "delta"),
    "Look and check": ("inspect", "verify", "simulate"),
    "Layouts and names": ("layout", "recipe"),
    "Housekeeping": ("clean", "doctor", "completion", "help"),
}


class _Commands(CommandGroup):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        module = _COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = getattr(import_module(f"xrank.cli.{module}"), f"{cmd_name}_command")
        return command


def _show_version(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        from xrank.version import __version__  # its package is slow to import

        click.echo(f"xrank, version {__version__}")
        context.exit()


@click.group(
    cls=_Commands,
    sections=_SECTIONS,
    examples=["gather checkpoint-2000 -o model", "verify model", "help gather"],
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Print the version.",
)
def cli() -> None:
    """Gather models that distributed training left on many ranks into one Hugging Face folder, proven exact."""


def _with_suggestion(error: click.UsageError) -> str:
    """Return the message of an error, with the nearest name first where click sorts the likely ones."""
    near: list[str] = getattr(error, "possibilities", None) or []
    return f"{error.message} Did you mean {' or '.join(map(repr, near))}?" if near else error.format_message()


def main() -> NoReturn:
    """Run the command line and leave with its exit code."""
    # If a shell closed one (2>&-), the next file opened would get its number, and prints would go into that file.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    environment.forgo_blas_threads()
    # glibc gives each thread a heap of its own, which keeps what it frees: 5 to 10 MB more for a gather from a store.
    mallopt = system.c_function("mallopt") if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a name
    try:
        cli.main(prog_name="xrank", standalone_mode=False, color=wants_color())
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        usage = error.ctx.get_usage() if error.ctx is not None else None
        name = command_name(error.ctx)
        output = Output(name, as_json="--json" in sys.argv[1:])
        next_step = f"xrank {name} --help".replace("  ", " ") + " lists arguments and options"
        output.fail(UsageError(_with_suggestion(error), want=usage, next_step=next_step))
    except click.Abort:
        sys.exit(130)
    sys.exit(0)
