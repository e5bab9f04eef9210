"""What tests of meetings and wires share: the look at what they leave behind."""

import gc
import threading

import pytest

from tests.open_files import open_files, opened_since


@pytest.fixture
def nothing_left():
    """See that a test leaves no descriptor and no heartbeat."""
    gc.collect()  # a caught error's frames hold what was in use
    before = open_files()
    yield
    gc.collect()
    assert [thread for thread in threading.enumerate() if thread.name == "xrank heartbeat"] == []
    # Torch keeps the pipe of its first store for good.
    assert not [path for path in opened_since(before) if not path.startswith("pipe:")]
