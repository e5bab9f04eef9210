"""Findings of a check of gradients, with texts that show where to look."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from xrank.errors import GradientError
from xrank.words import first_lines, ranks_text

FindingKind: TypeAlias = Literal["nonfinite", "missing", "unknown", "shape", "replicas", "tied", "scale", "reference"]

_ORDER: tuple[FindingKind, ...] = (
    "nonfinite", "missing", "unknown", "shape", "scale", "replicas", "tied", "reference"
)  # fmt: skip
_MAX_SHOWN = 20


@dataclass(frozen=True, slots=True)
class GradientFinding:
    """A wrong gradient."""

    kind: FindingKind
    """``scale``: a multiple of the reference; ``reference``: another difference from it; ``tied``: tables of stages."""
    name: str
    ranks: tuple[int, ...]
    """Ranks where it was found; for ``replicas`` and ``tied``, all ranks that should hold the same gradient."""
    message: str
    """Text without the name and the ranks."""
    difference: float | None = None
    """Largest difference between two elements that should be equal."""
    factor: float | None = None
    """Gradient divided by reference, for ``scale``."""

    def __str__(self) -> str:
        return f"{self.name}: on {ranks_text(self.ranks)} {self.message}"


@dataclass(frozen=True, slots=True)
class GradientCheck:
    """Result of `check_gradients`, with the same findings on all ranks.

    Example:
        >>> from xrank.gradients import GradientCheck
        >>> bool(GradientCheck(rank=0, num_checked=2, findings=()))
        True
    """

    rank: int
    num_checked: int
    """Number of gradients of this rank."""
    findings: tuple[GradientFinding, ...]
    """Findings of all ranks, the most informative kind first."""

    @property
    def is_right(self) -> bool:
        """Whether all gradients are right."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.is_right

    def __str__(self) -> str:
        if self.is_right:
            return f"{self.num_checked} gradients of rank {self.rank} are right"
        return "\n".join(first_lines([str(finding) for finding in self.findings], _MAX_SHOWN))

    def raise_if_wrong(self) -> None:
        """Raise the findings; on all ranks, since all have the same.

        Raises:
            GradientError: there are findings; it has the first as its message, and the others as notes.
        """
        if self.is_right:
            return
        first, *others = self.findings
        error = GradientError(
            str(first),
            tensor=first.name,
            rank=first.ranks[0],
            next_step="see what is found for each gradient, and correct the step that reduces it",
        )
        for line in first_lines([f"also: {other}" for other in others], _MAX_SHOWN - 1):
            error.add_note(line)
        raise error


def encode_findings(findings: Sequence[GradientFinding]) -> str:
    """Return findings as text."""
    return json.dumps([asdict(finding) for finding in findings])


def merge_findings(texts: Iterable[str]) -> tuple[GradientFinding, ...]:
    """Return the findings of all ranks. Findings that differ only in ranks become one.

    Args:
        texts: one text of `encode_findings` for each rank.
    """
    found: dict[tuple[str, ...], GradientFinding] = {}
    for text in texts:
        for values in json.loads(text):
            finding = GradientFinding(**{**values, "ranks": tuple(values["ranks"])})
            key = finding.kind, finding.name, finding.message
            ranks = set(finding.ranks) | set(found[key].ranks if key in found else ())
            found[key] = replace(found.get(key, finding), ranks=tuple(sorted(ranks)))
    return tuple(sorted(found.values(), key=lambda finding: (_ORDER.index(finding.kind), finding.ranks, finding.name)))
