"""The heartbeat by which ranks on several hosts notice each other's deaths.

Each rank's thread counts up a number in the store and watches the number of the next rank in the list, by its own
clock: clocks of two hosts are never compared. While the next rank has not come yet, or has ended, it watches the one
after it, so that every rank is watched. Deaths are found whatever the main threads do, and each rank reads one number
a period, however many ranks there are.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from time import monotonic
from weakref import WeakSet

from xrank.errors import XrankError
from xrank.ranks.store import Store
from xrank.system import after_fork_in_child

PERIOD_SECONDS = 2.0
MAX_MISSED = 5


class Heartbeat:
    """This rank's own beat and its watch on the others, from construction until `stop`.

    The first beat is in the store when the construction returns: a rank that dies after it is found missing.

    Args:
        store: a store that no other thread uses.
        mine: name of this rank's number.
        others: names of the other ranks' numbers, in the order in which this rank watches them. A rank without a
            number has not come yet.
        report: called on the heartbeat's thread, once for each rank that has missed five beats.
    """

    def __init__(
        self,
        store: Store,
        mine: str,
        others: Mapping[int, str],
        report: Callable[[Store, int], None],
        *,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stopped = threading.Event()
        with suppress(XrankError):  # if the store is gone, its next user in the main thread raises
            store.put(mine, "0")
        arguments = (self._stopped, store, mine, dict(others), report, period_seconds, clock)
        self._thread = threading.Thread(target=_beat, args=arguments, name="xrank heartbeat", daemon=True)
        _running.add(self)
        self._thread.start()

    def stop(self) -> None:
        """Stop the beat; the others soon see this rank as gone."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)  # it may be in a store that does not answer


def _beat(
    stopped: threading.Event,
    store: Store,
    mine: str,
    others: dict[int, str],
    report: Callable[[Store, int], None],
    period_seconds: float,
    clock: Callable[[], float],
) -> None:
    seen, seen_at, num_missed, count = None, clock(), 0, 0
    with suppress(XrankError):
        while True:
            count += 1
            store.put(mine, str(count))
            beat = _find_beat(store, others)
            if beat != seen:
                seen, seen_at, num_missed = beat, clock(), 0
            elif beat is not None:
                # Both count: if the store itself is stalled, seconds pass, but this rank makes no reads either.
                num_missed += 1
                if num_missed >= MAX_MISSED and clock() - seen_at >= MAX_MISSED * period_seconds:
                    rank, _ = beat
                    report(store, rank)
                    # From now on this rank watches the next one in the list.
                    del others[rank]
            if stopped.wait(period_seconds):
                return


def _find_beat(store: Store, others: dict[int, str]) -> tuple[int, str] | None:
    """Return the first of the others that has come, and its number."""
    for rank, name in others.items():
        if (number := store.peek(name)) is not None:
            return rank, number
    return None


_running: WeakSet[Heartbeat] = WeakSet()


def _stop_all() -> None:
    # No thread may be inside the store's C++ code when the interpreter ends.
    for heartbeat in list(_running):
        heartbeat.stop()


atexit.register(_stop_all)
after_fork_in_child(_running.clear)  # threads stay with the parent
