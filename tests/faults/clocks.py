"""Jobs and shared gathers under a wall clock that jumps by years at each reading, beside `clean`, and after kills."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from unittest import mock

from tests.commands.forked_ranks import forked_ranks
from tests.faults.findings import Findings
from tests.faults.jobs import EXTRA, Job, make_jobs
from tests.faults.rank_stops import Gathers
from tests.storage.kill_points import in_child, kill_points
from xrank.commands.clean import clean

__all__ = ["jump_clocks"]

_YEARS_SECONDS = 20 * 365 * 86400
_CALLS = 60
"""Calls of a job that change the disk, roughly."""


def jump_clocks(folder: Path, seed: int, count: int) -> Findings:
    """Run jobs so often: beside a `clean` at one of their calls, or killed there and done again; some by four ranks."""
    findings = Findings()
    num_shared = count // 10
    with _jumping_clock(random.Random(seed)), forked_ranks() as ranks:
        gathers = Gathers(ranks, folder / "shared")
        for number in range(seed, seed + num_shared):
            _share(gathers, findings, f"seed {number}: four ranks")
    jobs = [*make_jobs(folder)]
    for number in range(seed + num_shared, seed + count):
        rng = random.Random(number)
        job, point = jobs[number % len(jobs)], rng.randint(1, _CALLS)
        where = f"seed {number}: {job.name}, call {point}"
        with _jumping_clock(rng):
            (_clean_beside if rng.random() < 0.5 else _kill)(job, point, rng, findings, where)
        job.reset()
    return findings


@contextmanager
def _jumping_clock(rng: random.Random) -> Iterator[None]:
    """Let the wall clock of this process, and of its forks, jump at each reading."""
    now = time.time()

    def jump() -> float:
        return now + rng.uniform(-_YEARS_SECONDS, _YEARS_SECONDS)

    with mock.patch.object(time, "time", jump), mock.patch.object(time, "time_ns", lambda: int(jump() * 1e9)):
        yield


def _share(gathers: Gathers, findings: Findings, where: str) -> None:
    """Let four ranks share a gather while `clean` runs again and again."""
    has_ended, failures = Event(), list[BaseException]()

    def clean_on() -> None:
        try:
            while not has_ended.is_set():
                clean([gathers.out.parent])
        except BaseException as error:
            failures.append(error)

    shutil.rmtree(gathers.out, ignore_errors=True)
    cleaner = Thread(target=clean_on)
    cleaner.start()
    try:
        ranks = gathers()
    finally:
        has_ended.set()
        cleaner.join()
    findings.count("shared gathers beside clean")
    if failures:
        findings.report(f"clean fails: {type(failures[0]).__name__}", f"{where}\n{failures[0]}")
    if any(rank.exit_code for rank in ranks) or gathers.content() != gathers.known:
        findings.report("a shared gather fails", f"{where}\n{[rank.stderr for rank in ranks]}")


def _clean_beside(job: Job, point: int, rng: random.Random, findings: Findings, where: str) -> None:
    """Let a process clean the folder at a call of the job, with times of change that jumped too; the job goes on."""

    def stop(number: int, call: Callable[[], object]) -> object:
        if number == point:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    _change_times(job, rng)
                    removed = clean([job.folder]).details["num_removed"]
                    status = 2 if removed and job.begins is None else 0
                finally:
                    os._exit(status)
            if os.waitpid(pid, 0)[1]:
                raise AssertionError("clean removes a stage of a job that runs")
        return call()

    outcome = in_child(job.work, stop, EXTRA)
    findings.count("jobs beside clean" if len(outcome.calls) >= point else "jobs")
    if not outcome.finished:
        findings.report(f"{job.name}: {type(outcome.error).__name__} beside clean", f"{where}\n{outcome.error}")
    elif job.seen() != "new":
        findings.report(f"{job.name}: ends well with {job.seen()}", where)


def _kill(job: Job, point: int, rng: random.Random, findings: Findings, where: str) -> None:
    """Kill the job at a call, change the times of what it left, and do it again."""
    next(kill_points(job.work, extra=EXTRA, first=point, torn=rng.random() < 0.5))
    _change_times(job, rng)
    findings.count("kills")
    job.judge(findings, where)


def _change_times(job: Job, rng: random.Random) -> None:
    """Move the times of all that lies beside the output by years."""
    for path in [each for place in job.beside() for each in (place, *place.rglob("*"))]:
        seconds = time.time()
        os.utime(path, (seconds, seconds + rng.uniform(-9, 9)))
