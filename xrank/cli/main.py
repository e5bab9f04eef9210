"""The ``xrank`` command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

import xrank
from xrank.cli.gather import gather
from xrank.cli.inspect import inspect
from xrank.cli.text import error_text
from xrank.cli.verify import verify_command
from xrank.errors import UsageError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(xrank.__version__, prog_name="xrank")
def cli() -> None:
    """Gather models that distributed training left on many ranks into one Hugging Face folder, proven exact."""


for _command in (gather, inspect, verify_command):
    cli.add_command(_command)


def main() -> NoReturn:
    """Run the command line and leave with its exit status."""
    try:
        cli.main(prog_name="xrank", standalone_mode=False)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except click.UsageError as error:
        usage = error.ctx.get_usage() if error.ctx is not None else None
        click.echo(error_text(UsageError(error.format_message(), want=usage, next_step="add --help")), err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    sys.exit(0)
