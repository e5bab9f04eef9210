"""Two jobs for each test: a trainer's ranks in the session's pool, an engine's in one of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import pytest

from xrank.testing.rank_pool import RankPool

Job = tuple[int, Callable[..., Any], tuple[Any, ...]]


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def run_jobs(rank_pool: RankPool, engine_pool: RankPool) -> Callable[[Job, Job], tuple[list[Any], list[Any]]]:
    """Return a function that runs a trainer and an engine at once, and returns the results of both by rank."""

    def run(trainer: Job, engine: Job, timeout_seconds: float = 120.0) -> tuple[list[Any], list[Any]]:
        with ThreadPoolExecutor(2) as threads:
            jobs = [
                threads.submit(pool.run, size, function, *args, timeout_seconds=timeout_seconds)
                for pool, (size, function, args) in ((rank_pool, trainer), (engine_pool, engine))
            ]
            for job in as_completed(jobs):
                job.result()  # the first failure explains the other
            return jobs[0].result(), jobs[1].result()

    return run
