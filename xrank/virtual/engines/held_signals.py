"""Signals that wait: one between a fork and the note of it would leave a process that nobody knows."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Self

__all__ = ["HeldSignals"]


class HeldSignals:
    """Holds the handlers that Python calls back, in a ``with`` block, but for a part of it; then they are called.

    To block the signals would not do: the kernel gives them to any other thread, and Python calls their handlers in the
    main one nevertheless. In other threads than that no handler runs, and nothing has to be held.
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
            except BaseException:  # of a handler that was not held yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *args: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for number in self._pending:
            self._handlers[number](number, None)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Let handlers be called, until one of them raises."""
        try:
            self._release()
            yield
        finally:
            self._are_held = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._are_held:
            self._pending.append(number)
            return
        # If it raises, what comes next must not disturb the clearing up.
        self._are_held = True
        self._handlers[number](number, frame)
        self._release()

    def _release(self) -> None:
        """Call what has come, and what comes meanwhile; hold nothing from then on, unless a handler raises."""
        self._are_held = False
        while self._pending:
            self._are_held = True
            while self._pending:  # one that came between the two lines above may have taken them
                number = self._pending.pop(0)
                self._handlers[number](number, None)
            self._are_held = False
