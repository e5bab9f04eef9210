"""Rates of a machine that a prediction needs: of files, of memory, and of the links between ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from xrank.errors import UsageError, option
from xrank.layout import DeviceMesh
from xrank.layout.nest_table import IntArray, int_array
from xrank.virtual.link_model import Kind, LinkModel, read_words, unit_seconds
from xrank.virtual.simulation.traffic import ConversionTraffic, RankExchange

NO_LIMIT = 1e18
"""Bytes per second of work that is known to be free; an unknown rate is None, or no bandwidth."""

_RATES = ("read", "write", "memory", "all_read", "all_write")
_KINDS: dict[str, Kind] = {"start": "seconds", **dict.fromkeys(_RATES, "bandwidth")}


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in bytes per second, and times in seconds; None is an unknown rate."""

    read: float | None = None
    """Reading from files, by one rank."""
    write: float | None = None
    """Writing to files, by one rank, including the sync."""
    memory: float | None = None
    """Copying or digesting a rank's own memory."""
    all_read: float | None = None
    """Reading from files, by all ranks together; None means no common limit."""
    all_write: float | None = None
    link: LinkModel = field(default_factory=LinkModel)
    """Links between ranks; latency applies to each read of another's memory, and an infinite bandwidth is unknown."""
    start_seconds: float = 0.0
    """Time before and after the work: starting, meeting, planning, and making the output visible."""

    def to_dict(self) -> dict[str, Any]:
        """Return the rates for JSON."""

        def finite(rate: float | None) -> float | None:
            return None if rate is None or rate >= NO_LIMIT else rate

        def link_facts(latency: float, bandwidth: float) -> dict[str, Any]:
            return {"latency_seconds": latency, "bandwidth_nbytes_per_second": finite(bandwidth)}

        return {
            **{f"{name}_nbytes_per_second": finite(getattr(self, name)) for name in _RATES},
            **link_facts(*self.link.link()),
            "axes": {axis: link_facts(*link) for axis, link in self.link.axes.items()},
            "start_seconds": self.start_seconds,
        }


def read_rates(source: str | os.PathLike[str]) -> Rates:
    """Read rates: words of the form name=value, or the path of a TOML file with the same.

    ``read write memory all_read all_write start`` as in `Rates`; ``bandwidth latency`` of a link, and
    ``tp.bandwidth tp.latency`` along the axis ``tp``, as in `LinkModel.read`.

    Raises:
        UsageError: the text or file is invalid; names the word.

    >>> read_rates("read=2GB/s start=500ms").start_seconds
    0.5
    """
    try:
        values, general, axes = read_words(source, _KINDS)
    except UsageError as error:
        error.about(next_step=f"correct {option('link')}, or the file it names")
        raise
    rates = {name: values.get(name) for name in _RATES}
    return Rates(**rates, link=LinkModel(*general, axes), start_seconds=values.get("start", 0.0))


FloatArray: TypeAlias = npt.NDArray[np.float64]

PARTS = ("compare", "read", "exchange", "write")

ASSUMED = (
    "a rank's reads, exchanges and writes follow one another; ranks work at once, and wait each round for the slowest",
    "one rank's links and files slow no other's, but for all_read and all_write, which ranks share evenly",
    "every byte is read anew, and written once: no cache is warm, and no extent is shared",
)


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """Predicted time of a conversion."""

    parts: dict[str, FloatArray]
    """Seconds of each rank by name of `PARTS`; the rest of `seconds` is waiting."""
    start_seconds: float
    seconds: float
    """Seconds from the start of the first rank to the end of the last."""

    @property
    def busy(self) -> FloatArray:
        """Seconds of each rank without waiting."""
        return sum((self.parts[name] for name in PARTS), np.zeros_like(self.parts[PARTS[0]]))


def predict(traffic: ConversionTraffic, rates: Rates, mesh: DeviceMesh | None) -> Prediction:
    """Predict the time of traffic.

    Args:
        traffic: the traffic of a conversion.
        rates: rates of the machine.
        mesh: mesh of the ranks, for rates along its axes.
    """
    is_exchanged = any(len(one.exchange.taker) for one in traffic.rounds)
    links = _Links(rates if is_exchanged else Rates(), mesh, traffic.num_ranks)
    parts = {name: np.zeros(traffic.num_ranks) for name in PARTS}
    parts["compare"] += _seconds("memory", traffic.compared_nbytes, rates.memory)
    total = rates.start_seconds + float(parts["compare"].max(initial=0.0))
    for one in traffic.rounds:
        made = {
            "read": _seconds("read", one.read_nbytes, _limit_rate(rates.read, rates.all_read, one.read_nbytes))
            + _seconds("memory", one.own_nbytes, rates.memory),
            "exchange": links.seconds(one.exchange),
            "write": _seconds(
                "write", one.written_nbytes, _limit_rate(rates.write, rates.all_write, one.written_nbytes)
            ),
        }
        for name, seconds in made.items():
            parts[name] += seconds
        # The ranks wait for the slowest at the end of a round.
        total += float(sum(made.values(), np.zeros(traffic.num_ranks)).max(initial=0.0))
    return Prediction(parts, rates.start_seconds, total)


def _limit_rate(own: float | None, of_all: float | None, nbytes: IntArray) -> float | None:
    """Return the rate of one rank; active ranks share the common rate evenly."""
    if of_all is None:
        return own
    each = of_all / max(1, int(np.count_nonzero(nbytes)))
    return each if own is None else min(own, each)


def _seconds(name: str, nbytes: IntArray, rate: float | None) -> FloatArray:
    if rate is None:
        if nbytes.any():
            raise _unknown_rate(name)
        return np.zeros(len(nbytes))
    return nbytes / rate


def _unknown_rate(name: str) -> UsageError:
    return UsageError(
        f"{option('link')} lacks {name}, which this operation needs",
        got=f"rates without {name}",
        want=f"{name}=2GB/s, or whatever the machine does",
        next_step=f"add {name} to {option('link')}; or leave it out, for bytes and messages alone",
    )


class _Links:
    """The links between ranks; for several differing axes, the slowest, as in `LinkModel.link`."""

    def __init__(self, rates: Rates, mesh: DeviceMesh | None, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._link = rates.link
        self._places: dict[str, IntArray] = {}
        for axis in rates.link.axes:
            if mesh is None or axis not in mesh.axis_names:
                raise UsageError(
                    f"{option('link')} has the axis {axis!r}, but the mesh of the ranks does not",
                    got=f"{axis}.bandwidth or {axis}.latency",
                    want="no axis, as no mesh is known" if mesh is None else f"an axis of {mesh.grid!r}",
                    next_step=f"correct the axis in {option('link')}, or leave it out",
                )
        if mesh is not None and rates.link.axes:
            at = np.unravel_index(np.arange(mesh.size), mesh.shape)
            for axis, places in zip(mesh.axis_names, at, strict=True):
                self._places[axis] = np.zeros(num_ranks, np.int64)
                self._places[axis][int_array(mesh.ranks)] = places

    def seconds(self, exchange: RankExchange) -> FloatArray:
        """Return each rank's seconds: the longer of its own reads and of others' reads from it."""
        a_byte, a_message = np.zeros(len(exchange.taker)), np.zeros(len(exchange.taker))
        chosen = {axis: at[exchange.taker] != at[exchange.giver] for axis, at in self._places.items()}
        for axis, along in chosen.items() or [("", np.ones(len(exchange.taker), np.bool_))]:
            if not along.any():
                continue
            latency, bandwidth = self._link.link((axis,))
            if bandwidth == inf:
                raise _unknown_rate("bandwidth")
            a_byte[along] = np.maximum(a_byte[along], 1 / bandwidth)
            a_message[along] = np.maximum(a_message[along], latency)
        moved = exchange.nbytes * a_byte
        taken = np.bincount(exchange.taker, moved + exchange.messages * a_message, self._num_ranks)
        given = np.bincount(exchange.giver, moved, self._num_ranks)
        # A rank serves others while it reads, so the longer of both counts.
        return np.maximum(taken, given)


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
