import gc

import pytest
import torch

from tests.workspace.memory_use import arenas
from xrank.ranks.memory_messages import MemoryMessages


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Copies here are small: where the processors are busy, torch's threads wait for each other much longer."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def messages():
    """A writer (rank 1) and a reader; when both are closed, no memory is left of them, mapped or not."""
    before = arenas()
    writer, reader = MemoryMessages(), MemoryMessages()
    yield writer, reader
    writer.close()
    reader.close()
    if arenas() - before:
        gc.collect()  # an error's frames may hold what a test held
    assert not arenas() - before


@pytest.fixture
def writer(messages):
    return messages[0]


@pytest.fixture
def reader(messages):
    return messages[1]


@pytest.fixture
def num_repeats(soak: bool, in_full: bool) -> int:
    """How much of the long tests is done: a small part, by `make test-all` a part, by `make soak` all."""
    return 2000 if soak else 300 if in_full else 100
