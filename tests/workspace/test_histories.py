"""Seeded histories of live gathers end as the rules say: right values, or the culprit named on all ranks."""

import pytest

from tests.sampled import sampled
from tests.workspace.forked_ranks import run_many
from tests.workspace.histories import draw, find_fault, run_history

LIMIT_SECONDS = 20
"""Time limit of each failure. Two seconds are the promise, which a machine with other work keeps most of the time."""
STEP = 5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the seeds: 5 in every run, 60 by `make test-all`, all 500 by `make soak`."""
    if "first" in metafunc.fixturenames:
        soak = metafunc.config.getoption("soak")
        metafunc.parametrize("first", range(0, 500, STEP) if soak else sampled(range(0, 60, STEP), 12))


@pytest.mark.timeout(600)
def test_each_history_ends_as_the_rules_say(tmp_path, first):
    seeds = range(first, first + STEP)
    jobs = [(draw(seed)[0], f"{seed} {tmp_path / str(seed)}") for seed in seeds]
    answers = run_many(run_history, jobs)
    faults = {seed: find_fault(seed, results, LIMIT_SECONDS) for seed, results in zip(seeds, answers, strict=True)}
    assert not any(faults.values()), {seed: fault for seed, fault in faults.items() if fault}
