"""Pauses between two looks at other ranks."""

from __future__ import annotations

from time import monotonic, sleep, thread_time

_SHORTEST_SECONDS = 0.0005
_LONGEST_SECONDS = 0.04
_REST_SHARE = 50.0
"""Seconds of a pause for each second of processor time that a look has taken: waiting takes 2 % of a core."""
_ANSWER_SHARE = 4.0
"""Seconds of a pause for each second that a look has taken: other ranks that answer slowly have much to answer."""
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
        self._began = self._looked = monotonic()
        self._resumed = thread_time()

    def __call__(self) -> None:
        """Sleep for a time that suits the cost of the last look."""
        now = monotonic()
        longest = min(_LONGEST_SECONDS, _WAITED_SHARE * (now - self._began))
        seconds = max(_REST_SHARE * (thread_time() - self._resumed), _ANSWER_SHARE * (now - self._looked))
        sleep(max(_SHORTEST_SECONDS, min(longest, seconds)))
        self._looked, self._resumed = monotonic(), thread_time()
