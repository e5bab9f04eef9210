"""What dead gathers left beside an output: finished by the next start, gone on with, or cleared away.

Each folder is taken over by renaming it to an id of one's own: of two that try, one finds it gone.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from xrank.errors import OutputExistsError
from xrank.faces import option
from xrank.writers.disk import describe, explaining, sync_folder, write_all
from xrank.writers.journal import JOURNAL_NAME, Journal, JournalLine, journal_text, read_journal
from xrank.writers.output_place import MANIFEST_NAME, OutputPlace
from xrank.writers.rename import move, move_new

__all__ = ["Claim", "claim", "clear", "owner_text", "roll_forward", "taken_over", "write_journal"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A stage to go on with, and what was found on the way."""

    path: str | None
    """None: nothing to go on with."""
    finished: tuple[JournalLine, ...]
    notes: tuple[str, ...]


def roll_forward(place: OutputPlace) -> None:
    """Finish what a killed overwrite began without an exchange: the new output if it is there, else the old."""
    for identifier in place.identifiers("-old"):
        stage = place.stage(identifier)
        old = f"{stage}-old"
        staged = os.path.isdir(stage)
        if not os.path.lexists(place.path):
            # The old one is moved aside only when the stage is whole and on disk.
            complete = staged and os.path.isfile(os.path.join(stage, MANIFEST_NAME))
            with explaining(place.path), suppress(FileNotFoundError, FileExistsError):
                move_new(stage if complete else old, place.path)
            sync_folder(place.parent)
            if complete:
                clear(place, old)
        elif not staged:
            clear(place, old)
        # else: something new took the name between the two renames; both stay until it is gone.


def claim(place: OutputPlace, plan_digest: str, *, resume: bool) -> Claim:
    """Take over the stage an interrupted run of the same plan left; clear all others of this user's away."""
    path: str | None = None
    finished: tuple[JournalLine, ...] = ()
    notes = []
    pending = set(place.identifiers("-old"))
    for identifier in place.identifiers():
        stage = place.stage(identifier)
        if identifier in pending:
            continue
        journal = read_journal(stage)
        if not resume or path is not None or journal is None or journal.plan != plan_digest:
            clear(place, stage)
            notes.append(_why_cleared(stage, journal, plan_digest, resume=resume))
            continue
        mine = place.new_stage()
        with explaining(stage):
            try:
                move(stage, mine)
            except FileNotFoundError:
                continue  # another gather was quicker
        # Read again: until the rename its owner may have lived and added to it.
        journal = read_journal(mine) or journal
        path, finished = mine, _keep_finished(mine, journal)
        write_journal(mine, plan_digest, finished)
    return Claim(path, finished, tuple(notes))


def clear(place: OutputPlace, path: str) -> None:
    """Remove a folder of this user's beside the output; nothing is left that could be taken for a whole one."""
    with explaining(path):
        doomed = place.new_stage()
        try:
            move(path, doomed)
        except FileNotFoundError:
            return
        with suppress(FileNotFoundError):  # another start may clear the same
            shutil.rmtree(doomed)


def write_journal(stage: str, plan_digest: str, finished: Sequence[JournalLine] = ()) -> None:
    """Put a new journal in place of any other, whole or not at all."""
    path = os.path.join(stage, JOURNAL_NAME)
    fresh = f"{path}.part"
    with explaining(path):
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, journal_text(plan_digest, socket.gethostname(), os.getpid(), finished))
            os.fsync(fd)
        finally:
            os.close(fd)
        move(fresh, path)
    sync_folder(stage)


def owner_text(place: OutputPlace) -> str:
    """Say who writes to the output, as its stage tells it."""
    for identifier in place.identifiers():
        journal = read_journal(place.stage(identifier))
        if journal is not None:
            return f"host {journal.host}, pid {journal.pid}"
    return f"it has only begun; lock {describe(place.lock_path)}"


def taken_over(place: OutputPlace) -> OutputExistsError:
    """Return the error for a gather whose stage another one has claimed."""
    return OutputExistsError(
        f"{place.path}: another gather to it took over this one's stage ({owner_text(place)})",
        file=place.path,
        next_step=f"wait for the other gather, or give this one another {option('out')}",
    )


def _keep_finished(stage: str, journal: Journal) -> tuple[JournalLine, ...]:
    finished = {}
    for line in journal.lines:
        with suppress(OSError):
            status = os.lstat(os.path.join(stage, line.file))
            if stat.S_ISREG(status.st_mode) and status.st_size == line.nbytes:
                finished[line.file] = line
    with explaining(stage):
        for entry in list(os.scandir(stage)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in finished and entry.name != JOURNAL_NAME:
                os.unlink(entry.path)
    return tuple(finished.values())


def _why_cleared(stage: str, journal: Journal | None, plan_digest: str, *, resume: bool) -> str:
    name = os.path.basename(stage)
    if not resume:
        return f"{name}: left by an earlier run, cleared away: this run was not to resume"
    if journal is None:
        return f"{name}: cleared away: no journal of this version of xrank, or a damaged one"
    if journal.plan != plan_digest:
        return f"{name}: cleared away: its run had another plan (another source, or other options)"
    return f"{name}: cleared away: a second stage of the same plan"
