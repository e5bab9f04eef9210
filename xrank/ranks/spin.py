"""The first moment of a wait, in which a rank looks without sleeping: most answers come at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic

from xrank.ranks.wire import Wire

_NUM_LOOKS = 20
"""Looks at memory before a wait yields the processor between two looks."""
_LONG_YIELD_SECONDS = 300e-6
_BUSY_SECONDS = 0.05
_BUSY_SPIN_SECONDS = 50e-6
"""A yield longer than `_LONG_YIELD_SECONDS` means that the processor is busy with other work than waiting ranks. For
`_BUSY_SECONDS`, waits then spin for `_BUSY_SPIN_SECONDS` only and sleep: the kernel runs a woken sleeper before such
work has used up its time slice, but not a process that yielded."""
_LOOKS_PER_PUMP = 8
"""Looks at memory for each look at sockets and deaths, which takes a system call."""


class Spin:
    """Looks of one rank at the memory that it shares with others; one thread at a time uses it.

    Args:
        wire: connection to the other ranks.
        seconds: length of the moment; 0 if the ranks share processors.
    """

    def __init__(self, wire: Wire, seconds: float) -> None:
        self._wire, self._seconds = wire, seconds
        self._busy_until = 0.0

    def is_soon(self, is_over: Callable[[], bool]) -> bool:
        """Look without sleeping for a moment; return whether the wait is over."""
        self._wire.look()
        if is_over():
            return True
        num_looks, now = 0, monotonic()
        end = now + (self._seconds if now >= self._busy_until else _BUSY_SPIN_SECONDS)
        while now < end:
            num_looks += 1
            if num_looks > _NUM_LOOKS and now >= self._busy_until:
                os.sched_yield()  # the answer may need this very core
                before, now = now, monotonic()
                if now - before > _LONG_YIELD_SECONDS:
                    self._busy_until = now + _BUSY_SECONDS
            if num_looks % _LOOKS_PER_PUMP:
                self._wire.look()
            else:
                self._wire.pump(0)
            if is_over():
                return True
            now = monotonic()
        return False
