"""The commands of `xrank layout` as calls that return reports."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

from xrank.conversion.report import survey_facts
from xrank.decisions.layout_sources import (
    file_text,
    filter_tensors,
    is_layout_file,
    layouts_at,
    read_source,
    with_numbers,
)
from xrank.errors import UsageError
from xrank.layout.layout_diff import LayoutDiff
from xrank.layout.layout_file import write_whole
from xrank.pictures.text_picture import share_words
from xrank.plan.holdings import Holdings, Survey
from xrank.plan.report import Report
from xrank.plan.report_facts import LayoutDetails, OutputFacts, SourceFacts
from xrank.system import peak_rss_nbytes


def show_layouts(path: str, *, tensor: str | None = None, toml: bool = False) -> tuple[Report, Survey, str | None]:
    """Return the report of the layouts at a path, the survey of ranks' parts, and the text of a layout file.

    Args:
        path: a layout file, or a source that records layouts.
        tensor: a regular expression for whole names.
        toml: whether to make the text of a layout file with all tensors; else it is None.

    Raises:
        UsageError, LayoutError, ...: the path cannot be read, or `tensor` matches no name.
    """
    started = time.monotonic()
    source = read_source(path)
    found = filter_tensors(source.survey, tensor)
    text = file_text(source.as_map()) if toml else None
    file: dict[str, Any] = {} if text is None else {"toml": text}
    report = Report(
        command="layout show",
        path=source.path,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=SourceFacts(path=source.path, format=source.format),
        notes=source.notes if text is None else (),
        details=LayoutDetails(
            tensors=[_row(one) for one in found.tensors],
            **survey_facts(found),
            **file,
        ),
    )
    return report, found, text


def write_page(report: Report, page: str, file: str) -> Report:
    """Write the page of a report by one rename, and return the report with its path.

    Raises:
        UsageError: the file cannot be written.
    """
    content = page.encode("utf-8")
    try:
        write_whole(content, file)
    except OSError as error:
        raise UsageError(
            f"the page {file} cannot be written: {error.strerror}",
            file=file,
            next_step="name a place that can be written",
        ) from error
    return replace(report, path=file, output=OutputFacts(path=file, nbytes=len(content)))


def diff_layouts(a: str, b: str) -> tuple[Report, LayoutDiff]:
    """Return the differences of the layouts at `a` and `b`.

    Raises:
        UsageError, LayoutError, ...: one of them cannot be read, or cannot be written as a layout file.
    """
    started = time.monotonic()
    old, new = layouts_at(a), layouts_at(b)
    if is_layout_file(a) != is_layout_file(b):
        # Ranks record numbers where a file has names of sizes.
        old, new = with_numbers(old), with_numbers(new)
    found = old.diff(new)
    report = Report(
        command="layout diff",
        path=b,
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        source=SourceFacts(path=a),
        details=LayoutDetails(equal=not found, differences=asdict(found)),
    )
    return report, found


def _row(one: Holdings) -> dict[str, Any]:
    misfit = None if one.misfit is None else {**asdict(one.misfit), "ranks": list(one.misfit.ranks)}
    return {
        "name": one.name,
        "dtype": one.dtype,
        "shape": list(one.shape),
        "rule": one.rule,
        "layout": one.text,
        "parts": [
            {
                "ranks": list(share.ranks),
                "holds": share_words(one, share),
                "local_shape": None if share.shape is None else list(share.shape),
                "num_elements": share.num_elements,
                "num_padding": share.num_pads,
            }
            for share in one.shares
        ],
        "absent_ranks": list(one.absent),
        "sums": list(one.sums),
        "misfit": misfit,
        "problem": None if one.problem is None else one.problem.to_dict(),
    }
