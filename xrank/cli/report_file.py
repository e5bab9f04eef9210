"""The page that ``--report FILE`` asks for: the report of a command, with its rate over time."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from xrank.errors import UsageError

if TYPE_CHECKING:
    from xrank.plan.report import Report

_MAX_SAMPLES = 2000

Progress = Callable[[int, int], None]


class ReportFile:
    """Records the progress of a command, and writes its page. Called by the rank that reports.

    Args:
        path: the page's file.
        clock: returns seconds.

    Raises:
        UsageError: the file's folder is not there, or cannot be written to; nothing has been done yet.
    """

    def __init__(self, path: str, clock: Callable[[], float] = monotonic) -> None:
        self._path = path
        self._clock = clock
        self._started = clock()
        self._samples: list[tuple[float, int]] = []
        self._interval = 0.0
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
            now = self._clock() - self._started
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
        """Write the page by one rename.

        Raises:
            UsageError: the file cannot be written.
        """
        from xrank.conversion.layout_show import write_page
        from xrank.pictures.report_page import report_page

        write_page(report, report_page(report, self._samples), self._path)
