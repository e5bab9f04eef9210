"""How `make test` takes a sample of what repeats: most cases are left out, and counts shrink."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["count_of", "sampled"]

_FULL = settings.get_profile("default").max_examples


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Return test parameters, all but every so manieth of them marked as repetitions, which a sample leaves out.

    A test of five sizes, two of which `make test` tries:

        @pytest.mark.parametrize("size", sampled([1, 2, 3, 4, 5], 3))
    """
    marks = [pytest.mark.slow, pytest.mark.repeats]
    return [pytest.param(value, marks=marks if i % every else []) for i, value in enumerate(values)]


def count_of(count: int) -> int:
    """Return how many of so many random examples a run tries: all, or a quarter where -m chooses tests.

    The profile that tests/conftest.py loads decides it; ``@settings(max_examples=count_of(400))``.
    """
    return max(1, count * settings().max_examples // _FULL)
