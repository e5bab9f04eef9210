"""What every command shares: its options, how a failure ends it, how its report is printed."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from xrank.cli.text import error_text, rows_text
from xrank.errors import XrankError

if TYPE_CHECKING:
    from xrank.plan.report import Report

__all__ = ["Output", "reporting"]


class Output:
    """Prints: results on stdout, everything else on stderr."""

    def __init__(self, command: str, *, as_json: bool, quiet: bool, verbose: int) -> None:
        self.command = command
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose

    @property
    def shows_progress(self) -> bool:
        """Whether a bar may be drawn."""
        return sys.stderr.isatty() and not self.quiet

    def report(self, report: Report, rows: list[tuple[str, str]]) -> None:
        """Print a report: as JSON, as its path alone, or as the rows that were made of it."""
        if self.as_json:
            self.result(json.dumps(report.to_dict(), indent=2, ensure_ascii=True))
        elif self.quiet:
            self.result(report.path or "")
        else:
            notes = [("note", message) for _, message in report.notes]
            self.result(rows_text([*rows, *notes]))

    def result(self, text: str) -> None:
        """Print to stdout; a reader that has left does not change what was done."""
        try:
            click.echo(text)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python flushes stdout once more at exit, which would fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def fail(self, error: XrankError, report: Report | None = None) -> NoReturn:
        """Print an error, and in JSON the report that has it, and leave with its exit status."""
        if self.verbose:
            traceback.print_exception(error)
        click.echo(error_text(error), err=True)
        if self.as_json:
            from xrank.plan.report import Report

            failed = report or Report(self.command, status="failed", exit_code=error.exit_code, error=error.to_dict())
            self.result(json.dumps(failed.to_dict(), indent=2, ensure_ascii=True))
        sys.exit(error.exit_code)


class _TerminatedError(BaseException):
    """SIGTERM arrived."""


def _terminate(signum: int, frame: object) -> NoReturn:
    raise _TerminatedError


def reporting(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--json -q -v``, and end it with the exit status and the error grammar of all commands.

    The function gets an `Output` as its first argument.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only the path.")
    @click.option("-v", "--verbose", count=True, help="Print more; a traceback with an error.")
    @functools.wraps(function)
    def command(as_json: bool, quiet: bool, verbose: int, **arguments: Any) -> None:
        output = Output(click.get_current_context().info_name or "", as_json=as_json, quiet=quiet, verbose=verbose)
        _configure_logging(output)
        previous = signal.signal(signal.SIGTERM, _terminate)
        try:
            function(output, **arguments)
        except XrankError as error:
            output.fail(error)
        except KeyboardInterrupt:
            click.echo("xrank: interrupted; the same command goes on (exit 130)", err=True)
            sys.exit(130)
        except _TerminatedError:
            click.echo("xrank: terminated; the same command goes on (exit 143)", err=True)
            sys.exit(143)
        except (OSError, MemoryError) as error:
            output.fail(XrankError(f"{type(error).__name__}: {error}", next_step="run again with -v for the place"))
        finally:
            signal.signal(signal.SIGTERM, previous)

    return command


def _configure_logging(output: Output) -> None:
    """Send the library's log to stderr: one line a finished shard where no bar is drawn."""
    logger = logging.getLogger("xrank")
    level = logging.INFO
    if output.verbose:
        level = logging.DEBUG
    elif output.quiet or output.shows_progress:
        level = logging.WARNING
    logger.setLevel(level)
    logger.handlers = [logging.StreamHandler()]
    logger.propagate = False
