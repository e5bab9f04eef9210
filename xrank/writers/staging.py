"""The stage: a hidden folder beside the output where everything is written, then one rename makes it the output.

Order of events: ``open_stage`` finishes or clears what dead runs left, claims or makes a stage and writes its journal;
each file is written, synced, renamed to its name, its folder synced, and (shards) a line synced to the journal;
``commit`` removes the journal, syncs, renames the stage to the output, syncs, and reads the result back. A kill at any
point leaves the output absent, old or whole, and a stage that the same command goes on with.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from xrank.errors import UsageError, XrankError
from xrank.faces import option
from xrank.writers.abandoned import claim, owner_text, roll_forward, taken_over, write_journal
from xrank.writers.disk import explain, explaining
from xrank.writers.output_lock import hold_lock
from xrank.writers.output_place import OutputPlace, check_output, check_room, make_parents
from xrank.writers.stage import Stage

__all__ = ["Stage", "check_apart", "check_output", "check_room", "open_stage"]


@contextmanager
def open_stage(
    out: str | os.PathLike[str],
    *,
    plan_digest: str,
    overwrite: bool = False,
    replaces_states: bool = False,
    resume: bool = True,
) -> Iterator[Stage]:
    """Give the body a stage for an output; what the body does not commit is kept for the next run, or removed.

    Args:
        out: the folder to be.
        plan_digest: says which plan the files belong to; only a stage of the same plan is gone on with.
        overwrite: whether a model that is there may be replaced.
        replaces_states: whether a workspace may be, too.
        resume: whether to go on with what an interrupted run finished.

    Raises:
        OutputExistsError: the output exists, or another gather to it is under way or was quicker.
        NoSpaceError: a disk is full; what is finished is kept.
        UsageError: a folder or file may not be written.
    """
    check_output(out, overwrite=overwrite, replaces_states=replaces_states)
    place = OutputPlace.of(out)
    make_parents(place)
    with hold_lock(place.lock_path, place.path, owner=lambda: owner_text(place)):
        try:
            roll_forward(place)
            check_output(out, overwrite=overwrite, replaces_states=replaces_states)  # again: now nobody else is at it
            claimed = claim(place, plan_digest, resume=resume)
            stage = Stage(
                place,
                claimed.path or _new_stage(place, plan_digest),
                plan_digest,
                overwrite=overwrite,
                replaces_states=replaces_states,
                finished=claimed.finished,
                notes=claimed.notes,
            )
        except XrankError as error:
            if isinstance(error.__cause__, FileNotFoundError):  # no lock held between two hosts, and they met
                raise taken_over(place) from error
            raise
        try:
            yield stage
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # stopped, not failed: there is no time to tidy, and the next run goes on
        except BaseException as error:
            stage.abandon()
            if isinstance(error, OSError) and not isinstance(error, XrankError):
                # A write by descriptor knows no name: the stage is where the body writes.
                raise explain(error, os.fsdecode(error.filename or stage.path)) from error
            raise
        stage.abandon()


def _new_stage(place: OutputPlace, plan_digest: str) -> str:
    path = place.new_stage()
    with explaining(path):
        os.mkdir(path)
    write_journal(path, plan_digest)
    return path


def check_apart(source: str, out: str) -> None:
    """Refuse an output that is, holds or lies in the place of its source: replacing it would remove what is read."""
    inner, outer = os.path.realpath(source), os.path.realpath(out)
    if inner == outer or inner.startswith(outer + os.sep):
        raise UsageError(
            f"the output {out} would replace its source {source}",
            file=out,
            next_step=f"give {option('out')} a folder of its own",
        )
