"""Words between the ranks of a test, through the store of their group: what one did, another waits for."""

from __future__ import annotations

import time

from xrank.ranks.store import find_store

__all__ = ["is_told", "tell", "told"]


def tell(name: str, value: str = "") -> None:
    """Let all ranks know."""
    find_store(None, {}).put(f"test/{name}", value)


def told(name: str) -> str | None:
    """Return what was told, or None where nothing was yet."""
    return find_store(None, {}).peek(f"test/{name}")


def is_told(name: str, seconds: float = 20.0) -> bool:
    """Wait until something is told, and say whether it was."""
    end = time.monotonic() + seconds
    while told(name) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
