"""Python's search for garbage, which thousands of new tensors would set off again and again, each time through all."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_search"]


@contextmanager
def no_search() -> Iterator[None]:
    """Search for no garbage meanwhile, in any thread: for short work alone, that makes many objects and no cycles."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
