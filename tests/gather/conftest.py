"""How much of the long tests is done: in `make test` a small part, in `make test-all` a part, by `make soak` all."""

import pytest


@pytest.fixture
def num_repeats(soak: bool, in_full: bool) -> int:
    return 2000 if soak else 300 if in_full else 100
