"""What a check of gradients finds, told so that one who reads it knows where to look."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from xrank.errors import GradientError
from xrank.words import first_lines, ranks_text

__all__ = ["FindingKind", "GradientCheck", "GradientFinding", "encoded", "merged"]

FindingKind: TypeAlias = Literal["nonfinite", "missing", "unknown", "shape", "replicas", "tied", "scale", "reference"]

_ORDER: tuple[FindingKind, ...] = (
    "nonfinite", "missing", "unknown", "shape", "scale", "replicas", "tied", "reference"
)  # fmt: skip
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """One thing that is wrong with one gradient."""

    kind: FindingKind
    """``scale``: a multiple of the reference; ``reference``: another difference from it; ``tied``: tables of stages."""
    name: str
    ranks: tuple[int, ...]
    """Where it was found; of ``replicas`` and ``tied``, all that should hold the same."""
    message: str
    """Without the name and the ranks."""
    difference: float | None = None
    """The largest between two elements that should be equal."""
    factor: float | None = None
    """What the reference is multiplied by, of ``scale``."""

    def __str__(self) -> str:
        return f"{self.name}: on {ranks_text(self.ranks)} {self.message}"


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """What `check_gradients` found: the same on all ranks."""

    rank: int
    num_checked: int
    """Gradients of this rank."""
    findings: tuple[GradientFinding, ...]
    """Of all ranks, the most telling kind first."""

    @property
    def is_right(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.is_right

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.num_checked} gradients of rank {self.rank} are right"
        return "\n".join(first_lines([str(finding) for finding in self.findings], _MAX_SHOWN))

    def raise_if_wrong(self) -> None:
        """Raise what was found; on all ranks, since all found the same.

        Raises:
            GradientError: there are findings; of the first, with the others as notes.
        """
        if self.is_right:
            return
        first, *others = self.findings
        error = GradientError(str(first), tensor=first.name, rank=first.ranks[0])
        for line in first_lines([f"also: {other}" for other in others], _MAX_SHOWN - 1):
            error.add_note(line)
        raise error


def encoded(findings: Sequence[GradientFinding]) -> str:
    """Return findings as text."""
    return json.dumps([asdict(finding) for finding in findings])


def merged(texts: Iterable[str]) -> tuple[GradientFinding, ...]:
    """Return the findings of all ranks, those that differ in nothing but ranks as one.

    Args:
        texts: of `encoded`, one for each rank.
    """
    found: dict[tuple[str, ...], GradientFinding] = {}
    for text in texts:
        for told in json.loads(text):
            finding = GradientFinding(**{**told, "ranks": tuple(told["ranks"])})
            key = finding.kind, finding.name, finding.message
            ranks = set(finding.ranks) | set(found[key].ranks if key in found else ())
            found[key] = replace(found.get(key, finding), ranks=tuple(sorted(ranks)))
    return tuple(sorted(found.values(), key=lambda finding: (_ORDER.index(finding.kind), finding.ranks, finding.name)))
