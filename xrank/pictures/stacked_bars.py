"""Stacked bars, one below the other, for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xrank.pictures.page import page_text
from xrank.pictures.stylesheet import colour, swatch

_WIDTH = 480


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar."""

    label: str
    parts: tuple[float, ...]
    """Lengths in the order of the parts' names; none is negative."""
    words: str
    """Text beside the bar."""


def draw_stacked_bars(names: Sequence[str], bars: Sequence[Bar]) -> Iterator[str]:
    """Yield the lines of a table with the bars on one scale, and of a legend of the colours.

    Args:
        names: names of the parts.
        bars: bars from top to bottom.
    """
    longest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    keys = " ".join(swatch(number, page_text(name)) for number, name in enumerate(names))
    yield f'<p class="legend">{keys}</p><div class="wide"><table>'
    for bar in bars:
        yield f'<tr><th>{page_text(bar.label)}<td class="number">{page_text(bar.words)}<td>'
        yield f'<svg width="{_WIDTH}" height="14" viewBox="0 0 {_WIDTH} 14" role="img">'
        start = 0.0
        for number, part in enumerate(bar.parts):
            width = part * _WIDTH / longest
            title = f"<title>{page_text(names[number])}</title>"
            yield f'<rect x="{start:.2f}" width="{width:.2f}" height="14" fill="{colour(number).fill}">{title}</rect>'
            start += width
        yield "</svg>"
    yield "</table></div>"
