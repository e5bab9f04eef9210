"""Stages and messages that dead processes left: which are abandoned, and their removal."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from xrank import system
from xrank.errors import OutputExistsError
from xrank.storage.commit import owner_state
from xrank.storage.folder_stage import clear_folder, describe_owner, is_own, read_journal, roll_forward
from xrank.storage.output_place import OutputPlace, hold_lock

_STAGE = re.compile(r"\.(.+)\.xrank-[0-9a-f]{16}(-old)?")
_ABANDONED_SECONDS = 3600
"""After this long without a change, a stage whose owner can't be asked (another host's) counts as abandoned."""


def folder_time(folder: str) -> float:
    """Return the time, in seconds, by the clock that stamps a folder's files; this host's where no file can be made.

    A file server's clock may differ from this host's by more than an hour, and a file's age is known by its own clock
    alone. Where no file can be made, none can be removed either.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def clean_messages(
    path: str, message_state: Callable[[str], str | None], *, dry_run: bool, now: float
) -> list[dict[str, Any]]:
    """Remove the abandoned messages of live gathers in a folder; return what was found.

    Args:
        path: the folder.
        message_state: returns ``alive``, ``gone`` or ``unknown`` for the owner of a message, None for other names.
        dry_run: whether only to list them.
        now: seconds by the clock that stamps the folder's files.
    """
    rows = []
    for entry in os.scandir(path):
        state = message_state(entry.name)
        if state is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # a rank that lives removes its message once it was read
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != system.user_id():
                continue  # xrank makes files, and this user's processes make this user's
            verdict = _verdict(state, "", now - status.st_mtime)
            rows.append({"path": entry.path, "nbytes": status.st_size, **verdict})
            if verdict["removed"] and not dry_run:
                try:
                    os.unlink(entry.path)
                except PermissionError as error:
                    rows[-1].update(removed=False, why=f"it cannot be removed: {error.strerror}")
    return rows


def clean_places(path: str, *, dry_run: bool, now: float) -> list[dict[str, Any]]:
    """Remove the abandoned stages of outputs in a folder, and of the folder as an output; return what was found."""
    names = {match[1] for entry in os.listdir(path) if (match := _STAGE.fullmatch(entry)) is not None}
    places = [OutputPlace.from_path(os.path.join(path, name)) for name in sorted(names)]
    found = []
    for place in [*places, OutputPlace.from_path(path)]:
        if not place.identifiers() and not place.identifiers("-old"):
            continue
        if dry_run:
            found += _rows(place, now)
            continue
        try:
            with hold_lock(place.lock_path, place.path, owner=partial(describe_owner, place)):
                rows = _rows(place, now)
                roll_forward(place)
                for row in rows:
                    if row["removed"]:
                        clear_folder(place, row["path"])
                found += rows
        except OutputExistsError:
            found += [{**row, "removed": False, "why": "its gather is running"} for row in _rows(place, now)]
    return found


def _rows(place: OutputPlace, now: float) -> list[dict[str, Any]]:
    rows = []
    for identifier in place.identifiers():
        with contextlib.suppress(FileNotFoundError):  # a gather that is running has made it its output
            rows.append(_row(place.stage(identifier), now))
    return rows


def _row(path: str, now: float) -> dict[str, Any]:
    journal = read_journal(path)
    nbytes, changed = _size_and_change(path)
    if not is_own(path):
        return {"path": path, "nbytes": nbytes, "removed": False, "why": "nothing in it shows that xrank made it"}
    state = "unknown" if journal is None else owner_state(journal.host, journal.pid)
    pid = str(journal.pid) if journal else ""
    return {"path": path, "nbytes": nbytes, **_verdict(state, pid, now - changed)}


def _verdict(state: str, pid: str, age_seconds: float) -> dict[str, Any]:
    """Return whether something of a process that is alive, gone or unknown is abandoned, and why."""
    is_old = age_seconds > _ABANDONED_SECONDS
    process = f"its process {pid}".rstrip()
    why = {
        "gone": f"{process} is gone",
        "alive": f"{process} is running",
        "unknown": "nothing has changed in it for an hour" if is_old else "its owner can't be asked, and it is recent",
    }[state]
    return {"removed": state == "gone" or (state == "unknown" and is_old), "why": why}


def _size_and_change(path: str) -> tuple[int, float]:
    nbytes, changed = 0, os.lstat(path).st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a gather that is running renames what it has finished
                status = os.lstat(os.path.join(folder, name))
                nbytes += status.st_size
                changed = max(changed, status.st_mtime)
    return nbytes, changed
