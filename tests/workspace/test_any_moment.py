"""A rank that dies at any moment after its first gather is named on all others in time, on any medium."""

import random
import signal
import statistics
import time

import pytest
import torch.distributed as dist

from tests.other_hosts import move_to_host
from tests.sampled import sampled
from tests.workspace.forked_ranks import attempt, gather, run_many
from xrank.ranks import meeting

WAYS = {"memory": 2, "directory": 2, "sockets of one host": 2, "sockets between hosts": 15}
"""Seconds that a death may take to be named, on a quiet machine."""
WORLD = 4
LISTS = ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0], [2, 3], [0, 2], [3, 1], [2, 0, 3, 1])
MAX_DELAY_SECONDS = 0.25
"""Time in which the ranks meet in all lists and gather some hundred times, on a quiet machine."""


def draw(seed):
    """Return the victim, its life in seconds, and the pause of each rank before its first of the counted gathers."""
    chosen = random.Random(f"moment {seed}")
    pauses = [chosen.choice((0.0, 0.05)) * chosen.random() for _ in range(WORLD)]
    return chosen.randrange(WORLD), 1e-6 + MAX_DELAY_SECONDS * chosen.random() ** 2, pauses


def gather_until_a_death(rank, argument):
    seed, way, directory = argument.split(" ", 2)
    victim, seconds, pauses = draw(int(seed))
    if way.startswith("sockets"):
        # Without the other two, process numbers still count, as of containers that share them.
        move_to_host(rank, *(() if way == "sockets-between-hosts" else (meeting,)))
    store = dist.distributed_c10d._get_default_store()
    gather(rank, list(range(WORLD)))  # a rank that dies before its first gather has left no sign
    dist.barrier()
    if rank == victim:
        store.set("death", str(time.monotonic() + seconds))
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends a process as SIGKILL does
    time.sleep(pauses[rank])
    path = directory if way == "directory" else None

    def gather_on(number):
        ranks = LISTS[number % len(LISTS)]
        if rank in ranks:
            want = [100 * number + r for r in ranks] if rank == ranks[0] else []
            assert gather(100 * number + rank, ranks, workspace_path=path) == want

    result, number, last = None, 0, None
    while last is None or number <= last:
        outcome = attempt(lambda: gather_on(number))  # noqa: B023 - called at once
        if "error" in outcome:
            if result is None or outcome["rank"] != victim:
                result = outcome
            # A rank that stopped here would leave others waiting for it in lists without the victim: all go on to one
            # list of all ranks, the next one.
            after = next(later for later in range(number + 1, 10**6) if len(LISTS[later % len(LISTS)]) == WORLD)
            last = int(store.compare_set("last", "", str(after)))
        number += 1
    # All others name it before any of them ends: an end without a report is a death, too.
    store.add("named", 1)
    while store.add("named", 0) < WORLD - 1:
        time.sleep(0.01)
    return {**result, "late": result["when"] - float(store.get("death"))}


def pytest_generate_tests(metafunc):
    """Give the seeds, five to a job: five in `make test`, twenty in `make test-all`, all hundred in `make soak`."""
    if "seeds" in metafunc.fixturenames:
        count = 100 if metafunc.config.getoption("soak") else 20
        jobs = [range(first, first + 5) for first in range(0, count, 5)]
        metafunc.parametrize("seeds", sampled(jobs, len(jobs)), ids=lambda seeds: f"from {seeds[0]}")


def way_of(seed):
    """Return the medium of a seed: the first ten have none whose deaths only a heartbeat shows, which takes longer."""
    return list(WAYS)[seed % 3 if seed < 10 else seed % 4]


@pytest.mark.timeout(600)
def test_a_rank_that_dies_at_any_moment_is_named_on_all_others(tmp_path, seeds, pytestconfig):
    jobs = [(WORLD, f"{seed} {way_of(seed).replace(' ', '-')} {tmp_path / str(seed)}") for seed in seeds]
    slowest = {way: [] for way in WAYS}
    for seed, results in zip(seeds, run_many(gather_until_a_death, jobs), strict=True):
        victim, way = draw(seed)[0], way_of(seed)
        assert results[victim] is None, (seed, way, results)
        for rank, result in enumerate(results):
            if rank != victim:
                assert result["error"] == "RankFailedError" and result["rank"] == victim, (seed, way, rank, results)
        slowest[way].append(max(result["late"] for result in results if result is not None))
    print({way: [round(seconds, 2) for seconds in sorted(late)] for way, late in slowest.items()})
    for way, late in slowest.items():
        # A busy machine keeps the promise most of the time. A death of this host that only a heartbeat shows, or one
        # that nothing shows, would be later than these limits.
        # Beside other tests the machine may be busier: the promise itself is held to by `make soak`.
        limit = WAYS[way] if pytestconfig.getoption("soak") else 5 * WAYS[way]
        assert not late or (statistics.median(late) < limit and max(late) < 4 * limit), slowest
