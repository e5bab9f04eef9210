"""A timeline: lanes one below the other, with spans of time in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xrank.pictures.page import page_text
from xrank.pictures.stylesheet import colour, swatch

_WIDTH, _LANE_HEIGHT, _GAP = 960, 22, 4
_LABEL_WIDTH = 6.6
_MAX_SPANS = 8192


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time in a lane."""

    start: float
    length: float
    kind: int
    """Index of the name of its kind, which gives the colour."""
    label: str
    title: str
    """Text for a pointer that rests on it."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline."""

    name: str
    spans: tuple[Span, ...]


def draw_timeline(lanes: Sequence[Lane], kinds: Sequence[str], unit: str) -> Iterator[str]:
    """Yield a legend, and a drawing of the lanes on one axis of time from 0 on.

    Args:
        lanes: rows from top to bottom.
        kinds: names of the kinds of spans.
        unit: name of a unit of time, such as "cycle".
    """
    end = max((span.start + span.length for lane in lanes for span in lane.spans), default=1.0)
    left = round(12 + max((len(lane.name) for lane in lanes), default=0) * _LABEL_WIDTH)
    per_unit = min(_WIDTH / end, 40.0)
    width, height = left + round(end * per_unit) + 12, len(lanes) * (_LANE_HEIGHT + _GAP) + 18
    keys = (swatch(number, page_text(kind)) for number, kind in enumerate(kinds))
    yield f'<p class="legend">{" ".join(keys)}</p>'
    yield f'<div class="wide"><svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">'
    left_over = _MAX_SPANS
    for row, lane in enumerate(lanes):
        y = row * (_LANE_HEIGHT + _GAP)
        middle = y + _LANE_HEIGHT / 2
        yield f'<text class="label" x="0" y="{middle}" dominant-baseline="central">{page_text(lane.name)}</text>'
        yield f'<rect class="ground" x="{left}" y="{y}" width="{end * per_unit:.2f}" height="{_LANE_HEIGHT}"/>'
        for span in lane.spans[:left_over]:
            yield _draw_span(span, left + span.start * per_unit, y, span.length * per_unit)
        left_over = max(left_over - len(lane.spans), 0)
    yield from _draw_axis(end, per_unit, left, height, unit)
    yield "</svg></div>"


def _draw_span(span: Span, x: float, y: float, width: float) -> str:
    chosen = colour(span.kind)
    drawn = (
        f'<rect class="box" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE_HEIGHT}" '
        f'fill="{chosen.fill}"><title>{page_text(span.title)}</title></rect>'
    )
    if len(span.label) * _LABEL_WIDTH > width:
        return drawn
    place = f'x="{x + width / 2:.2f}" y="{y + _LANE_HEIGHT / 2}" text-anchor="middle" dominant-baseline="central"'
    return f'{drawn}<text {place} pointer-events="none" fill="{chosen.ink}">{page_text(span.label)}</text>'


def _draw_axis(end: float, per_unit: float, left: int, height: int, unit: str) -> Iterator[str]:
    """Yield numbers below the lanes, at distances of 1, 2 or 5 times a power of ten."""
    step = next(
        base * power
        for power in (10**exponent for exponent in range(12))
        for base in (1, 2, 5)
        if base * power * per_unit >= 44
    )
    for at in range(0, int(end) + 1, step):
        text = f"{unit} {at}" if at == 0 else f"{at:,}"
        anchor = "start" if at == 0 else "middle"
        place = f'x="{left + at * per_unit:.2f}" y="{height - 5}" text-anchor="{anchor}"'
        yield f'<text class="label" {place}>{text}</text>'
