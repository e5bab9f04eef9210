"""A moment at which a wait is given up."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

from xrank.errors import UsageError


class Deadline:
    """The moment `timeout_seconds` after construction, by a clock that never steps back.

    Raises:
        UsageError: `timeout_seconds` is not above 0.
    """

    __slots__ = ("_end", "clock", "timeout_seconds")  # every gather makes one

    def __init__(self, timeout_seconds: float, clock: Callable[[], float] = monotonic) -> None:
        if not timeout_seconds > 0:
            raise UsageError("a timeout must be positive", got=str(timeout_seconds), want="seconds above 0")
        self.timeout_seconds, self.clock = timeout_seconds, clock
        self._end = clock() + timeout_seconds

    @property
    def remaining_seconds(self) -> float:
        """Seconds left; 0 after the deadline."""
        return max(0.0, self._end - self.clock())

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.clock() >= self._end
