"""Shared by all commands: ``--json -q -v``, the end by a failure or a signal, and the printing of reports."""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from xrank.cli.messages import Messages, json_line
from xrank.cli.text import error_text, printable, render_all, rows_text, wants_color
from xrank.environment import environ
from xrank.errors import COMMAND, NoSpaceError, Wording, XrankError, option
from xrank.words import one_line

if TYPE_CHECKING:
    from xrank.plan.report import Report

_RESUMED = ("gather", "reshard")
"""Commands that resume after an interruption."""


class Output:
    """Prints: results on stdout, everything else on stderr."""

    def __init__(
        self,
        command: str,
        *,
        as_json: bool,
        quiet: bool,
        verbose: int,
        log_json: bool = False,
        wording: Wording = COMMAND,
    ) -> None:
        self.command = command
        self.wording = wording
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.messages = Messages(as_json=log_json)
        self._started = monotonic()

    def follow(self) -> None:
        """Print nothing but this rank's own failure: rank 0 reports for all."""
        self.as_json, self.quiet = False, True
        logging.getLogger("xrank").setLevel(logging.DEBUG if self.verbose else logging.WARNING)

    @property
    def shows_progress(self) -> bool:
        """Whether a progress line may be drawn: on a terminal that can go back to the line's start."""
        if self.quiet or self.messages.as_json or environ().get("TERM") == "dumb":
            return False
        return sys.stderr is not None and sys.stderr.isatty()

    def report(self, report: Report, rows: list[tuple[str, str]]) -> None:
        """Print a report as JSON, as its path alone, or as rows."""
        if self.as_json:
            self._print_json(report)
        elif self.quiet:
            if report.path is not None:  # clean has none
                say(os.fsencode(report.path))
        else:
            notes = [("note", self.wording.render(message)) for _, message in report.notes]
            say(rows_text([*rows, *notes], _columns(sys.stdout)))

    def picture(self, report: Report, text: str, rows: Sequence[tuple[str, str]] = ()) -> None:
        """Print a report as JSON, as its path alone, or as rows, a text and the notes."""
        if self.as_json or self.quiet:
            self.report(report, [])
        else:
            notes = [("note", self.wording.render(message)) for _, message in report.notes]
            columns = _columns(sys.stdout)
            parts = (rows_text(rows, columns), printable(text.rstrip("\n")), rows_text(notes, columns))
            say("\n\n".join(part for part in parts if part))

    def fail(self, error: XrankError, report: Report | None = None) -> NoReturn:
        """Print an error, with --json the report that contains it, and exit with its status."""
        if self.verbose:
            trace = traceback.TracebackException.from_exception(error)
            trace.__notes__ = []  # the error text below repeats them
            say(printable("".join(trace.format()).rstrip("\n")), err=True)
        self._leave(error_text(error, self.wording, _columns(sys.stderr)), error.exit_code, error, report)

    def stop(self, how: str, exit_code: int, notes: Sequence[str] = ()) -> NoReturn:
        """Report that a signal ended the command, with notes of the work that it interrupted, and exit."""
        resumes = self.command in _RESUMED
        what = notes[0] if notes else f"the same command {'goes on' if resumes else 'starts anew'}"
        text = f"xrank: {how}; {what} (exit {exit_code})"
        effect = "which resumes" if resumes else "which starts anew"
        error = XrankError(f"{how}; {notes[0]}" if notes else how, next_step=f"run the same command, {effect}")
        self._leave(text, exit_code, error)

    def _leave(self, text: str, exit_code: int, error: XrankError, report: Report | None = None) -> NoReturn:
        if self.messages.as_json:
            parts = render_all(error.to_dict(), self.wording)
            text = json_line("error", parts["message"], exit_code=exit_code, error=parts)
        say(text, err=True)
        if self.as_json:
            self._print_json(report or self.failure_report(error, exit_code))
        sys.exit(exit_code)

    def failure_report(self, error: XrankError, exit_code: int | None = None) -> Report:
        """Return the report of a command that an error ended; its exit code is the error's unless another is given."""
        from xrank.plan.report import Report
        from xrank.system import peak_rss_nbytes

        seconds, peak = monotonic() - self._started, peak_rss_nbytes()
        code = error.exit_code if exit_code is None else exit_code
        return Report(self.command, status="failed", exit_code=code, seconds=seconds, peak_rss_nbytes=peak, fault=error)

    def _print_json(self, report: Report) -> None:
        say(json.dumps(render_all(report.to_dict(), self.wording), indent=2, ensure_ascii=True))


def _columns(stream: TextIO | None) -> int | None:
    """Return the width of the stream's terminal; None elsewhere."""
    return shutil.get_terminal_size().columns if stream is not None and stream.isatty() else None


def command_name(context: click.Context | None) -> str:
    """Return a command's name in reports: ``gather``, ``layout show``."""
    return "" if context is None else context.command_path.partition(" ")[2]


def wording_of(command: click.Command, typed: str | None = None, context: click.Context | None = None) -> Wording:
    """Return the wording whose options are those of a command.

    Args:
        command: the command.
        typed: the command line that the user typed.
        context: of the run, which shows whether a value came from a variable: errors then name that.
    """
    options = [text for parameter in command.params for text in parameter.opts if text.startswith("--")]
    variables = (
        {}
        if context is None
        else {
            parameter.name: parameter.envvar
            for parameter in command.params
            if parameter.name is not None and isinstance(parameter.envvar, str)
            if context.get_parameter_source(parameter.name) == click.core.ParameterSource.ENVIRONMENT
        }
    )
    return Wording.of_command(options, typed, variables)


def _typed_command() -> str:
    """Return the command that the user typed, for the shell."""
    program = "python -m xrank" if os.path.basename(sys.argv[0]) == "__main__.py" else "xrank"
    return f"{program} {shlex.join(sys.argv[1:])}"


def say(text: str | bytes, *, err: bool = False) -> None:
    """Print. A closed pipe or a full disk behind the stream does not undo the command's work."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:
        return
    try:
        click.echo(text, err=err, color=wants_color())
        stream.flush()
    except OSError as error:
        # Python flushes the streams once more at exit, which would fail again.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if not err and not isinstance(error, BrokenPipeError):
            say(f"xrank: the result cannot be printed: {error.strerror}; the command's work is done", err=True)


class _StoppedError(KeyboardInterrupt):
    """A signal arrived. The library handles both signals as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def _stopping_once() -> Iterator[Callable[[], None]]:
    """Raise the first SIGINT or SIGTERM and ignore later ones, so that clean-up runs to its end.

    Yields a function that starts to ignore signals; the command calls it before it exits for another reason.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A signal that the parent ignored stays ignored: nohup, and background jobs of a shell without job control.
    numbers = [number for number, handler in previous.items() if handler is not signal.SIG_IGN]

    stopped = False

    def leave() -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)

    def stop(number: int, frame: object) -> NoReturn:
        nonlocal stopped
        stopped = True
        leave()
        raise _StoppedError(number)

    for number in numbers:
        signal.signal(number, stop)
    try:
        yield leave
    finally:
        if not stopped:
            for number in numbers:
                signal.signal(number, previous[number])


def reporting(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of messages, and end it with the exit status and the error grammar of all commands.

    The function gets an `Output` as its first argument.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    @click.option("--log-json", is_flag=True, help="Print progress and messages as lines of JSON, on stderr.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only the path.")
    @click.option("-v", "--verbose", count=True, help="Print the plan and each file's rate; a traceback with an error.")
    @functools.wraps(function)
    def command(as_json: bool, log_json: bool, quiet: bool, verbose: int, **arguments: Any) -> None:
        context = click.get_current_context()
        wording = wording_of(context.command, _typed_command(), context)
        output = Output(
            command_name(context), as_json=as_json, quiet=quiet, verbose=verbose, log_json=log_json, wording=wording
        )
        _configure_logging(output)
        with _stopping_once() as leave:
            try:
                function(output, **arguments)
            except XrankError as error:
                leave()  # torchrun may terminate this rank, after another one failed, while it prints its error
                output.fail(error)
            except _StoppedError as stop:
                how = "interrupted" if stop.number == signal.SIGINT else "terminated"
                output.stop(how, 128 + stop.number, getattr(stop, "__notes__", ()))
            except (OSError, MemoryError) as error:
                leave()
                output.fail(_explain(error))
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except Exception as error:
                leave()
                output.fail(explain_fault(error))

    return command


def _explain(error: OSError | MemoryError) -> XrankError:
    from xrank.writers.disk import explain

    if isinstance(error, OSError) and isinstance(error.filename, str):
        return explain(error, error.filename)
    if isinstance(error, MemoryError):
        # numpy's and torch's texts say how much they wanted; Python's own error has none.
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__) if "/xrank/" in frame.filename]
        return NoSpaceError(
            f"not enough memory in the step {names[-1] if names else 'unknown'}",
            got=f"{_free_nbytes():,} bytes free",
            want=str(error) or "more than that",
            next_step=f"give a smaller {option('max_memory')}, or run where more memory is free",
            free_nbytes=_free_nbytes(),
        )
    return XrankError(f"{type(error).__name__}: {error}", next_step="run again with -v for the place")


def _free_nbytes() -> int:
    """Return the memory that this process may still take, by its own limit (ulimit -v) and the machine's."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(ImportError, OSError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        if limit != resource.RLIM_INFINITY:
            free = max(min(free, limit - taken), 0)
    return free


def explain_fault(error: Exception) -> XrankError:
    """Return the error for an exception that no input may cause: a script with ``--json`` gets its report even then."""
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return NoSpaceError(
            "the system starts no more threads for this process",
            got=f"{threading.active_count()} threads, {_free_nbytes():,} bytes free",
            want=f"a thread for each of the {option('workers')}",
            next_step=f"give fewer {option('workers')}, or raise the limits of processes and memory (ulimit -u, -v)",
            free_nbytes=_free_nbytes(),
        )
    fault = XrankError(
        f"this is a fault of xrank, or of a package that it uses: {one_line(f'{type(error).__name__}: {error}')}",
        next_step="run again with -v, and report the traceback",
    )
    fault.__cause__ = error
    return fault


def _configure_logging(output: Output) -> None:
    """Send the library's log to stderr: one line a finished shard where no progress line is drawn."""
    logger = logging.getLogger("xrank")
    level = logging.INFO
    if output.verbose:
        level = logging.DEBUG
    elif output.quiet or output.shows_progress:
        level = logging.WARNING
    logger.setLevel(level)
    logger.handlers = [output.messages]
    logger.propagate = False
