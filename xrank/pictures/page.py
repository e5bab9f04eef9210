"""HTML in one file without fonts or addresses: whole pages, and fragments for notebooks and docs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from xrank.pictures.stylesheet import PAGE_STYLE, SEARCH_SCRIPT, SEARCH_SCRIPT_HASH, STYLE
from xrank.words import one_line


def page(title: str, body: Iterable[str], *, is_searchable: bool = False) -> str:
    """Return a page with a title and a body of HTML lines.

    Args:
        title: any text.
        body: lines of HTML.
        is_searchable: whether the body has a field of the id "search", which a script of the page serves.
    """
    lines = "\n".join(body)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    script = ""
    if is_searchable:
        policy += f"; script-src 'sha256-{SEARCH_SCRIPT_HASH}'"
        script = f"<script>{SEARCH_SCRIPT}</script>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{page_text(title)}</title><style>{STYLE}{PAGE_STYLE}</style></head>"
        f'<body><main class="xrank">\n{lines}\n</main>{script}</body></html>\n'
    )


def fragment(body: Iterable[str]) -> str:
    """Return HTML lines with their style, for a notebook or another page, whose colours they take."""
    lines = "\n".join(body)
    return f'<div class="xrank"><style>{STYLE}</style>\n{lines}\n</div>\n'


def page_text(text: str) -> str:
    """Return any text as HTML on one line."""
    return escape(one_line(text))


def draw_facts(facts: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield figures in large letters, each above what it counts."""
    yield '<div class="facts">'
    for figure, words in facts:
        yield f"<div><b>{page_text(figure)}</b><span>{page_text(words)}</span></div>"
    yield "</div>"


def draw_rows(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield a table of labels and texts."""
    yield "<table>"
    for label, text in rows:
        yield f"<tr><th>{page_text(label)}<td>{page_text(text)}"
    yield "</table>"
