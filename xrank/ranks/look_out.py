"""The look-out of a wait in a circle that has become long."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from xrank.ranks.long_wait import START_SECONDS, Awaits, LongWait

if TYPE_CHECKING:
    from xrank.ranks.circle import Circle


class LookOut:
    """Looks, in a wait that has become long, for reasons why it will not end.

    Args:
        late: returns the ranks whose bodies are awaited; None if ranks' arrival is.
    """

    def __init__(self, circle: Circle, call: int, late: Callable[[], tuple[int, ...]] | None) -> None:
        self.late = late
        self._circle, self._call, self._begins_at = circle, call, monotonic() + START_SECONDS
        self._wait: LongWait | None = None

    def look(self) -> None:
        """Look, if the wait has become long; this does nothing if the last look was a moment ago.

        Raises:
            RankFailedError, ContradictionError: as `xrank.ranks.long_wait.LongWait.look`.
        """
        if monotonic() < self._begins_at:
            return
        circle = self._circle
        awaited: tuple[int, ...]
        if circle.rank != circle.first:
            awaits, awaited = Awaits.FIRST, (circle.first,)
        elif self.late is not None:
            awaits, awaited = Awaits.BODY_END, self.late()
        else:
            awaits, awaited = Awaits.ARRIVAL, circle.find_absent(self._call)
        if self._wait is None:
            self._wait = circle.begin_long_wait(self._call, awaits)
            self._begins_at = 0.0
        if self._wait is not None:
            # The circle watches the processes of its ranks itself.
            self._wait.look(awaited, ())

    def raise_if_confirmed(self) -> None:
        """Raise if this rank and others were found to wait for each other; errors as in `LongWait`."""
        if self._wait is not None:
            self._wait.raise_if_confirmed()

    def end(self) -> None:
        """End the wait."""
        if self._wait is not None:
            self._wait.end()
