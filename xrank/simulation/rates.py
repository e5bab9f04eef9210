"""Rates of a machine that a prediction needs: of files, of memory, and of the links between ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from xrank.errors import UsageError, option
from xrank.virtual.costs.link_model import LinkModel
from xrank.virtual.costs.link_words import Kind, read_words

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
