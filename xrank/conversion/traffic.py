"""Adds the requests to object stores to the reports of commands."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ParamSpec

from xrank.making.rank_traffic import take_traffic
from xrank.plan.report import Report
from xrank.plan.report_facts import TrafficFacts
from xrank.words import plural, size_text

Parameters = ParamSpec("Parameters")


def counts_requests(call: Callable[Parameters, Report]) -> Callable[Parameters, Report]:
    """Let a command's report have the requests that this process sent meanwhile; without any, it stays as it is."""

    @functools.wraps(call)
    def counted(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Report:
        before = begin_counting()
        return with_traffic(call(*args, **kwargs), before)

    return counted


def begin_counting() -> dict[str, int]:
    """Return the counts of this process before a command, for `with_traffic`."""
    take_traffic()  # what came before is not for another rank's report
    return _read_counts()


def with_traffic(report: Report, before: dict[str, int]) -> Report:
    """Return a report with the requests that this process, and other ranks of its team, have sent since then."""
    counts = {name: count - before.get(name, 0) for name, count in _read_counts().items()}
    if not counts.get("requests"):
        return report
    traffic = (report.traffic or TrafficFacts()).extended(**counts)
    return replace(report, traffic=traffic, notes=(*report.notes, ("requests", _describe(traffic))))


def _read_counts() -> dict[str, int]:
    # A command without a URL never imports the client.
    client: Any = sys.modules.get("xrank.stores.client")
    if client is None:
        return {}
    now = client.traffic()
    return {one.name: getattr(now, one.name) for one in fields(now)}


def _describe(traffic: TrafficFacts) -> str:
    again = f", {traffic.retries:,} of them again after a failure" if traffic.retries else ""
    written = f", {size_text(traffic.written_nbytes)} written" if traffic.written_nbytes else ""
    text = f"{plural(traffic.requests, 'request')} to the store{again}: {size_text(traffic.read_nbytes)} read{written}"
    ways = (
        ("read", traffic.planned_requests, traffic.planned_nbytes),
        ("write", traffic.planned_written_requests, traffic.planned_written_nbytes),
    )
    planned = [f"{plural(count, 'request')} to {way} {size_text(nbytes)}" for way, count, nbytes in ways if count]
    return f"{text}; the tensors will take {', '.join(planned)}" if planned else text
