"""Rates that come nearest to what was measured: from some small conversions, for the prediction of larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from xrank.errors import UsageError
from xrank.layout.nest_table import IntArray
from xrank.simulation.rates import NO_LIMIT, Rates
from xrank.simulation.traffic import Traffic
from xrank.virtual.costs.link_model import LinkModel
from xrank.virtual.costs.unit_seconds import unit_seconds

__all__ = ["Sample", "fitted_rates"]


class Sample(NamedTuple):
    """A conversion that was measured."""

    traffic: Traffic
    seconds: float


def fitted_rates(samples: Sequence[Sample]) -> Rates:
    """Return the rates by which the samples' traffic takes most nearly their seconds, all weighing alike.

    A rate of something that no sample does is not known; one that the samples do not need has no limit. Where samples
    do two things always in one proportion, their rates are good only for what does them so, too.

    Raises:
        UsageError: there are no samples, or some took no time.
    """
    if not samples or not all(sample.seconds > 0 for sample in samples):
        raise UsageError("rates are fitted to measured times", want="samples of more than 0 seconds")
    seconds = np.array([sample.seconds for sample in samples])
    columns = np.array([_amounts(sample.traffic) for sample in samples]) / seconds[:, None]
    is_used = columns.any(axis=0)
    start, *others, latency = map(float, unit_seconds(columns))
    memory, read, write, bandwidth = (
        (1 / one if one else NO_LIMIT) if known else None for one, known in zip(others, is_used[1:5], strict=True)
    )
    link = LinkModel(latency, inf if bandwidth is None else bandwidth)
    return Rates(read=read, write=write, memory=memory, link=link, start_seconds=start)


def _amounts(traffic: Traffic) -> tuple[float, ...]:
    """Return what the busiest ranks do: (starts, from memory, from files, written, exchanged, messages)."""

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
