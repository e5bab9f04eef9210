"""The ``xrank`` command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import NoReturn

import click

import xrank
from xrank import environment
from xrank.cli.clean import clean_command
from xrank.cli.command import Output, command_name, say
from xrank.cli.gather import gather
from xrank.cli.inspect import inspect
from xrank.cli.layout import layout
from xrank.cli.recipe import recipe
from xrank.cli.reshard import reshard
from xrank.cli.simulate import simulate_command
from xrank.cli.verify import verify_command
from xrank.errors import UsageError

__all__ = ["cli", "main"]


def _show_version(context: click.Context, option: click.Parameter, is_asked: bool) -> None:
    if is_asked and not context.resilient_parsing:
        click.echo(f"xrank, version {xrank.__version__}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Print the version."
)
def cli() -> None:
    """Gather models that distributed training left on many ranks into one Hugging Face folder, proven exact."""


for _command in (gather, inspect, verify_command, reshard, layout, recipe, simulate_command, clean_command):
    cli.add_command(_command)


def main() -> NoReturn:
    """Run the command line and leave with its exit status."""
    _occupy_standard_descriptors()
    environment.forgo_blas_threads()
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack a name
    try:
        cli.main(prog_name="xrank", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        usage = error.ctx.get_usage() if error.ctx is not None else None
        name = command_name(error.ctx)
        output = Output(name, as_json="--json" in sys.argv[1:], quiet=False, verbose=0)
        next_step = f"xrank {name} --help".replace("  ", " ") + " lists arguments and options"
        output.fail(UsageError(error.format_message(), want=usage, next_step=next_step))
    except click.Abort:
        sys.exit(130)
    sys.exit(0)


def _occupy_standard_descriptors() -> None:
    # If a shell closed one (2>&-), the next file opened would get its number, and prints would go into that file.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
