"""Words and numbers as the commands print them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from xrank.errors import XrankError
from xrank.faces import COMMAND, Face, Text

__all__ = ["error_text", "printable", "render_all", "rows_text"]


def printable(text: str) -> str:
    """Return text with every control character escaped: a name found in a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def error_text(error: XrankError, face: Face = COMMAND) -> str:
    """Return an error in the grammar of all commands: one line that names the thing, then got, want, try."""
    parts = render_all(error.to_dict(), face)
    lines = [f"xrank: {parts['type']}: {parts['message']}"]
    step = f"{parts['try']} (exit {error.exit_code})" if parts["try"] else f"(exit {error.exit_code})"
    for label, part in (("got", parts["got"]), ("want", parts["want"]), ("try", step)):
        if part:
            lines.append(f"  {label:<5} {part}")
    return "\n".join(printable(line.replace("\n", "\\n")) for line in lines)


def render_all(value: Any, face: Face) -> Any:
    """Return a JSON value with each of its texts rendered for a face."""
    if isinstance(value, Text):
        return face.render(value)
    if isinstance(value, Mapping):
        return {key: render_all(one, face) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [render_all(one, face) for one in value]
    return value


def rows_text(rows: Sequence[tuple[str, str]]) -> str:
    """Return labelled lines: the label padded, so that the texts stand in one column."""
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(printable(f"{label:<{width}}  {text}".replace("\n", "\\n")) for label, text in rows)
