"""Words and numbers as the commands print them."""

from __future__ import annotations

from collections.abc import Sequence

from xrank.errors import XrankError

__all__ = ["error_text", "printable", "rows_text"]


def printable(text: str) -> str:
    """Return text with every control character escaped: a name found in a file must not steer a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def error_text(error: XrankError) -> str:
    """Return an error in the grammar of all commands: one line that names the thing, then got, want, try."""
    lines = [f"xrank: {type(error).__name__}: {error.message}"]
    step = f"{error.next_step} (exit {error.exit_code})" if error.next_step else f"(exit {error.exit_code})"
    for label, part in (("got", error.got), ("want", error.want), ("try", step)):
        if part:
            lines.append(f"  {label:<5} {part}")
    return "\n".join(printable(line.replace("\n", "\\n")) for line in lines)


def rows_text(rows: Sequence[tuple[str, str]]) -> str:
    """Return labelled lines: the label padded, so that the texts stand in one column."""
    width = max((len(label) for label, _ in rows), default=0)
    return "\n".join(printable(f"{label:<{width}}  {text}".replace("\n", "\\n")) for label, text in rows)
