"""An HTML page in one file without scripts, fonts or addresses, and the elements that several pages share."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from xrank.words import one_line

__all__ = ["colour", "page", "page_text"]

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2em auto;max-width:70em;padding:0 1em;color:#222}
code,td.code{font-family:ui-monospace,monospace} h2{margin:1.6em 0 .4em;font-size:1.1em}
table{border-collapse:collapse;margin:.4em 0} td,th{border:1px solid #ccc;padding:.15em .5em;text-align:left}
.bad{color:#b00020;font-weight:bold} .note{color:#666} svg{display:block;margin:.5em 0;background:#f3f3f3}
.bar{background:#4878a8;height:.8em} .mesh td{text-align:center;min-width:2em} td.number{text-align:right}
"""


def page(title: str, body: Iterable[str]) -> str:
    """Return the page with a title and a body of HTML lines."""
    lines = "\n".join(body)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{page_text(title)}</title><style>{_STYLE}</style></head><body>\n{lines}\n</body></html>\n"
    )


def page_text(text: str) -> str:
    """Return any text as HTML on one line."""
    return escape(one_line(text))


def colour(number: int) -> str:
    """Return the colour of the n-th of many things."""
    # Steps of the golden angle make neighbours differ.
    return f"hsl({number * 137.5 % 360:.0f} 55% {62 if number % 2 else 50}%)"
