"""Pauses Python's garbage collector, which thousands of new tensors would run again and again over all objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collection() -> Iterator[None]:
    """Pause garbage collection in all threads: only for short work that makes many objects and no cycles."""
    # The user, or a caller of this function, has paused it and will decide when it runs again.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
