"""Options and reports of the commands whose work a launcher's ranks can share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from xrank.cli.command import Output
from xrank.cli.progress import following_progress
from xrank.cli.report_file import ReportFile
from xrank.environment import environ
from xrank.errors import XrankError

if TYPE_CHECKING:
    from xrank.plan.report import Report


def sharing(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--timeout`` and ``--distributed``."""
    command = click.option(
        "--distributed", is_flag=True, help="Share the work among ranks named by bare RANK and WORLD_SIZE."
    )(command)
    return click.option(
        "--timeout",
        type=float,
        callback=_positive,
        default=1800.0,
        metavar="SECONDS",
        envvar="XRANK_TIMEOUT",
        show_envvar=True,
        help="How long ranks that share the work wait for a live rank to arrive; 1800 without it.",
    )(command)


def _positive(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not value > 0:
        raise click.BadParameter(f"must be more than 0 seconds; got {value:g}.")
    return value


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
    from xrank.teams.launches import find_launch

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
