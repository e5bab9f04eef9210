"""Deferred signals: an exception between a fork and the record of its pid would leave an unknown process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self


class DeferredSignals:
    """Defers Python's signal handlers in a ``with`` block, except inside `allow`; runs them at the end.

    Blocking the signals would not suffice: the kernel would deliver them to another thread, and Python would still run
    the handlers in the main thread. In other threads no handler runs, so there is nothing to defer.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: list[int] = []
        self._are_held = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in signal.valid_signals():
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._take)
            except BaseException:  # from a handler that was not deferred yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._pending:
            self._handlers[number](number, None)

    @contextlib.contextmanager
    def allow(self) -> Iterator[None]:
        """Run handlers immediately, until one of them raises."""
        try:
            self._release()
            yield
        finally:
            self._are_held = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._are_held:
            self._pending.append(number)
            return
        # If the handler raises, later signals must not interrupt the cleanup.
        self._are_held = True
        self._handlers[number](number, frame)
        self._release()

    def _release(self) -> None:
        """Run the pending handlers, then stop deferring unless a handler raises."""
        self._are_held = False
        while self._pending:
            self._are_held = True
            while self._pending:  # a signal between the two lines above may have emptied it
                number = self._pending.pop(0)
                self._handlers[number](number, None)
            self._are_held = False
