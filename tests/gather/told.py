"""Words between the ranks of a test, through the store of their group: what one did, another waits for."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from xrank.ranks.store import find_store

__all__ = ["assert_soon", "is_told", "tell", "told"]


def tell(name: str, value: str = "") -> None:
    """Let all ranks know."""
    find_store(None, {}).put(f"test/{name}", value)


def told(name: str) -> str | None:
    """Return what was told, or None where nothing was yet."""
    return find_store(None, {}).peek(f"test/{name}")


def assert_soon(play: Callable[[], float], limit_seconds: float = 1.0, tries: int = 20) -> None:
    """See, on all ranks of the world, that none needs longer for something than the limit, which is what is claimed.

    A machine that does other things may need several tries to show it.

    Args:
        play: does it, and returns how many seconds it took on this rank.
        limit_seconds: that no rank may reach.
        tries: so often at most.
    """
    slowest = []
    while not slowest or (slowest[-1] >= limit_seconds and len(slowest) < tries):
        seconds = [0.0] * dist.get_world_size()
        dist.all_gather_object(seconds, play())
        slowest.append(max(seconds))
    assert slowest[-1] < limit_seconds, slowest


def is_told(name: str, seconds: float = 20.0) -> bool:
    """Wait until something is told, and say whether it was."""
    end = time.monotonic() + seconds
    while told(name) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
