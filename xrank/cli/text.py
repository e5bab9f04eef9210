"""Words and numbers as the commands print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from xrank.environment import environ
from xrank.errors import COMMAND, Text, Wording, XrankError

_FEWEST_COLUMNS = 20
"""Columns without which a text is not wrapped."""
_LABEL_COLORS = {"ok": "green", "wrote": "green", "equal": "green", "note": "yellow", "problem": "red"}


def wants_color() -> bool | None:
    """Return whether to print colours; None: where the stream is a terminal (no-color.org, force-color.org)."""
    variables = environ()
    if variables.get("NO_COLOR") or variables.get("TERM") == "dumb":
        return False
    return True if variables.get("FORCE_COLOR") else None


def printable(text: str) -> str:
    """Return text with every control character escaped: a name found in a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def error_text(error: XrankError, wording: Wording = COMMAND, columns: int | None = None) -> str:
    """Return an error in the grammar of all commands: one line that names the thing, then got, want, try.

    Its first words and labels are styled; `click.echo` takes styles away where they are not wanted. With `columns`,
    the width of a terminal, longer lines are wrapped between words.
    """
    parts = render_all(error.to_dict(), wording)
    step = f"{parts['try']} (exit {error.exit_code})" if parts["try"] else f"(exit {error.exit_code})"
    rows = [(f"  {label:<5}", part) for label, part in (("got", parts["got"]), ("want", parts["want"]), ("try", step))]
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
    """Return labelled lines: the label padded and styled, so that the texts stand in one column.

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
