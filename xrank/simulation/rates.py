"""What a machine can do, as far as a prediction needs it: rates of files and of memory, and the links between ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from xrank.errors import UsageError
from xrank.virtual.costs.link_model import LinkModel
from xrank.virtual.costs.link_words import Kind, read_words

__all__ = ["NO_LIMIT", "Rates", "read_rates"]

NO_LIMIT = 1e18
"""Bytes a second of what is known to cost nothing; what is not known is None, or has no bandwidth at all."""

_RATES = ("read", "write", "memory", "all_read", "all_write")
_KINDS: dict[str, Kind] = {"start": "seconds", **dict.fromkeys(_RATES, "bandwidth")}


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second, and seconds; a rate of None is not known."""

    read: float | None = None
    """From files, by one rank."""
    write: float | None = None
    """To files, by one rank, until they are synced."""
    memory: float | None = None
    """From a rank's own memory: copied, or digested."""
    all_read: float | None = None
    """From files, by all ranks together; None: as much as all of them can."""
    all_write: float | None = None
    link: LinkModel = field(default_factory=LinkModel)
    """Between ranks: the latency is of each read of another's memory; a bandwidth without limit is not known."""
    start_seconds: float = 0.0
    """Before and after all else: to start, meet and plan, and to make the output visible."""

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON shows."""

        def known(rate: float | None) -> float | None:
            return None if rate is None or rate >= NO_LIMIT else rate

        def told(latency: float, bandwidth: float) -> dict[str, Any]:
            return {"latency_seconds": latency, "bandwidth_nbytes_per_second": known(bandwidth)}

        return {
            **{f"{name}_nbytes_per_second": known(getattr(self, name)) for name in _RATES},
            **told(*self.link.link()),
            "axes": {axis: told(*link) for axis, link in self.link.axes.items()},
            "start_seconds": self.start_seconds,
        }


def read_rates(told: str | os.PathLike[str]) -> Rates:
    """Return the rates that ``--link`` says: words of the form name=value, or the path of a TOML file with the same.

    ``read write memory all_read all_write start`` as in `Rates`; ``bandwidth latency`` of a link, and
    ``tp.bandwidth tp.latency`` of one along the axis ``tp``, as `LinkModel.read` takes them.

    Raises:
        UsageError: it cannot be read; names the word.
    """
    try:
        values, general, axes = read_words(told, _KINDS)
    except UsageError as error:
        error.next_step = error.next_step or "correct --link, or the file it names"
        raise
    rates = {name: values.get(name) for name in _RATES}
    return Rates(**rates, link=LinkModel(*general, axes), start_seconds=values.get("start", 0.0))
