"""Parts of HTML pages: the frame and its styles, charts of bars and times, and the page of a report."""

from __future__ import annotations

import base64
import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib import resources
from itertools import pairwise

from msgspec import Struct

from xrank.engine.report import OutputFacts, Report, report_rows
from xrank.words import one_line, plural, size_text

ACCENT = "#0072b2"

_PALETTE = ("e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7", "999999")
_SHADES = (0.0, 0.5, -0.35)
"""Shares of white, or of black where negative, that are mixed into the palette in its first, second, ... pass."""


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


STYLE = _read("style.css")

PAGE_STYLE = _read("page.css")

SEARCH_SCRIPT = _read("search.js")

SEARCH_SCRIPT_HASH = base64.b64encode(hashlib.sha256(SEARCH_SCRIPT.encode()).digest()).decode()
"""Hash of the script for the page's policy, so that no other script runs."""


class Colour(Struct, frozen=True):
    """A colour for an area, and one that can be read on it."""

    fill: str
    ink: str


def swatch(number: int, words: str) -> str:
    """Return a key of a legend: the n-th colour, and words, which are HTML."""
    return f'<span class="key"><span class="swatch" style="background:{colour(number).fill}"></span>{words}</span>'


def colour(number: int) -> Colour:
    """Return the colour of the n-th of many things; 24 differ.

    Example:
        >>> colour(0)
        Colour(fill='#e69f00', ink='#000')
    """
    base = _PALETTE[number % len(_PALETTE)]
    share = _SHADES[number // len(_PALETTE) % len(_SHADES)]
    target = 255 if share > 0 else 0
    red, green, blue = (round(v + (target - v) * abs(share)) for v in bytes.fromhex(base))
    # Relative luminance without the gamma curve is near enough to choose between black and white.
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115
    return Colour(f"#{red:02x}{green:02x}{blue:02x}", "#fff" if is_dark else "#000")


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


_CHART_WIDTH = 480


class Bar(Struct, frozen=True):
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
        yield f'<svg width="{_CHART_WIDTH}" height="14" viewBox="0 0 {_CHART_WIDTH} 14" role="img">'
        start = 0.0
        for number, part in enumerate(bar.parts):
            width = part * _CHART_WIDTH / longest
            title = f"<title>{page_text(names[number])}</title>"
            yield f'<rect x="{start:.2f}" width="{width:.2f}" height="14" fill="{colour(number).fill}">{title}</rect>'
            start += width
        yield "</svg>"
    yield "</table></div>"


_LINE_WIDTH, _LANE_HEIGHT, _GAP = 960, 22, 4
_LABEL_WIDTH = 6.6
_MAX_SPANS = 8192


class Span(Struct, frozen=True):
    """A stretch of time in a lane."""

    start: float
    length: float
    kind: int
    """Index of the name of its kind, which gives the colour."""
    label: str
    title: str
    """Text for a pointer that rests on it."""


class Lane(Struct, frozen=True):
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
    per_unit = min(_LINE_WIDTH / end, 40.0)
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


Sample = tuple[float, int]
"""Seconds since the start, and bytes done by then."""

_WIDTH, _HEIGHT, _NUM_BARS = 640, 140, 64


def report_page(report: Report, samples: Sequence[Sample] = ()) -> str:
    """Return the page of a report.

    Args:
        report: a report.
        samples: bytes done over time, by rising time; without them, no rates are drawn.
    """
    title = f"xrank {report.command}: {report.status}"
    return page(title, [f"<h1>{page_text(title)}</h1>", *draw_report(report, samples)])


def draw_report(report: Report, samples: Sequence[Sample] = ()) -> Iterator[str]:
    """Yield the HTML of a report; see `report_page`."""
    made = report.made
    facts = [(size_text(made.nbytes), "of tensors"), (f"{made.num_tensors:,}", "tensors")] if made.num_tensors else []
    facts.append((f"{report.seconds:.1f} s", "in all"))
    if made.num_tensors and report.output is not None and report.seconds:
        facts.append((f"{size_text(made.nbytes / report.seconds)}/s", "on average"))
    if report.peak_rss_nbytes:
        facts.append((size_text(report.peak_rss_nbytes), "peak memory"))
    yield from draw_facts(facts)
    yield '<div class="wide">'
    yield from draw_rows(report_rows(report))
    yield "</div>"
    if len(samples) > 2:
        yield from _draw_rates(samples)
    yield from _draw_output(made)


def _draw_rates(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield bytes per second as a bar for each of some equal stretches of time."""
    last = samples[-1][0]
    rates = [
        (after - before) * _NUM_BARS / last
        for before, after in pairwise(_done_at(samples, last * edge / _NUM_BARS) for edge in range(_NUM_BARS + 1))
    ]
    most = max(rates)
    if not most:
        return
    width = _WIDTH / _NUM_BARS
    yield "<h2>Rate over time</h2>"
    yield f"<figure><figcaption>{last:.1f} s from left to right, at most {size_text(most)}/s</figcaption>"
    yield f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">'
    yield f'<path class="ground" d="M0 0h{_WIDTH}v{_HEIGHT}h-{_WIDTH}z"/>'
    for number, rate in enumerate(rates):
        height = rate * (_HEIGHT - 8) / most
        title = f"<title>{number * last / _NUM_BARS:.1f} s: {size_text(rate)}/s</title>"
        place = f'x="{number * width:.1f}" y="{_HEIGHT - height:.1f}" width="{width - 1:.1f}" height="{height:.1f}"'
        yield f'<rect {place} fill="{ACCENT}">{title}</rect>'
    yield "</svg></figure>"


def _done_at(samples: Sequence[Sample], second: float) -> float:
    """Return the bytes done by a second, in a straight line between two samples."""
    after = min(bisect_left(samples, (second, 0)), len(samples) - 1)
    (start, before), (end, done) = samples[max(after - 1, 0)], samples[after]
    return before + (done - before) * min(max((second - start) / (end - start), 0.0), 1.0) if end > start else done


def _draw_output(made: OutputFacts) -> Iterator[str]:
    if made.files:
        yield '<h2>Files</h2><div class="wide"><table><tr><th>file<th class="number">size<th>digest'
        for file in made.files:
            yield f'<tr><td class="code">{page_text(file.name)}<td class="number">{size_text(file.nbytes)}'
            yield f'<td class="code">{page_text(file.digest or "")}'
        yield "</table></div>"
    lists = (
        ("tied", [f"{', '.join(rest)} as {target}" for target, *rest in made.tied]),
        ("cast", [f"{name}: {cast}" for name, cast in made.cast.items()]),
        ("left out", list(made.excluded)),
        ("merged with an adapter", list(made.merged)),
        ("without padding", [f"{name}: {plural(count, 'row')}" for name, count in made.padding_dropped.items()]),
    )
    for title, lines in lists:
        if lines:
            items = "".join(f"<li><code>{page_text(line)}</code>" for line in lines)
            yield f"<details><summary>{plural(len(lines), 'tensor')} {title}</summary>"
            yield f'<ul class="names">{items}</ul></details>'
