"""How far a conversion is: a line on a terminal's stderr that is drawn anew, and a message each minute elsewhere."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic

from xrank.cli.command import Output
from xrank.words import clip, size_text

_DRAW_SECONDS = 0.1
_MESSAGE_SECONDS = 60.0
_BAR_WIDTH = 20
_ROOM_FOR_BAR = 72
"""Columns of a terminal from which on a bar is drawn beside the figures."""

_logger = logging.getLogger("xrank.progress")


class _Rate:
    """Bytes per second since the first call; bytes that an interrupted run had finished do not count.

    Args:
        clock: returns seconds.
    """

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
    return f"{text}  {size_text(rate)}/s  {_time_text((total - done) / rate)} left" if rate else text


def _time_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


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
