"""Fits the rates of a machine to measured small conversions, to predict larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from xrank.errors import UsageError
from xrank.layout.nest_table import IntArray
from xrank.simulation.rates import NO_LIMIT, Rates
from xrank.simulation.traffic import ConversionTraffic
from xrank.virtual.costs.link_model import LinkModel
from xrank.virtual.costs.unit_seconds import unit_seconds


class Sample(NamedTuple):
    """A measured conversion."""

    traffic: ConversionTraffic
    seconds: float


def fit_rates(samples: Sequence[Sample]) -> Rates:
    """Fit rates to the samples' times by least squares, with equal weights.

    A rate that no sample exercises is unknown; a rate that the samples do not need has no limit. If two kinds of work
    always occur in one proportion, their rates are valid only for work in that proportion.

    Raises:
        UsageError: the samples are missing, or one has no positive time.
    """
    if not samples or not all(sample.seconds > 0 for sample in samples):
        raise UsageError("fitting rates needs measured times", want="samples of more than 0 seconds")
    seconds = np.array([sample.seconds for sample in samples])
    # Dividing by the seconds gives samples equal weights in the least squares.
    columns = np.array([_amounts(sample.traffic) for sample in samples]) / seconds[:, None]
    is_used = columns.any(axis=0)
    start, *others, latency = map(float, unit_seconds(columns))
    memory, read, write, bandwidth = (
        (1 / one if one else NO_LIMIT) if known else None for one, known in zip(others, is_used[1:5], strict=True)
    )
    # An infinite bandwidth means unknown in `Rates`.
    link = LinkModel(latency, inf if bandwidth is None else bandwidth)
    return Rates(read=read, write=write, memory=memory, link=link, start_seconds=start)


def _amounts(traffic: ConversionTraffic) -> tuple[float, ...]:
    """Return the busiest ranks' amounts: (starts, from memory, from files, written, exchanged, messages)."""

    def most(amounts: Sequence[IntArray]) -> float:
        return float(sum(int(each.max(initial=0)) for each in amounts))

    rounds = traffic.rounds
    return (
        1.0,
        most([traffic.compared_nbytes, *(one.own_nbytes for one in rounds)]),
        most([one.read_nbytes for one in rounds]),
        most([one.written_nbytes for one in rounds]),
        most([np.maximum(one.taken_nbytes, one.given_nbytes) for one in rounds]),
        most([one.messages for one in rounds]),
    )
