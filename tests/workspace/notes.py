"""Notes between the ranks of a test, through the store of their group: one rank waits for another's note."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from xrank.ranks.store import find_store

__all__ = ["assert_soon", "await_note", "read_note", "write_note"]


def write_note(name: str, value: str = "") -> None:
    """Write a note for all ranks."""
    find_store(None, {}).put(f"test/{name}", value)


def read_note(name: str) -> str | None:
    """Return a note; None if it was not written yet."""
    return find_store(None, {}).peek(f"test/{name}")


def assert_soon(play: Callable[[], float], limit_seconds: float = 1.0, tries: int = 20) -> None:
    """Assert on all ranks of the world that no rank needs longer than a limit.

    A busy machine may need several tries.

    Args:
        play: runs the action, and returns its seconds on this rank.
        limit_seconds: limit for every rank.
        tries: maximum number of tries.
    """
    slowest = []
    while not slowest or (slowest[-1] >= limit_seconds and len(slowest) < tries):
        seconds = [0.0] * dist.get_world_size()
        dist.all_gather_object(seconds, play())
        slowest.append(max(seconds))
    assert slowest[-1] < limit_seconds, slowest


def await_note(name: str, seconds: float = 20.0) -> bool:
    """Wait for a note, and return whether it was written in time."""
    end = time.monotonic() + seconds
    while read_note(name) is None:
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True
