"""Errors about a parameter on a rank, and faults that all ranks raise together at the end of a step.

A rank that raised alone would leave the others waiting. So a rank records a fault, still runs all collectives of the
step, and at the end of the step every rank receives the faults of all (`xrank.gradients.buckets.BucketSync.finish`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from xrank.errors import GradientError, LayoutError, UsageError
from xrank.words import first_lines

_MAX_FAULTS = 8
"""Faults that one rank sends: a mistake in the loop makes one for every parameter."""


@dataclass(frozen=True, slots=True)
class GradientFault:
    """The parts of a `GradientError`."""

    message: str
    """Text that names the parameter and the rank."""
    next_step: str
    rank: int | None = None
    tensor: str | None = None
    got: str | None = None
    want: str | None = None


@dataclass(frozen=True, slots=True)
class At:
    """The parameter and the rank that an error is about; its text then begins with the parameter's name."""

    tensor: str | None = None
    rank: int | None = None

    def fault(self, text: str, next_step: str, got: str | None = None, want: str | None = None) -> GradientFault:
        """Return a fault, for all ranks to raise."""
        message = f"{self.tensor}: {text}" if self.tensor else text
        return GradientFault(message, next_step, self.rank, self.tensor, got, want)

    def error(self, text: str, next_step: str, got: str | None = None, want: str | None = None) -> GradientError:
        """Return an error of a step."""
        return GradientError(**self._parts(text, next_step, got, want))

    def usage_error(self, text: str, next_step: str, got: str | None = None, want: str | None = None) -> UsageError:
        """Return an error of an argument."""
        return UsageError(**self._parts(text, next_step, got, want))

    def layout_error(self, text: str, next_step: str, got: str | None = None, want: str | None = None) -> LayoutError:
        """Return an error of a mesh or of placements."""
        return LayoutError(**self._parts(text, next_step, got, want))

    def _parts(self, text: str, next_step: str, got: str | None, want: str | None) -> dict[str, Any]:
        return asdict(self.fault(text, next_step, got, want))


def dump_faults(faults: Sequence[GradientFault]) -> str:
    """Return the text of a rank's faults, for `join_faults`."""
    return json.dumps([asdict(fault) for fault in faults[:_MAX_FAULTS]])


def join_faults(texts: Iterable[str]) -> GradientError:
    """Return the first fault of all ranks as an error, with the others as notes."""
    first, *others = (fault for text in texts for fault in json.loads(text))
    error = GradientError(**first)
    notes = [f"also: {other['message']}" for other in others if other["message"] != first["message"]]
    for line in first_lines(notes, _MAX_FAULTS):
        error.add_note(line)
    return error
