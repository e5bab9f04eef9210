"""What tests of meetings and wires share: the look at what they leave behind."""

import gc
import os
import threading
from contextlib import suppress

import pytest


@pytest.fixture
def nothing_left():
    """See that a test leaves no descriptor and no heartbeat."""
    gc.collect()  # a caught error's frames hold what was in use
    before = descriptors()
    yield
    gc.collect()
    assert [thread for thread in threading.enumerate() if thread.name == "xrank heartbeat"] == []
    assert descriptors() == before


def descriptors() -> list[str]:
    """Return what this process has open, but for pipes: torch keeps that of its first store for good."""
    leads_to = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            leads_to.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(path for path in leads_to if not path.startswith("pipe:"))
