"""Clean: removes what dead gathers of this user left and nobody went on with: stages, messages, shared memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from xrank.conversion.report import peak_rss_nbytes
from xrank.errors import UsageError
from xrank.plan.report import CleanDetails, Report
from xrank.writers.cleaning import clean_places, list_messages, list_segments

__all__ = ["clean"]


def clean(
    paths: Sequence[str | os.PathLike[str]],
    *,
    dry_run: bool = False,
    memory: str = "/dev/shm",  # noqa: S108 - shm_overview(7)
    now: Callable[[], float] = time.time,
) -> Report:
    """Remove abandoned stages and messages in and of these folders; finish a replacement that a kill interrupted.

    A stage is abandoned when its gather's lock is free and its process is gone, or, for one of another host, when
    nothing in it has changed for an hour. So is a message of a live gather, which has no lock. What is other users', or
    still in use, is left alone. xrank's shared memory has no name and ends with its last process; segments of the names
    that ModelOpt gives go when nobody holds them and they are an hour old.

    Args:
        paths: folders that hold outputs or messages, or outputs themselves.
        dry_run: only say what would be removed.
        memory: where the system keeps shared memory with names.
        now: the time in seconds, to compare with the files'.

    Raises:
        UsageError: a path is no folder.
    """
    started = time.monotonic()
    stages: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for path in paths:
        if not os.path.isdir(path):
            raise UsageError(f"{os.fspath(path)} is no folder", file=os.fspath(path), next_step="check the path")
        stages += clean_places(os.fspath(path), dry_run=dry_run, now=now())
        messages += list_messages(os.fspath(path), now())
    segments = list_segments(memory, now())
    for row in (*messages, *segments):
        if row["removed"] and not dry_run:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(row["path"])
    removed = [row for row in (*stages, *messages, *segments) if row["removed"]]
    return Report(
        command="clean",
        seconds=time.monotonic() - started,
        peak_rss_nbytes=peak_rss_nbytes(),
        details=CleanDetails(
            stages=stages,
            messages=messages,
            segments=segments,
            num_removed=len(removed),
            removed_nbytes=sum(row["nbytes"] for row in removed),
            dry_run=dry_run,
        ),
    )
