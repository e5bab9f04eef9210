"""Counts and findings of a campaign; each kind of finding is kept once, with the seed that repeats it."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Findings"]


@dataclass
class Findings:
    """The counts and the findings of a part of the campaign."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: dict[str, str] = field(default_factory=dict)
    """Kind of finding -> the first example."""

    def count(self, what: str, number: int = 1) -> None:
        """Count something."""
        self.counts[what] += number

    def report(self, kind: str, example: str) -> None:
        """Keep a finding."""
        self.counts["wrong"] += 1
        self.wrong.setdefault(kind, example)

    def report_raw(self, error: BaseException, example: str) -> None:
        """Keep an exception that is not xrank's, by its class and the innermost place in xrank that raised it."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/xrank/" in frame.filename and "/tests/" not in frame.filename]
        place = own[-1] if own else frames[-1]
        kind = f"raw {type(error).__name__} at {Path(place.filename).name}:{place.lineno}, {place.name}"
        self.report(kind, f"{example}\n    {str(error)[:200]}")

    def add(self, other: Findings) -> None:
        """Take over another's."""
        self.counts.update(other.counts)
        for kind, example in other.wrong.items():
            self.wrong.setdefault(kind, example)
