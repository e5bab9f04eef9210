"""The heartbeat: how ranks on several hosts know of each other that they live.

Each rank's thread counts up a number in the store, and watches the number of the next rank in the list, by its own
clock: clocks of two hosts are never compared. Where the next rank has not come yet, or has ended, it watches the one
after it, so that nobody is without a watch. A rank's death is found whatever the others are doing, and each rank asks
for one number, however many there are.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from weakref import WeakSet

from xrank.errors import XrankError
from xrank.ranks.store import Store

__all__ = ["PERIOD_SECONDS", "Heartbeat"]

PERIOD_SECONDS = 2.0
_MAX_MISSED = 5


class Heartbeat:
    """This rank's own beat, and its watch on the others; begins at once and lasts until `stop`.

    Args:
        store: one that no other thread uses.
        mine: the name of this rank's number.
        others: the names of the other ranks' numbers, in the order in which this rank is to watch them; as long as a
            rank has none, it has not come yet.
        tell: is called on the heartbeat's thread, once for each rank that has missed five beats.
    """

    def __init__(
        self,
        store: Store,
        mine: str,
        others: Mapping[int, str],
        tell: Callable[[Store, int], None],
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stopped = threading.Event()
        arguments = (self._stopped, store, mine, dict(others), tell, period_seconds, clock)
        self._thread = threading.Thread(target=_beat, args=arguments, name="xrank heartbeat", daemon=True)
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        """End; the others see this rank as gone soon."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # it may be in a store that does not answer


def _beat(
    stopped: threading.Event,
    store: Store,
    mine: str,
    others: dict[int, str],
    tell: Callable[[Store, int], None],
    period_seconds: float,
    clock: Callable[[], float],
) -> None:
    seen, seen_at, num_missed, count = None, clock(), 0, 0
    # Whoever uses the store in the main thread hears of its end; here there is nobody to tell.
    with suppress(XrankError):
        while True:
            count += 1
            store.put(mine, str(count))
            told = _next_beat(store, others)
            if told != seen:
                seen, seen_at, num_missed = told, clock(), 0
            elif told is not None:
                # Seconds alone would not do: where the store itself stands still, so do all beats.
                num_missed += 1
                if num_missed >= _MAX_MISSED and clock() - seen_at >= _MAX_MISSED * period_seconds:
                    rank, _ = told
                    tell(store, rank)
                    del others[rank]
            if stopped.wait(period_seconds):
                return


def _next_beat(store: Store, others: dict[int, str]) -> tuple[int, str] | None:
    """Return the first of the others that has come, and its number."""
    for rank, name in others.items():
        if (number := store.peek(name)) is not None:
            return rank, number
    return None


_running: WeakSet[Heartbeat] = WeakSet()


def _stop_all() -> None:
    # A thread inside the store's C++ must not be there when the interpreter goes.
    for heartbeat in list(_running):
        heartbeat.stop()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_running.clear)  # threads stay with the parent
