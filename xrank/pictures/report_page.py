"""A command's report as a page: facts, source, proof, notes, the rate over time, and the files."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise

from xrank.pictures.page import draw_facts, draw_rows, page, page_text
from xrank.pictures.stylesheet import ACCENT
from xrank.plan.report import Report
from xrank.plan.report_facts import OutputFacts
from xrank.plan.report_text import report_rows
from xrank.words import plural, size_text

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
