"""What tests of meetings and wires share: the look at what they leave behind."""

import gc
import threading

import pytest

from tests.open_files import open_files


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
    return sorted(path for path in open_files().values() if not path.startswith("pipe:"))
