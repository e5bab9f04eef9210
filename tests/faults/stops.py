"""Jobs are killed at their calls that change the disk, or these fail: the output is then absent, old or new."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from itertools import count as count_from
from pathlib import Path

from tests.faults.findings import Findings
from tests.faults.jobs import EXTRA, make_jobs
from tests.storage.kill_points import error_points, kill_points
from xrank.errors import XrankError

__all__ = ["fail_jobs", "kill_jobs"]

_ERRORS = (
    *((number, False) for number in (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.EROFS)),
    *((number, True) for number in (errno.EIO, errno.ENOENT)),
)
"""Each errno, and whether the call is made all the same: as a network file system does that loses an answer."""
_CLOSING = ((errno.EIO, True), (errno.EDQUOT, True))
"""Errors of close(); the descriptor is closed all the same (close(2))."""
_FORGIVEN = ("unlink", "rmdir", "close", "no call")
"""Calls whose failure a job may pass over: they remove needless files, or close files that were only read."""


def kill_jobs(folder: Path, seed: int, count: int) -> Findings:
    """Kill jobs at so many points, or at all if there are fewer: after a call, and within it."""
    findings = Findings()
    runs = [(job, torn) for job in make_jobs(folder) for torn in (False, True)]
    for (job, torn), (first, every) in zip(runs, _spread(seed, count, len(runs)), strict=True):
        for point in kill_points(job.work, extra=EXTRA, every=every, first=first, torn=torn):
            findings.count("kills")
            findings.count(f"of {job.name}")
            job.judge(findings, f"{job.name}, killed {'in' if torn else 'after'} call {point}")
            job.reset()
    return findings


def fail_jobs(folder: Path, seed: int, count: int) -> Findings:
    """Let calls of jobs fail at so many points, or at all if there are fewer, with each errno."""
    findings = Findings()
    runs = [
        (job, number, perform, extra)
        for job in make_jobs(folder)
        for errors, extra in ((_ERRORS, EXTRA), (_CLOSING, (*EXTRA, (os, "close"))))
        for number, perform in errors
    ]
    for (job, number, perform, extra), (first, every) in zip(runs, _spread(seed, count, len(runs)), strict=True):
        outcomes = error_points(job.work, number, extra=extra, perform=perform, every=every, first=first)
        for point, outcome in zip(count_from(first, every), outcomes, strict=False):
            call = outcome.calls[point - 1] if len(outcome.calls) >= point else "no call"
            name = errno.errorcode[number]
            where = f"{job.name}: {name} of call {point}, {call}{', which was made' if perform else ''}"
            findings.count("errors")
            findings.count(f"of {job.name}")
            if outcome.finished:
                if job.seen() != "new":
                    findings.report(f"{job.name}: ends well with {job.seen()}", where)
                elif not perform and call not in _FORGIVEN:
                    findings.count(f"passed over: {name} of {call}, {job.name}")
            elif not isinstance(outcome.error, XrankError | OSError):
                findings.report(
                    f"raw {type(outcome.error).__name__} after {name} of {call}", f"{where}\n{outcome.error}"
                )
            elif isinstance(outcome.error, XrankError):
                if outcome.error.file is None:
                    findings.report(
                        f"{job.name}: an error without a file after {name} of {call}", f"{where}\n{outcome.error}"
                    )
                elif outcome.error.exit_code not in (1, 2):
                    findings.report(
                        f"{job.name}: exit {outcome.error.exit_code} after {name} of {call}",
                        f"{where}\n{outcome.error}",
                    )
            elif outcome.error.filename is None:
                findings.report(f"{job.name}: a plain OSError after {name} of {call}", f"{where}\n{outcome.error}")
            job.judge(findings, where)
            job.reset()
    return findings


def _spread(seed: int, count: int, num_runs: int) -> Iterator[tuple[int, int]]:
    """Yield for each run its first point and the distance of the others, so that about `count` points are tried."""
    rng = random.Random(seed)
    every = max(1, round(num_runs * _CALLS / count))
    for _ in range(num_runs):
        yield rng.randint(1, every), every


_CALLS = 80
"""Calls of a job, roughly."""
