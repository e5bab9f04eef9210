"""Pictures as HTML: frame and styles, charts, the page of a report, and of layouts each tensor's parts on its ranks."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from itertools import groupby, islice, pairwise, product
from typing import Any

import numpy as np
from msgspec import Struct

from xrank.dtypes import DTYPES, by_torch_name
from xrank.engine.holdings import Holdings, Share, Survey, apply_layout, sum_held_nbytes, survey
from xrank.engine.report import OutputFacts, Report, report_rows
from xrank.errors import UsageError
from xrank.layout import DeviceMesh, LayoutMap, TensorLayout
from xrank.layout.layout_map import write_whole
from xrank.layout.terms.tensors import describe_mesh, from_placements
from xrank.pictures.text_picture import (
    Band,
    Region,
    cut_dims,
    find_bands,
    group_alike,
    misfit_words,
    region_of,
    share_words,
    survey_text,
)
from xrank.words import amount_text, join_words, one_line, plural, ranks_text, size_text

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


class Color(Struct, frozen=True):
    """A color for an area, and one that can be read on it."""

    fill: str
    ink: str


def swatch(number: int, words: str) -> str:
    """Return a key of a legend: the n-th color, and words, which are HTML."""
    return f'<span class="key"><span class="swatch" style="background:{color(number).fill}"></span>{words}</span>'


def color(number: int) -> Color:
    """Return the color of the n-th of many things; 24 differ.

    Example:
        >>> color(0)
        Color(fill='#e69f00', ink='#000')
    """
    base = _PALETTE[number % len(_PALETTE)]
    share = _SHADES[number // len(_PALETTE) % len(_SHADES)]
    target = 255 if share > 0 else 0
    red, green, blue = (round(v + (target - v) * abs(share)) for v in bytes.fromhex(base))
    # Relative luminance without the gamma curve is near enough to choose between black and white.
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 115
    return Color(f"#{red:02x}{green:02x}{blue:02x}", "#fff" if is_dark else "#000")


def page(title: str, body: Iterable[str], *, is_searchable: bool = False) -> str:
    """Return a page with a title and a body of HTML lines; if searchable, a script serves its field "search"."""
    lines = "\n".join(body)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    policy += f"; script-src 'sha256-{SEARCH_SCRIPT_HASH}'" if is_searchable else ""
    script = f"<script>{SEARCH_SCRIPT}</script>" if is_searchable else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{page_text(title)}</title><style>{STYLE}{PAGE_STYLE}</style></head>"
        f'<body><main class="xrank">\n{lines}\n</main>{script}</body></html>\n'
    )


def fragment(body: Iterable[str]) -> str:
    """Return HTML lines with their style, for a notebook or another page, whose colors they take."""
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


_CHART_WIDTH = 480


class Bar(Struct, frozen=True):
    """One bar."""

    label: str
    parts: tuple[float, ...]
    """Lengths in the order of the parts' names; none is negative."""
    words: str
    """Text beside the bar."""


def draw_stacked_bars(names: Sequence[str], bars: Sequence[Bar]) -> Iterator[str]:
    """Yield the lines of a table with the bars on one scale, and of a legend of the colors of the parts' names."""
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
            yield f'<rect x="{start:.2f}" width="{width:.2f}" height="14" fill="{color(number).fill}">{title}</rect>'
            start += width
        yield "</svg>"
    yield "</table></div>"


_LINE_WIDTH, _LANE_HEIGHT, _GAP = 960, 22, 4
_LABEL_WIDTH, _LABEL_HEIGHT = 6.6, 13
"""Width of a character and height of a line of a label, both generous, in units of the drawing."""
_MAX_SPANS = 8192


class Span(Struct, frozen=True):
    """A stretch of time in a lane."""

    start: float
    length: float
    kind: int
    """Index of the name of its kind, which gives the color."""
    label: str
    title: str
    """Text for a pointer that rests on it."""


class Lane(Struct, frozen=True):
    """One row of a timeline."""

    name: str
    spans: tuple[Span, ...]


def draw_timeline(lanes: Sequence[Lane], kinds: Sequence[str], unit: str) -> Iterator[str]:
    """Yield a legend of the kinds of spans, and the lanes on one axis of time from 0 on, in units such as "cycle"."""
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
    # Numbers below the lanes, at distances of 1, 2 or 5 times a power of ten.
    steps = (base * 10**exponent for exponent in range(12) for base in (1, 2, 5))
    for at in range(0, int(end) + 1, next(step for step in steps if step * per_unit >= 44)):
        text, anchor = (f"{unit} {at}", "start") if at == 0 else (f"{at:,}", "middle")
        place = f'x="{left + at * per_unit:.2f}" y="{height - 5}" text-anchor="{anchor}"'
        yield f'<text class="label" {place}>{text}</text>'
    yield "</svg></div>"


def _draw_span(span: Span, x: float, y: float, width: float) -> str:
    chosen = color(span.kind)
    drawn = (
        f'<rect class="box" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE_HEIGHT}" '
        f'fill="{chosen.fill}"><title>{page_text(span.title)}</title></rect>'
    )
    if len(span.label) * _LABEL_WIDTH > width:
        return drawn
    place = f'x="{x + width / 2:.2f}" y="{y + _LANE_HEIGHT / 2}" text-anchor="middle" dominant-baseline="central"'
    return f'{drawn}<text {place} pointer-events="none" fill="{chosen.ink}">{page_text(span.label)}</text>'


Sample = tuple[float, int]
"""Seconds since the start, and bytes done by then."""

_WIDTH, _HEIGHT, _NUM_BARS = 640, 140, 64


def report_page(report: Report, samples: Sequence[Sample] = ()) -> str:
    """Return the page of a report; rates are drawn of samples of the bytes done, by rising time."""
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
    yield '<div class="wide"><table>'
    for label, text in report_rows(report):
        yield f"<tr><th>{page_text(label)}<td>{page_text(text)}"
    yield "</table></div>"
    if len(samples) > 2:
        yield from _draw_rates(samples)
    yield from _draw_output(made)


def _draw_rates(samples: Sequence[Sample]) -> Iterator[str]:
    """Yield bytes per second as a bar for each of some equal stretches of time."""
    last = samples[-1][0]
    times, done = zip(*samples, strict=True)
    at_edges = np.interp(np.arange(_NUM_BARS + 1) * last / _NUM_BARS, times, done)
    rates = (np.diff(at_edges) * _NUM_BARS / last).tolist()
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


def _draw_errors(errors: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    yield "<h2>Errors of quantization</h2><p>The mean error relative to the mean magnitude, by kind of module; beside"
    yield "it the largest error, relative to the largest magnitude.</p>"
    yield from draw_stacked_bars(
        ["mean error"],
        [Bar(kind, (one["mean"],), f"{one['mean']:.2%}, {one['largest']:.2%}") for kind, one in errors.items()],
    )


def _draw_output(made: OutputFacts) -> Iterator[str]:
    if errors := made.quantized.get("errors"):
        yield from _draw_errors(errors)
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


_MAX_BOXES = 2048
"""A finely strided layout has more boxes than a page can show."""
_MAX_PANELS = 12
_BAND_WIDTH = 64
_BAND_HEIGHT = 10.5

_Run = tuple[int, int]


class _Box(Struct, frozen=True):
    """A rectangle of a part, in the indices of the two drawn dims; both ends included."""

    down: _Run
    across: _Run
    share: Share


class _Plane(Struct, frozen=True):
    """The dims of a drawing; None for a direction without one. Without any dim, all elements are drawn in a row."""

    down: int | None
    across: int | None
    num_down: int
    num_across: int

    @property
    def size(self) -> tuple[int, int]:
        if self.across is None:
            return 160, 160
        return (480, 32) if self.down is None else (480, 240)


def draw_tensor(one: Holdings) -> Iterator[str]:
    """Yield the drawings of a tensor's parts: of three cut dims, one drawing for each part of the first.

    A color belongs to a rank on the whole page; a part that several ranks hold has that of the lowest.
    """
    nests = ((share, nest) for share in one.shares for nest in share.nests)
    regions = [(share, region_of(nest, one.shape)) for share, nest in islice(nests, _MAX_BOXES)]
    cut = cut_dims((region for _, region in regions), one.shape)
    if cut is None:
        plane = _Plane(None, None, 1, math.prod(one.shape))
        boxes = [_Box((0, 0), (region.first, region.last), share) for share, region in regions]
        yield from _draw_panel(one, plane, boxes, "all elements, row by row")
        return
    plane, outer = _choose_plane(cut, one.shape)
    panels = list(islice(product(*(_stretches(regions, d) for d in outer)), _MAX_PANELS + 1))
    for panel in panels[:_MAX_PANELS]:
        sides = list(zip(outer, panel, strict=True))
        inside = [each for each in regions if _meets(each[1], sides)]
        boxes = list(islice(_boxes(plane, inside), _MAX_BOXES))
        words = "; ".join(f"dim {d}: {low if low == high else f'{low}-{high}'}" for d, (low, high) in sides)
        axes = ((plane.down, "downwards"), (plane.across, "to the right"))
        directions = ", ".join(f"dim {d} {where}" for d, where in axes if d is not None)
        yield from _draw_panel(one, plane, boxes, "; ".join(filter(None, (words, directions))))
    if len(panels) > _MAX_PANELS:
        yield f'<p class="note">only the first {_MAX_PANELS} of these drawings</p>'


def _choose_plane(cut: Sequence[int], shape: Sequence[int]) -> tuple[_Plane, Sequence[int]]:
    """Return the plane of the last two cut dims, and the cut dims before them."""
    drawn = (list(cut) or list(range(len(shape)))[:2])[-2:]
    if len(drawn) == 2:
        return _Plane(drawn[0], drawn[1], shape[drawn[0]], shape[drawn[1]]), cut[:-2]
    if not drawn:
        return _Plane(None, None, 1, 1), ()
    # One cut dim runs downwards if it is the rows, else to the right.
    if drawn[0] == 0 and len(shape) > 1:
        return _Plane(0, None, shape[0], 1), ()
    return _Plane(None, drawn[0], 1, shape[drawn[0]]), ()


def _stretches(regions: Sequence[tuple[Share, Region]], dim: int) -> list[_Run]:
    """Return a dim in pieces that no region cuts further."""
    runs = [run for _, region in regions if region.dims is not None for run in region.dims[dim]]
    bounds = sorted({first for first, _ in runs} | {last + 1 for _, last in runs})
    return [(first, end - 1) for first, end in pairwise(bounds)]


def _meets(region: Region, sides: Iterable[tuple[int, _Run]]) -> bool:
    assert region.dims is not None
    return all(any(first <= low and last >= high for first, last in region.dims[d]) for d, (low, high) in sides)


def _boxes(plane: _Plane, regions: Sequence[tuple[Share, Region]]) -> Iterator[_Box]:
    for share, region in regions:
        assert region.dims is not None
        downs = ((0, 0),) if plane.down is None else region.dims[plane.down]
        acrosses = ((0, 0),) if plane.across is None else region.dims[plane.across]
        for down, across in product(downs, acrosses):
            yield _Box(down, across, share)


def _draw_panel(one: Holdings, plane: _Plane, boxes: Sequence[_Box], caption: str) -> Iterator[str]:
    """Yield a figure: names of fused parts above and on the left, and the boxes of which each has its ranks."""
    left_bands = [] if plane.down is None else find_bands(one, plane.down)
    top_bands = [] if plane.across is None else find_bands(one, plane.across)
    left, top = _BAND_WIDTH if left_bands else 0, 16 if top_bands else 0
    width, height = plane.size
    if left_bands:
        # The thinnest part gets room for its name, in a drawing of at most 480.
        thinnest = min(band.last + 1 - band.first for band in left_bands)
        height = min(max(height, math.ceil(_BAND_HEIGHT * plane.num_down / thinnest)), 480)
    yield f"<figure><figcaption>{page_text(caption)}</figcaption>"
    yield f'<svg width="{width + left}" height="{height + top}" viewBox="0 0 {width + left} {height + top}" role="img">'
    yield from _draw_bands(left_bands, plane.num_down, height, top, is_down=True)
    yield from _draw_bands(top_bands, plane.num_across, width, left, is_down=False)
    yield f'<g transform="translate({left},{top})"><path class="ground" d="M0 0h{width}v{height}h-{width}z"/>'
    for box in boxes:
        yield _draw_box(one, box, width / plane.num_across, height / plane.num_down)
    yield "</g></svg></figure>"


def _draw_box(one: Holdings, box: _Box, per_column: float, per_row: float) -> str:
    x, y = box.across[0] * per_column, box.down[0] * per_row
    width = (box.across[1] + 1 - box.across[0]) * per_column
    height = (box.down[1] + 1 - box.down[0]) * per_row
    chosen, is_lost = color(box.share.ranks[0]), set(one.lost).issuperset(box.share.ranks)
    ranks = ranks_text(box.share.ranks, compact=True)
    title = f"<title>{page_text(ranks)}{', lost' * is_lost}: {page_text(share_words(one, box.share))}</title>"
    drawn = (
        f'<rect class="box{" lost" * is_lost}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'fill="{chosen.fill}">{title}</rect>'
    )
    # "ranks 0-3", or shorter: "0-3", "0,..".
    bare = ranks.partition(" ")[2].partition(" (")[0]
    labels = (ranks, bare, *([bare.partition(",")[0] + ",.."] if "," in bare else ()))
    label = next((text for text in labels if len(text) * _LABEL_WIDTH <= width), None)
    if label is None or height < _LABEL_HEIGHT:
        return drawn
    middle = f'x="{x + width / 2:.2f}" y="{y + height / 2:.2f}"'
    place = f'{middle} text-anchor="middle" dominant-baseline="central" pointer-events="none"'
    return f'{drawn}<text {place} fill="{chosen.ink}">{page_text(label)}</text>'


def _draw_bands(bands: Sequence[Band], length: int, extent: int, offset: int, *, is_down: bool) -> Iterator[str]:
    """Yield a bracket and a name for each fused part, along the left edge or the top one."""
    for band in bands:
        start = offset + band.first * extent / length + 0.75
        end = offset + (band.last + 1) * extent / length - 0.75
        middle = (start + end) / 2
        if is_down:
            place = f'x="{_BAND_WIDTH - 10}" y="{middle:.2f}" text-anchor="end" dominant-baseline="central"'
            edge, fits = f"M{_BAND_WIDTH - 3} {start:.2f}h-4V{end:.2f}h4", end - start >= _BAND_HEIGHT - 2
        else:
            place = f'x="{middle:.2f}" y="9" text-anchor="middle"'
            edge, fits = f"M{start:.2f} 15v-3H{end:.2f}v3", end - start >= len(band.name) * _LABEL_WIDTH
        yield f'<path class="edge" d="{edge}"/>'
        if fits:
            yield f'<text class="label" {place}>{page_text(band.name[:8])}</text>'


_MAX_ROWS = 64
"""Number of bars of bytes."""
_NUMBER = re.compile(r"\d+")


def draw_summary(found: Survey, groups: Sequence[Sequence[Holdings]]) -> Iterator[str]:
    """Yield the facts of a survey, and a table of each kind of cut."""
    is_known = all(one.dtype in DTYPES for one in found.tensors)  # then sizes are bytes
    held = sum_held_nbytes(found.tensors, lambda dtype: DTYPES[dtype].nbytes if is_known and dtype else 1)
    facts = [(f"{len(found.tensors):,}", "tensor" if len(found.tensors) == 1 else "tensors")]
    facts += [(f"{len(groups):,}", "different shapes and layouts")] if len(groups) < len(found.tensors) else []
    facts += [(f"{sum(math.prod(one.shape) for one in found.tensors):,}", "elements")]
    if is_known:
        total = sum(math.prod(one.shape) * DTYPES[one.dtype].nbytes for one in found.tensors if one.dtype in DTYPES)
        facts.append((size_text(total), "of tensors"))
    if held:
        low, high = (amount_text(limit(held.values()), is_known) for limit in (min, max))
        facts += [(f"{len(held):,}", "rank" if len(held) == 1 else "ranks")]
        facts += [(low if low == high else f"{low} to {high}", "on each rank")]
    yield from draw_facts(facts)
    yield '<div class="side"><div class="wide">'
    yield from _draw_kinds(found.tensors, is_known)
    yield '</div><div class="wide">'
    if held:
        yield from _draw_amounts(held, is_known)
    yield "</div></div>"


def cut_words(one: Holdings) -> str:
    """Return how a tensor is cut: ``dim 0 by tp``, ``whole on each rank``."""
    if one.problem is not None:
        return "unknown"
    if one.rule is None and not one.shares:
        return "no rule"
    some = " of some" if one.absent else ""
    if one.layout is not None and len(one.layout.dims) == len(one.shape):
        cuts = [(d, axes) for d, axes in enumerate(one.layout.axes) if axes]
        words = [f"dim {d} by {join_words(axes)}" for d, axes in cuts]
        sums = f"addends by {join_words(one.sums)}" if one.sums else ""
        return ", ".join(filter(None, (*words, sums))) or f"whole on each rank{some}"
    if len(one.shares) == 1:
        return f"whole on each rank{some}" if len(one.shares[0].ranks) > 1 else "whole on one rank"
    regions = (region_of(nest, one.shape) for share in one.shares[:64] for nest in share.nests)
    dims = cut_dims(regions, one.shape)
    return "rows cut within" if dims is None else f"{join_words(f'dim {d}' for d in dims)} in pieces"


def pattern_of(group: Sequence[Holdings]) -> str:
    """Return the names of a group as one: ``layers.*.up.weight`` if they differ only in numbers, else the first."""
    first = group[0].name
    numbers = [_NUMBER.findall(one.name) for one in group]
    if len({_NUMBER.sub("*", one.name) for one in group}) > 1 or len(group) == 1:
        return first
    is_fixed = iter([len(set(column)) == 1 for column in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda match: match.group() if next(is_fixed) else "*", first)


def _draw_kinds(tensors: Iterable[Holdings], is_known: bool) -> Iterator[str]:
    kinds: dict[str, list[Holdings]] = {}
    for one in tensors:
        kinds.setdefault(cut_words(one), []).append(one)
    yield '<h2>Kinds of cuts</h2><table><tr><th>cut<th class="number">tensors<th class="number">size'
    for words, members in kinds.items():
        widths = ((one, DTYPES[one.dtype].nbytes if is_known and one.dtype else 1) for one in members)
        size = sum(math.prod(one.shape) * width for one, width in widths)
        yield f'<tr><td>{page_text(words)}<td class="number">{len(members):,}'
        yield f'<td class="number">{amount_text(size, is_known)}'
    yield "</table>"


def _draw_amounts(held: dict[int, int], is_known: bool) -> Iterator[str]:
    """Yield a bar for each run of ranks whose amounts read alike."""
    runs = [[*run] for _, run in groupby(held.items(), lambda one: amount_text(one[1], is_known))]
    most = max(held.values()) or 1
    yield "<h2>Each rank holds</h2><table>"
    for run in runs[:_MAX_ROWS]:
        amount = run[0][1]
        ranks = page_text(ranks_text(rank for rank, _ in run))
        yield f'<tr><th>{ranks}<td class="number">{amount_text(amount, is_known)}'
        yield f'<td><div class="bar" style="width:{amount * 16 / most:.2f}em"></div>'
    yield "</table>"
    if len(runs) > _MAX_ROWS:
        rest = [rank for run in runs[_MAX_ROWS:] for rank, _ in run]
        amounts = [run[0][1] for run in runs[_MAX_ROWS:]]
        limits = f"{amount_text(min(amounts), is_known)} to {amount_text(max(amounts), is_known)}"
        yield f'<p class="note">{page_text(ranks_text(rest, compact=True))}: {limits}</p>'


_MAX_RANKS = 4096
"""Ranks drawn of a mesh."""
_MAX_LISTED = 12
"""Tensors up to which a page has no list of them."""


def layout_html(
    layouts: LayoutMap,
    shapes: Mapping[str, Sequence[int]],
    *,
    dtypes: Mapping[str, str] | None = None,
    max_parts: int = 64,
) -> str:
    """Return a page with a summary, the mesh, the rules, and a picture of each tensor.

    Args:
        layouts: cut of each tensor, with a mesh.
        shapes: global shape by name.
        dtypes: safetensors name of the element type by name; without it, sizes are in elements.
        max_parts: number of parts of one tensor that are listed.
    """
    return survey_html(survey(layouts, shapes, dtypes=dtypes), max_parts=max_parts)


def survey_html(found: Survey, *, max_parts: int = 64) -> str:
    """Return the page of a survey; see `layout_html`."""
    body = ["<h1>Layouts</h1>", *draw_survey(found, max_parts=max_parts, is_searchable=True)]
    return page("Layouts", body, is_searchable=True)


def inspect_html(report: Report, found: Survey | None) -> str:
    """Return the page of an `xrank inspect`: its faults, what can be had, and the parts of tensors on ranks."""
    details, title = report.details, f"xrank inspect {report.path}"
    body = [f"<h1>{page_text(title)}</h1>"]
    missing, faults = details["missing"], details["problems"]
    body += draw_facts([(f"{len(faults):,}", "faults"), (f"{len(missing):,}", "tensors not whole")])
    body.append('<div class="wide"><table><tr><th>fault<th>rank<th>what<th>next')
    for one in faults:
        cells = (one["type"], "" if one["rank"] is None else str(one["rank"]), one["message"], one["try"] or "")
        body.append("<tr>" + "".join(f"<td>{page_text(cell)}" for cell in cells))
    body.append("<tr><th>to get<th><th>command<th>")
    for one in details["commands"]:
        body.append(f'<tr><td>{page_text(one["what"])}<td><td class="code">{page_text(one["command"])}<td>')
    body += ["</table></div>", *(() if found is None else draw_survey(found, is_searchable=True))]
    return page(title, body, is_searchable=True)


def draw_survey(found: Survey, *, max_parts: int = 64, is_searchable: bool = False) -> Iterator[str]:
    """Yield the HTML of a survey."""
    groups = group_alike(found.tensors)
    is_model = len(found.tensors) > 1
    if is_model:
        yield from draw_summary(found, groups)
    for name, mesh in found.meshes.items():
        yield f"<h2>{page_text(name.capitalize())} <code>{page_text(mesh.grid)}</code></h2>"
        yield from _draw_mesh(mesh)
    if found.rules and is_model:
        rows = (f'<tr><td class="code">{page_text(k)}<td class="code">{page_text(v)}' for k, v in found.rules.items())
        yield f"<details{'' if len(found.rules) > _MAX_LISTED else ' open'}><summary>{plural(len(found.rules), 'rule')}"
        yield '</summary><div class="wide"><table><tr><th>tensor or pattern<th>layout'
        yield from rows
        yield "</table></div></details>"
    for title, names in (
        ("Tensors without a rule", found.unmatched),
        ("Rules that match no tensor", found.unused),
    ):
        if names:
            yield f'<h2 class="bad">{title}</h2><ul>'
            yield from (f"<li><code>{page_text(n)}</code>" for n in names)
            yield "</ul>"
    if is_model:
        yield "<h2>Tensors</h2>"
    if is_searchable:
        yield '<p class="search" hidden><input id="search" type="search" placeholder="part of a name, a cut, bf16 ..."'
        yield ' aria-label="Search tensors"> <span id="found" class="note"></span></p>'
    if len(groups) > _MAX_LISTED:
        yield from _draw_list(groups)
    for number, group in enumerate(groups):
        yield from _draw_group(number, group, max_parts)


def _draw_mesh(mesh: DeviceMesh) -> Iterator[str]:
    """Yield a row for each place along all axes but the last, and a column for each place along the last."""
    *outer, across = mesh.axis_names
    length = mesh.shape[-1]
    if mesh.size > _MAX_RANKS or length > 64:
        yield f"<p>{page_text(ranks_text(mesh.ranks, compact=True))}</p>"
        return
    heads = "".join(f"<th>{page_text(across)}={i}" for i in range(length))
    yield f'<div class="wide"><table class="mesh"><tr><th>{heads}'
    for row in range(mesh.size // length):
        ranks = mesh.ranks[row * length : (row + 1) * length]
        place = mesh.coordinate(ranks[0])
        name = " ".join(f"{axis}={place[axis]}" for axis in outer)
        yield f"<tr><th>{page_text(name) or 'rank'}" + "".join(f"<td>{swatch(rank, str(rank))}" for rank in ranks)
    yield "</table></div>"


def _draw_list(groups: Sequence[Sequence[Holdings]]) -> Iterator[str]:
    yield '<div class="wide"><table><tr><th>tensors<th class="number">number<th>type<th>shape<th>cut'
    for number, group in enumerate(groups):
        one = group[0]
        yield (
            f'<tr {_search_marks(number, group)}><td class="code"><a href="#t{number}">{page_text(pattern_of(group))}'
            f'</a><td class="number">{len(group):,}<td>{page_text(one.dtype or "")}<td>{list(one.shape)}'
            f"<td>{page_text(cut_words(one))}"
        )
    yield "</table></div>"


def _search_marks(number: int, group: Sequence[Holdings]) -> str:
    one = group[0]
    words = (*(each.name for each in group), one.dtype or "", one.text or "", cut_words(one))
    return f'data-group="{number}" data-names="{page_text(" ".join(words))}"'


def _draw_group(number: int, group: Sequence[Holdings], max_parts: int) -> Iterator[str]:
    one = group[0]
    yield f'<section class="tensor" id="t{number}" {_search_marks(number, group)}>'
    yield f"<h3><code>{page_text(pattern_of(group))}</code></h3>"
    facts = (page_text(one.dtype or ""), str(list(one.shape)), f"<code>{page_text(one.text or '')}</code>")
    yield f"<div>{' '.join(filter(None, facts))}"
    rule = f", by the rule <code>{page_text(one.rule)}</code>" if one.rule not in {None, one.name} else ""
    yield f' <span class="note">{page_text(cut_words(one))}{rule}</span></div>'
    if len(group) > 1:
        names = "".join(f"<li><code>{page_text(other.name)}</code>" for other in group)
        yield f'<details><summary>{len(group):,} tensors alike</summary><ul class="names">{names}</ul></details>'
    if one.problem is not None:
        yield f'<p class="bad">{page_text(one.problem.message)}</p>'
    if one.misfit is not None:
        yield f'<p class="bad">{page_text(misfit_words(one))}</p>'
    if one.lost:
        yield f'<p class="bad">lost: the part of {page_text(ranks_text(one.lost, compact=True))}</p>'
    if one.sums:
        yield f"<p>partial sums: the values are the sums over {page_text(', '.join(one.sums))}</p>"
    if one.shares:
        yield '<div class="side"><div class="pictures">'
        yield from draw_tensor(one)
        yield '</div><div class="fill wide">'
        yield from _draw_parts(one, max_parts)
        yield "</div></div>"
    yield "</section>"


def _draw_parts(one: Holdings, max_parts: int) -> Iterator[str]:
    shown = one.shares[:max_parts]
    width, is_known = (DTYPES[one.dtype].nbytes, True) if one.dtype in DTYPES else (1, False)
    has_shapes = any(share.shape is not None for share in shown)
    yield f"<table><tr><th>ranks<th>part{'<th>local shape' if has_shapes else ''}<th>size"
    for share in shown:
        amount = amount_text((share.num_elements + share.num_pads) * width, is_known)
        pads = f", of it padding {amount_text(share.num_pads * width, is_known)}" if share.num_pads else ""
        shape = f'<td class="key">{list(share.shape or ())}' if has_shapes else ""
        yield (
            f"<tr><td>{swatch(share.ranks[0], page_text(ranks_text(share.ranks, compact=True)))}"
            f"<td>{page_text(share_words(one, share))}{shape}"
            f'<td class="key">{amount}{pads}'
        )
    yield "</table>"
    if len(one.shares) > max_parts:
        yield f'<p class="note">{len(one.shares) - max_parts:,} more parts are not listed</p>'
    if one.absent:
        yield f'<p class="note">{page_text(ranks_text(one.absent, compact=True))}: without it</p>'


class Picture(Struct, frozen=True):
    """One picture: text in a terminal, HTML in a notebook."""

    title: str
    text: str
    body: tuple[str, ...]
    """Lines of HTML."""

    def __repr__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the picture for a notebook."""
        return fragment(self.body)

    def to_html(self) -> str:
        """Return the picture as a page that needs nothing else."""
        return page(self.title, [f"<h1>{page_text(self.title)}</h1>", *self.body])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page by one rename, or raise OSError."""
        write_whole(self.to_html().encode("utf-8"), os.fspath(path))


def show(what: Any, shape: Sequence[int] | Mapping[str, Sequence[int]] | None = None) -> Picture:
    """Return the picture of which rank holds which part; a notebook draws it as the last line of a cell.

    Reads no tensor's values and sends no messages, so one rank may call it alone.

    Args:
        what: a DTensor; a mapping of names to DTensors, such as a state dict; a `TensorLayout` with a mesh; a
            `LayoutMap`; the report of a command; or an object with a method ``picture``, such as a pipeline's
            `Schedule`.
        shape: global shape of a `TensorLayout`, or those of a `LayoutMap` by name.

    Raises:
        UsageError: `what` has no layout, or its shape is missing.
        LayoutError: the layout does not fit the shape.

    Example:
        >>> from xrank.layout import DeviceMesh, TensorLayout
        >>> from xrank.pictures import show
        >>> show(TensorLayout.parse("[f/tp, h]", DeviceMesh((2,), ("tp",))), (4, 2))
        mesh   tp=2: ranks 0-1
        <BLANKLINE>
        tensor [4, 2]  [f/tp, h]
          rank 0  ##..  rows 0-1  local [2, 2], 4 elements
          rank 1  ..##  rows 2-3  local [2, 2], 4 elements
        <BLANKLINE>
        each rank holds
          ranks 0-1  4 elements
    """
    if isinstance(what, Picture):
        return what
    if isinstance(what, Report):
        return Picture(f"xrank {what.command}", str(what), tuple(draw_report(what)))
    if hasattr(what, "picture"):
        made = what.picture()
        assert isinstance(made, Picture)
        return made
    if isinstance(what, LayoutMap):
        if not isinstance(shape, Mapping):
            raise _shape_error("a LayoutMap", "a mapping of names to global shapes")
        return _picture_survey(survey(what, shape))
    if isinstance(what, TensorLayout):
        return _picture_survey(_survey_tensors([_layout_holdings(what, shape)]))
    if isinstance(what, Mapping):
        tensors = [_tensor_holdings(str(name), one) for name, one in what.items() if hasattr(one, "placements")]
        if tensors:
            return _picture_survey(_survey_tensors(tensors))
    elif hasattr(what, "placements"):
        return _picture_survey(_survey_tensors([_tensor_holdings("tensor", what)]))
    got = type(what).__name__
    want = "a DTensor, a mapping of names to DTensors, a TensorLayout, a LayoutMap, a report or a Schedule"
    next_step = "describe it: show(TensorLayout.parse(TEXT, mesh), shape)"
    raise UsageError("this object has no layout that can be drawn", got=got, want=want, next_step=next_step)


def _shape_error(subject: str, want: str) -> UsageError:
    return UsageError(f"drawing {subject} needs global shapes, but none are given", want=want, next_step="pass shape=")


def _layout_holdings(layout: TensorLayout, shape: Any) -> Holdings:
    if shape is None or isinstance(shape, Mapping):
        raise _shape_error("a TensorLayout", "its global shape")
    if layout.device_mesh is None:
        what = "a TensorLayout without a mesh has no ranks to draw"
        raise UsageError(what, got=repr(layout), want="a layout with a mesh", next_step="use layout.with_mesh(mesh)")
    return apply_layout(Holdings("tensor", tuple(shape), rule="tensor"), layout, layout.device_mesh)


def _tensor_holdings(name: str, tensor: Any) -> Holdings:
    mesh = describe_mesh(tensor.device_mesh)
    layout = from_placements(mesh, tensor.placements, len(tensor.shape))
    start = Holdings(name, tuple(tensor.shape), by_torch_name(str(tensor.dtype).removeprefix("torch.")).name, rule=name)
    return apply_layout(start, layout, mesh)


def _survey_tensors(tensors: Iterable[Holdings]) -> Survey:
    found = tuple(tensors)
    meshes = {one.mesh.grid: one.mesh for one in found if one.mesh is not None}
    named = {"mesh" if len(meshes) == 1 else f"mesh {number}": mesh for number, mesh in enumerate(meshes.values())}
    return Survey(named, {}, found)


def _picture_survey(found: Survey) -> Picture:
    title = found.tensors[0].name if len(found.tensors) == 1 else "Layouts"
    return Picture(title, survey_text(found), tuple(draw_survey(found)))
