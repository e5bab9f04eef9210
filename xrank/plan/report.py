"""The report of a command: what was read, proven and written, in the units of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xrank.errors import XrankError
from xrank.plan.report_facts import Facts, OutputFacts, ProofFacts, SourceFacts, TrafficFacts, plain_value


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a command or call; `to_dict` is its JSON form, whose keys are stable."""

    command: str
    path: str | None = None
    """The output folder, or the path that was read."""
    status: str = "ok"
    exit_code: int = 0
    seconds: float = 0.0
    peak_rss_nbytes: int = 0
    """Peak memory of the whole process."""
    source: SourceFacts = field(default_factory=SourceFacts)
    proof: ProofFacts = field(default_factory=ProofFacts)
    output: OutputFacts | None = None
    plan: OutputFacts | None = None
    """In place of `output` where nothing was written."""
    traffic: TrafficFacts | None = None
    """None: no path is a URL."""
    notes: tuple[tuple[str, str], ...] = ()
    """(code, message) pairs."""
    fault: XrankError | None = None
    """The error that ended the command, or the first fault that it found."""
    details: Facts = field(default_factory=Facts)
    """Facts that only this command has; their keys stand beside the others."""

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The parts of the fault, as JSON has them."""
        return None if self.fault is None else self.fault.to_dict()

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.exit_code == 0

    @property
    def num_tensors(self) -> int:
        """Tensors written, or planned."""
        return self.made.num_tensors

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return self.made.num_parameters

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.made.nbytes

    @property
    def made(self) -> OutputFacts:
        """The output, or the plan where nothing was written."""
        return self.output or self.plan or OutputFacts()

    def __str__(self) -> str:
        """Return the report as lines for people.

        Example:
            >>> print(Report("gather", path="model", seconds=2.0))
            gather  ok, 2.0 s: model
        """
        from xrank.plan.report_text import align_rows, report_rows

        return align_rows(report_rows(self))

    def _repr_html_(self) -> str:
        """Return the report as a table for notebooks."""
        from xrank.plan.report_text import report_html

        return report_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "schema": 1,
            "command": self.command,
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "peak_rss_nbytes": self.peak_rss_nbytes,
            "source": self.source.to_dict(),
            "proof": self.proof.to_dict(),
            "output": plain_value(self.output),
            **({} if self.plan is None else {"plan": self.plan.to_dict()}),
            **({} if self.traffic is None else {"traffic": self.traffic.to_dict()}),
            **self.details.to_dict(),
            "notes": [{"code": code, "message": message} for code, message in self.notes],
            "error": plain_value(self.error),
        }
