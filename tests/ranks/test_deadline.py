"""Deadlines by a clock of the test's own."""

import pytest

from xrank.errors import UsageError
from xrank.ranks.failure import Deadline


def test_a_deadline_passes_when_its_clock_says_so():
    now = [100.0]
    deadline = Deadline(2.5, clock=lambda: now[0])
    assert deadline.remaining_seconds == 2.5 and not deadline.has_passed
    now[0] = 102.0
    assert deadline.remaining_seconds == 0.5 and not deadline.has_passed
    now[0] = 102.5
    assert deadline.remaining_seconds == 0 and deadline.has_passed
    now[0] = 1000.0
    assert deadline.remaining_seconds == 0


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_is_positive(seconds):
    with pytest.raises(UsageError, match="positive"):
        Deadline(seconds)
