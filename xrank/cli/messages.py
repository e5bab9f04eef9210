"""Messages on stderr while a command runs: the library's log, as lines for people or as JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import click

from xrank.cli.text import printable, wants_color


def json_line(level: str, message: str, **facts: Any) -> str:
    """Return a message as one line of JSON, with the time in UTC."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **facts})


class Messages(logging.Handler):
    """Prints each record of the log as one line; `facts` of a record are further keys of its JSON.

    Args:
        as_json: whether to print JSON.
    """

    def __init__(self, *, as_json: bool) -> None:
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
