"""How much of the long tests is done: in `make test` a part, by `make soak` all."""

import pytest


@pytest.fixture
def num_repeats(soak: bool) -> int:
    return 2000 if soak else 300
