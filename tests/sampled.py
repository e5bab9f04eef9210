"""How `make test` takes a sample of what repeats: most cases are left out, and counts shrink."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["count_of", "sampled", "sampled_rows"]

_FULL = settings.get_profile("default").max_examples


def sampled(values: Iterable[Any], every: int) -> list[Any]:
    """Return test parameters, all but every so manieth of them marked as repetitions, which a sample leaves out.

    A test of five sizes, two of which `make test` tries:

        @pytest.mark.parametrize("size", sampled([1, 2, 3, 4, 5], 3))
    """
    return sampled_rows([(value,) for value in values], every)


def sampled_rows(rows: Iterable[tuple[Any, ...]], every: int) -> list[Any]:
    """Do as `sampled` where a case has several parameters."""
    marks = [pytest.mark.slow, pytest.mark.repeats]
    return [pytest.param(*row, marks=marks if i % every else []) for i, row in enumerate(rows)]


def count_of(count: int) -> int:
    """Return how many of so many random examples a run tries: all, or a quarter where -m chooses tests.

    The profile that tests/conftest.py loads decides it; ``@settings(max_examples=count_of(400))``.
    """
    return max(1, count * settings().max_examples // _FULL)
