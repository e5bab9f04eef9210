"""The report of a command: source, proof and output, in the units of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Report"]


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
    source: Mapping[str, Any] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)
    output: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    """In place of `output` if nothing was written."""
    notes: tuple[tuple[str, str], ...] = ()
    """(code, message) pairs."""
    error: Mapping[str, Any] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    """Facts of this command alone; `to_dict` adds their keys to the others."""

    @property
    def ok(self) -> bool:
        """Whether the command succeeded."""
        return self.exit_code == 0

    @property
    def num_tensors(self) -> int:
        """Tensors written, or planned."""
        return int(self._made.get("num_tensors", 0))

    @property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return int(self._made.get("num_parameters", 0))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return int(self._made.get("nbytes", 0))

    @property
    def _made(self) -> Mapping[str, Any]:
        return self.output or self.plan or {}

    def to_dict(self) -> dict[str, Any]:
        """Return the report as one JSON object."""
        return {
            "schema": 1,
            "command": self.command,
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "peak_rss_nbytes": self.peak_rss_nbytes,
            "source": dict(self.source),
            "proof": dict(self.proof),
            "output": None if self.output is None else dict(self.output),
            **({} if self.plan is None else {"plan": dict(self.plan)}),
            **self.details,
            "notes": [{"code": code, "message": message} for code, message in self.notes],
            "error": None if self.error is None else dict(self.error),
        }
