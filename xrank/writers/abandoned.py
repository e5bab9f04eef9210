"""Folders that dead gathers left beside an output: the next start finishes, resumes or removes them.

A gather takes a folder over by renaming it to an id of its own: of two that try, one finds it gone.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from xrank import system
from xrank.errors import OutputExistsError, XrankError, option
from xrank.writers.disk import describe, explain_errors, sync_folder
from xrank.writers.journal import JOURNAL_NAME, Journal, JournalLine, encode_journal, read_journal
from xrank.writers.output_place import MANIFEST_NAME, OutputPlace
from xrank.writers.rename import move, move_new


@dataclass(frozen=True, slots=True)
class ClaimedStage:
    """A stage to resume, and notes about the folders that were removed."""

    path: str | None
    """None if there is nothing to resume."""
    finished: tuple[JournalLine, ...]
    notes: tuple[str, ...]


def roll_forward(place: OutputPlace) -> None:
    """Finish a killed overwrite that had no exchange: restore the new output if it is whole, else the old."""
    for identifier in place.identifiers("-old"):
        stage = place.stage(identifier)
        old = f"{stage}-old"
        staged = os.path.isdir(stage)
        if not os.path.lexists(place.path):
            # The old output is moved aside only after the stage is whole and on disk.
            complete = staged and os.path.isfile(os.path.join(stage, MANIFEST_NAME))
            with explain_errors(place.path), suppress(FileNotFoundError, FileExistsError):
                move_new(stage if complete else old, place.path)
            # Before the old output is removed: otherwise a power loss could leave neither of the two.
            sync_folder(place.parent)
            if complete:
                clear_folder(place, old)
        elif not staged:
            clear_folder(place, old)
        # else: something new took the name between the two renames; both folders stay until it is gone.


def claim_stage(place: OutputPlace, plan_digest: str, *, resume: bool) -> ClaimedStage:
    """Take over the stage that an interrupted run of the same plan left; remove this user's other stages."""
    path: str | None = None
    finished: tuple[JournalLine, ...] = ()
    notes = []
    pending = set(place.identifiers("-old"))
    for identifier in place.identifiers():
        stage = place.stage(identifier)
        # An unfinished replacement whose name something else has taken: `roll_forward` has left it alone.
        if identifier in pending:
            continue
        if not is_own(stage):
            notes.append(f"{os.path.basename(stage)}: left alone: nothing in it shows that xrank made it")
            continue
        journal = read_journal(stage)
        if not resume or path is not None or journal is None or journal.plan != plan_digest:
            clear_folder(place, stage)
            notes.append(_explain_clearing(stage, journal, plan_digest, resume=resume))
            continue
        mine = place.new_stage()
        with explain_errors(stage):
            try:
                move(stage, mine)
            except FileNotFoundError:
                continue  # another gather took it first
        # Read again: until the rename its owner may have been alive and have added lines.
        journal = read_journal(mine) or journal
        path, finished = mine, _keep_finished(mine, journal)
        write_journal(mine, plan_digest, finished)
    return ClaimedStage(path, finished, tuple(notes))


def is_own(stage: str) -> bool:
    """Return whether a folder with a stage's name contains a file that only xrank writes, or nothing at all.

    Every stage has a journal until it is whole, and then a manifest.
    """
    try:
        names = os.listdir(stage)
    except FileNotFoundError:  # its gather has made it the output
        return True
    return not names or not {JOURNAL_NAME, f"{JOURNAL_NAME}.part", MANIFEST_NAME}.isdisjoint(names)


def clear_folder(place: OutputPlace, path: str) -> None:
    """Remove a folder of this user beside the output; its rename comes first, so no half-removed output is left."""
    with explain_errors(path):
        doomed = place.new_stage()
        try:
            move(path, doomed)
        except FileNotFoundError:
            return
        with suppress(FileNotFoundError):  # another start may remove the same folder
            # A journal that goes last shows that the folder is xrank's to remove, should a kill leave a part of it.
            if not os.path.lexists(os.path.join(doomed, JOURNAL_NAME)):
                with suppress(OSError, XrankError):  # such as on a full disk, where removing must go on
                    write_journal(doomed, "")
            for entry in list(os.scandir(doomed)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name != JOURNAL_NAME:
                    os.unlink(entry.path)
            shutil.rmtree(doomed)


def write_journal(stage: str, plan_digest: str, finished: Sequence[JournalLine] = ()) -> None:
    """Replace the journal of a stage, atomically."""
    path = os.path.join(stage, JOURNAL_NAME)
    fresh = f"{path}.part"
    with explain_errors(path):
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        fd = os.open(fresh, system.NEW, 0o666)
        try:
            system.write_all(fd, encode_journal(plan_digest, socket.gethostname(), os.getpid(), finished))
            os.fsync(fd)
        finally:
            os.close(fd)
        move(fresh, path)
    sync_folder(stage)


def describe_owner(place: OutputPlace) -> str:
    """Describe the process that writes to the output, from its stage's journal."""
    for identifier in place.identifiers():
        journal = read_journal(place.stage(identifier))
        if journal is not None:
            return f"host {journal.host}, pid {journal.pid}"
    return f"it has only begun; lock {describe(place.lock_path)}"


def make_takeover_error(place: OutputPlace) -> OutputExistsError:
    """Return the error for a gather whose stage another gather has taken over."""
    return OutputExistsError(
        f"{place.path}: another gather to it took over this one's stage ({describe_owner(place)})",
        file=place.path,
        next_step=f"wait for the other gather, or give this one another {option('out')}",
    )


def _keep_finished(stage: str, journal: Journal) -> tuple[JournalLine, ...]:
    finished = {}
    for line in journal.lines:
        with suppress(OSError):
            status = os.lstat(os.path.join(stage, line.file))
            # Sizes only; the run that resumes verifies the digests.
            if stat.S_ISREG(status.st_mode) and status.st_size == line.nbytes:
                finished[line.file] = line
    with explain_errors(stage):
        for entry in list(os.scandir(stage)):
            # Folders contain companions only, which have no line in the journal and are copied again.
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name not in finished and entry.name != JOURNAL_NAME:
                os.unlink(entry.path)
    return tuple(finished.values())


def _explain_clearing(stage: str, journal: Journal | None, plan_digest: str, *, resume: bool) -> str:
    name = os.path.basename(stage)
    if not resume:
        return f"{name}: left by an earlier run, cleared away: this run was not to resume"
    if journal is None:
        return f"{name}: cleared away: no journal of this version of xrank, or a damaged one"
    if journal.plan != plan_digest:
        return f"{name}: cleared away: its run had another plan (another source, or other options)"
    return f"{name}: cleared away: a second stage of the same plan"
