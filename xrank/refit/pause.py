"""Pauses between two looks at other ranks."""

from __future__ import annotations

from time import monotonic, sleep, thread_time

__all__ = ["Pause"]

_SHORTEST_SECONDS = 0.0005
_LONGEST_SECONDS = 0.008
_REST_SHARE = 50.0
"""Seconds of a pause for each second of processor time that a look has taken: waiting takes 2 % of a core."""
_WAITED_SHARE = 0.1
"""Longest pause as a share of the time waited so far, so that short waits end soon."""


class Pause:
    """Sleeps between two looks of a thread, which wait for the same event.

    The ranks that are waited for may need the cores: on a host with as many ranks as cores, trainer ranks that looked
    each half millisecond took 40 % of the time of the engine's copies.

    Example:
        >>> pause, looks = Pause(), iter([False, False, True])
        >>> while not next(looks):
        ...     pause()
    """

    def __init__(self) -> None:
        self._began, self._resumed = monotonic(), thread_time()

    def __call__(self) -> None:
        """Sleep for a time that suits the cost of the last look."""
        longest = min(_LONGEST_SECONDS, _WAITED_SHARE * (monotonic() - self._began))
        seconds = min(longest, _REST_SHARE * (thread_time() - self._resumed))
        sleep(max(_SHORTEST_SECONDS, seconds))
        self._resumed = thread_time()
