"""The progress bar on a terminal's stderr: bytes, speed and time left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import click

from xrank.cli.command import Output
from xrank.words import size_text

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(output: Output) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback for (bytes done, bytes in all), or None if no bar is drawn."""
    if not output.shows_progress:
        yield None
        return
    started = monotonic()
    with click.progressbar(
        length=1, file=sys.stderr, show_percent=True, item_show_func=lambda text: text, update_min_steps=1
    ) as bar:

        def show(done: int, total: int) -> None:
            speed = done / max(monotonic() - started, 1e-9)
            bar.length = total
            bar.update(done - bar.pos, f"{size_text(done)} of {size_text(total)}, {size_text(speed)}/s")

        yield show
