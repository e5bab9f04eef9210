"""The bench that every test here works at."""

from collections.abc import Iterator

import pytest

from tests.cli.bench import Bench, made_bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    with made_bench() as made:
        yield made
