"""Shared by all commands: ``--json -q -v``, progress, the end by a failure or a signal, and the printing of reports."""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click
from msgspec import Struct, field
from msgspec.structs import replace

from xrank.environment import environ
from xrank.errors import COMMAND, NoSpaceError, Text, UsageError, Wording, XrankError, option
from xrank.words import clip, one_line, size_text

if TYPE_CHECKING:
    from xrank.engine.report import Report


_FEWEST_COLUMNS = 20
_MOST_TOGETHER = 84
"""Characters of got and want on one line, which then has 100."""
"""Columns without which a text is not wrapped."""
_LABEL_COLORS = {"ok": "green", "wrote": "green", "equal": "green", "note": "yellow", "problem": "red"}


def wants_color() -> bool | None:
    """Return whether to print colors; None: where the stream is a terminal (no-color.org, force-color.org)."""
    variables = environ()
    if variables.get("NO_COLOR") or variables.get("TERM") == "dumb":
        return False
    return True if variables.get("FORCE_COLOR") else None


def printable(text: str) -> str:
    """Return text with every control character escaped: a name found in a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def error_text(error: XrankError, wording: Wording = COMMAND, columns: int | None = None) -> str:
    """Return an error in the grammar of all commands: one line that names the thing, then got and want, then try.

    Got and want share a line where they fit on it. The first words and labels are styled; `click.echo` takes styles
    away where they are not wanted. With `columns`, the width of a terminal, longer lines are wrapped between words.
    """
    parts = render_all(error.to_dict(), wording)
    step = f"{parts['try']} (exit {error.exit_code})" if parts["try"] else f"(exit {error.exit_code})"
    got, want = parts["got"], parts["want"]
    if got and want and len(got) + len(want) <= _MOST_TOGETHER:
        got, want = f"{got}; want {want}", None
    rows = [(f"  {label:<5}", part) for label, part in (("got", got), ("want", want), ("try", step))]
    name = click.style(f"xrank: {parts['type']}:", fg="red", bold=True)
    before = f"xrank: {parts['type']}: "
    first = f"{name} {_line(parts['message'], before, columns, indent=8)}"
    lines = [f"{click.style(label, bold=True)} {_line(part, label + ' ', columns)}" for label, part in rows if part]
    return "\n".join([first, *lines])


def render_all(value: Any, wording: Wording) -> Any:
    """Return a JSON value with each of its texts rendered for a wording."""
    if isinstance(value, Text):
        return wording.render(value)
    if isinstance(value, Mapping):
        return {key: render_all(one, wording) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [render_all(one, wording) for one in value]
    return value


def rows_text(rows: Sequence[tuple[str, str]], columns: int | None = None) -> str:
    """Return labeled lines: the label padded and styled, so that the texts stand in one column.

    With `columns`, the width of a terminal, longer texts are wrapped between words, within their column.
    """
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(f"{_label(label, width)}  {_line(text, ' ' * (width + 2), columns)}" for label, text in rows)


def _label(label: str, width: int) -> str:
    return click.style(_line(label, "", None), fg=_LABEL_COLORS.get(label), bold=True) + " " * (width - len(label))


def _line(text: str, before: str, columns: int | None, indent: int | None = None) -> str:
    """Return a text that follows `before` on its line, without line ends of its own but for those of a wrapped one."""
    whole = printable(text.replace("\n", "\\n"))
    indent = len(before) if indent is None else indent
    if columns is None or len(before) + len(whole) <= columns or columns - indent < _FEWEST_COLUMNS:
        return whole
    import textwrap  # rarely needed

    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    wrapped = textwrap.wrap(whole, columns, initial_indent=before, subsequent_indent=" " * indent, **options)
    return "\n".join(wrapped).removeprefix(before)


def json_line(level: str, message: str, **facts: Any) -> str:
    """Return a message as one line of JSON, with the time in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **facts})


class Messages(logging.Handler):
    """Prints each record of the log as one line; `facts` of a record are further keys of its JSON."""

    def __init__(self, *, as_json: bool = False) -> None:
        super().__init__()
        self.as_json = as_json
        self.drawn = False
        """Whether a progress line stands on the terminal, which a message replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record. A stream that is closed or full loses the message and nothing else."""
        level, text = record.levelname.lower(), printable(record.getMessage().replace("\n", "\\n"))
        if self.as_json:
            line = json_line(level, text, **getattr(record, "facts", {}))
        else:
            line = text if record.levelno < logging.WARNING else click.style(f"xrank: {level}: ", fg="yellow") + text
        try:
            click.echo(f"\r\x1b[K{line}" if self.drawn else line, file=sys.stderr, color=wants_color())
            self.drawn = False
        except (OSError, ValueError):
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Do nothing: logging would print a traceback to the same stream."""


_RESUMED = ("gather", "reshard")


class Output(Struct):
    """Prints: results on stdout, everything else on stderr."""

    command: str
    as_json: bool
    quiet: bool = False
    verbose: int = 0
    messages: Messages = field(default_factory=Messages)
    wording: Wording = COMMAND
    started: float = field(default_factory=monotonic)

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

    def report(self, report: Report, rows: Sequence[tuple[str, str]] = (), picture: str | None = None) -> None:
        """Print a report as JSON, as its path alone, or as rows and notes, with a picture between them."""
        if self.as_json:
            self._print_json(report)
        elif self.quiet:
            if report.path is not None:  # clean has none
                say(os.fsencode(report.path))
        else:
            notes = [("note", self.wording.render(message)) for _, message in report.notes]
            columns = _columns(sys.stdout)
            parts = [rows_text([*rows, *notes], columns)]
            if picture is not None:
                parts = [rows_text(rows, columns), printable(picture.rstrip("\n")), rows_text(notes, columns)]
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
        what = notes[0] if notes else f"the same command {'resumes' if resumes else 'starts again'}"
        text = f"xrank: {how}; {what} (exit {exit_code})"
        effect = "which resumes" if resumes else "which starts again"
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
        from xrank.engine.report import Report
        from xrank.system import peak_rss_nbytes

        seconds, peak = monotonic() - self.started, peak_rss_nbytes()
        code = error.exit_code if exit_code is None else exit_code
        return Report(self.command, status="failed", exit_code=code, seconds=seconds, peak_rss_nbytes=peak, fault=error)

    def _print_json(self, report: Report) -> None:
        say(json.dumps(render_all(report.to_dict(), self.wording), indent=2, ensure_ascii=True))


def _columns(stream: TextIO | None) -> int | None:
    """Return the width of the stream's terminal; None elsewhere."""
    if stream is None or not stream.isatty():
        return None
    import shutil  # it loads compressors

    return shutil.get_terminal_size().columns


def command_name(context: click.Context | None) -> str:
    """Return a command's name in reports: ``gather``, ``layout show``."""
    return "" if context is None else context.command_path.partition(" ")[2]


def wording_of(command: click.Command, typed: str | None = None, context: click.Context | None = None) -> Wording:
    """Return the wording whose options are those of a command, and the command line that the user typed.

    The run's `context` shows whether a value came from a variable: errors then name that.
    """
    options = [text for parameter in command.params for text in parameter.opts if text.startswith("--")]
    variables = {
        parameter.name: parameter.envvar
        for parameter in command.params
        if context is not None and parameter.name is not None and isinstance(parameter.envvar, str)
        if context.get_parameter_source(parameter.name) == click.core.ParameterSource.ENVIRONMENT
    }
    return Wording.of_command(options, typed, variables)


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
            say(f"xrank: the result cannot be printed: {error.strerror}; the command itself is done", err=True)


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
    """Give a command the options of messages, and end it with the exit code and the error grammar of all commands.

    The function gets an `Output` as its first argument.
    """

    @click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
    @click.option("--log-json", is_flag=True, help="Print progress and messages as lines of JSON, on stderr.")
    @click.option("-q", "--quiet", is_flag=True, help="Print only the path.")
    @click.option("-v", "--verbose", count=True, help="Print a traceback with an error.")
    @functools.wraps(function)
    def command(as_json: bool, log_json: bool, quiet: bool, verbose: int, **arguments: Any) -> None:
        context = click.get_current_context()
        program = "python -m xrank" if os.path.basename(sys.argv[0]) == "__main__.py" else "xrank"
        wording = wording_of(context.command, f"{program} {shlex.join(sys.argv[1:])}", context)
        output = Output(command_name(context), as_json, quiet, verbose, Messages(as_json=log_json), wording)
        # The library's log goes to stderr: one line a finished shard where no progress line is drawn.
        logger = logging.getLogger("xrank")
        is_short = output.quiet or output.shows_progress
        logger.setLevel(logging.DEBUG if verbose else logging.WARNING if is_short else logging.INFO)
        logger.handlers = [output.messages]
        logger.propagate = False
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
    from xrank.storage.disk import explain

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
    return XrankError(f"{type(error).__name__}: {error}", next_step="run again with -v for the traceback")


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
            "the system cannot start more threads for this process",
            got=f"{threading.active_count()} threads, {_free_nbytes():,} bytes free",
            want=f"a thread for each of the {option('workers')}",
            next_step=f"give fewer {option('workers')}, or raise the limits of processes and memory (ulimit -u, -v)",
            free_nbytes=_free_nbytes(),
        )
    fault = XrankError(
        f"this is a bug in xrank, or in a package that it uses: {one_line(f'{type(error).__name__}: {error}')}",
        next_step="run again with -v, and report the traceback",
    )
    fault.__cause__ = error
    return fault


_DRAW_SECONDS = 0.1
_MESSAGE_SECONDS = 60.0
_BAR_WIDTH = 20
_ROOM_FOR_BAR = 72
"""Columns of a terminal from which on a bar is drawn beside the figures."""

_logger = logging.getLogger("xrank.progress")


class _Rate:
    """Bytes per second since the first call; bytes that an interrupted run had finished do not count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = self._shown = clock()
        self._first: int | None = None

    def is_due(self, seconds: float) -> bool:
        """Return whether that many seconds have passed since this returned True, and count from now on if so."""
        now = self._clock()
        if now - self._shown < seconds:
            return False
        self._shown = now
        return True

    def measure(self, done: int) -> float:
        """Return the rate, 0 if it is not yet known."""
        if self._first is None:
            self._first = done
        passed = self._clock() - self._started
        return (done - self._first) / passed if passed > 0 else 0.0


def _figures(done: int, total: int, rate: float) -> str:
    text = f"{size_text(done)} of {size_text(total)}"
    if done >= total:
        return f"{text}  finishing"
    if not rate:
        return text
    minutes, rest = divmod(round((total - done) / rate), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
    return f"{text}  {size_text(rate)}/s  {left} left"


@contextmanager
def following_progress(
    output: Output, clock: Callable[[], float] = monotonic
) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for (bytes done, bytes in all); None if only the path is to be printed."""
    if output.quiet:
        yield None
        return
    rate = _Rate(clock)

    def draw(done: int, total: int) -> None:
        speed = rate.measure(done)
        if not rate.is_due(_DRAW_SECONDS) and done < total:
            return
        import shutil

        columns = shutil.get_terminal_size().columns
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _BAR_WIDTH)
        bar = f"{'#' * filled}{'-' * (_BAR_WIDTH - filled)}  " if columns >= _ROOM_FOR_BAR else ""
        line = clip(f"{share:4.0%}  {bar}{_figures(done, total, speed)}", columns - 1)
        output.messages.drawn = True
        _write(f"\r\x1b[K{line}")

    def report(done: int, total: int) -> None:
        speed = rate.measure(done)
        if rate.is_due(_MESSAGE_SECONDS):
            left = (total - done) / speed if speed else None
            facts = {
                "done_nbytes": done,
                "total_nbytes": total,
                "nbytes_per_second": round(speed),
                "seconds_left": left,
            }
            _logger.info("%s", _figures(done, total, speed), extra={"facts": {"event": "progress", **facts}})

    try:
        yield draw if output.shows_progress else report
    finally:
        if output.messages.drawn:
            output.messages.drawn = False
            _write("\r\x1b[K")


def _write(text: str) -> None:
    # A terminal that went away does not end the work.
    with suppress(OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


_MAX_SAMPLES = 2000

Progress = Callable[[int, int], None]


class ReportFile:
    """Records the progress of a command, and writes its page. Called by the rank that reports."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._started = monotonic()
        self._interval = 0.0
        self._samples: list[tuple[float, int]] = []
        folder = os.path.dirname(path) or "."
        if not os.access(folder, os.W_OK | os.X_OK) or os.path.isdir(path):
            raise UsageError(
                f"the report {path} cannot be written",
                file=path,
                got="a folder" if os.path.isdir(path) else f"{folder}, which is not a folder that can be written to",
                next_step="name a file in an existing folder",
            )

    def recording(self, progress: Progress | None) -> Progress:
        """Return a callback for (bytes done, bytes in all) that records them, and calls `progress` too."""

        def record(done: int, total: int) -> None:
            now = monotonic() - self._started
            if not self._samples or now - self._samples[-1][0] >= self._interval or done == total:
                self._samples.append((now, done))
            if len(self._samples) > _MAX_SAMPLES:
                # A run of days has as many samples as one of minutes, at greater distances.
                self._samples = self._samples[::2]
                self._interval = 2 * now / _MAX_SAMPLES
            if progress is not None:
                progress(done, total)

        return record

    def write(self, report: Report) -> None:
        """Write the page by one rename."""
        from xrank.commands.layout import write_page
        from xrank.pictures.picture import report_page

        write_page(report, report_page(report, self._samples), self._path)


def sharing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--timeout`` and ``--distributed``."""

    def check_seconds(context: click.Context, parameter: click.Parameter, value: float) -> float:
        if not value > 0:
            raise click.BadParameter(f"must be more than 0 seconds; got {value:g}.")
        return value

    command = click.option(
        "--distributed", is_flag=True, help="Share the work among the ranks of RANK and WORLD_SIZE, without a launcher."
    )(command)
    return click.option(
        "--timeout",
        type=float,
        callback=check_seconds,
        default=1800.0,
        metavar="SECONDS",
        envvar="XRANK_TIMEOUT",
        show_envvar=True,
        help="Seconds that ranks wait for a rank that is alive but late.  [default: 1800]",
    )(command)


def report_shared(
    output: Output,
    convert: Callable[..., Report],
    rows: Callable[[Report], list[tuple[str, str]]],
    *,
    timeout: float,
    distributed: bool,
    page: str | None = None,
) -> None:
    """Run a conversion, alone or with all ranks of the launcher. Rank 0 prints the report, and writes it to `page`."""
    from xrank.ranks.team import find_launch

    launch, notes = find_launch(environ(), distributed=distributed)
    is_reporting = launch is None or launch.rank == 0
    if not is_reporting:
        output.follow()
    file = ReportFile(page) if page is not None and is_reporting else None
    with following_progress(output) as progress:
        progress = progress if file is None else file.recording(progress)
        try:
            report = convert(progress=progress, distributed=launch is not None, timeout_seconds=timeout)
        except XrankError as error:
            if file is not None:
                error.wording = output.wording
                file.write(output.failure_report(error))
            raise
    if not is_reporting:
        return
    texts = ((code, output.wording.render(text)) for code, text in (*report.notes, *notes))
    report = replace(report, notes=tuple(texts))
    if file is not None:
        file.write(report)
    output.report(report, [*rows(report), *([] if page is None else [("report", page)])])
