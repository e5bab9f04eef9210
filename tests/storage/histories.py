"""Seeds of fault histories, ten or more to a job, and a clock whose pauses take little time."""

from __future__ import annotations

import threading
import time

import pytest

from tests.storage.fault_proxy import FaultProxy
from xrank.storage import client

SPEED = 25.0
"""A pause of a second takes 40 ms."""
TIMEOUT_SECONDS = 100.0
"""Seconds on the fast clock, which take 4 s."""


class FastClock(client.Clock):
    """A clock that runs faster than time does."""

    def now(self) -> float:
        return time.monotonic() * SPEED

    def wait(self, seconds: float, stop: threading.Event) -> None:
        stop.wait(seconds / SPEED)


def speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pauses, deadlines and the patience for one answer short in this process."""
    monkeypatch.setattr(client, "_clock", FastClock())
    monkeypatch.setenv("XRANK_STORE_TIMEOUT", str(TIMEOUT_SECONDS))
    monkeypatch.setattr(client, "REQUEST_SECONDS", 0.8)


def set_up(proxy: FaultProxy) -> None:
    """Make a proxy's bad moments fit the fast clock."""
    proxy.stall_seconds, proxy.storm_seconds = 1.2, 0.5 / SPEED


def make_seeds(metafunc: pytest.Metafunc, *, count: int, soak: int, a_job: int) -> None:
    """Give a test ``first_seed``: `count` seeds in all, or `soak` of them in `make soak`."""
    if "first_seed" in metafunc.fixturenames:
        seeds = soak if metafunc.config.getoption("soak") else count
        metafunc.parametrize("first_seed", range(0, seeds, a_job))
