"""A moment at which a wait is given up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from xrank.errors import UsageError

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment `timeout_seconds` after construction, by a clock that never steps back."""

    timeout_seconds: float
    clock: Callable[[], float] = monotonic
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.timeout_seconds > 0:
            raise UsageError("a timeout must be positive", got=str(self.timeout_seconds), want="seconds above 0")
        object.__setattr__(self, "_end", self.clock() + self.timeout_seconds)

    @property
    def remaining_seconds(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self._end - self.clock())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.clock() >= self._end
