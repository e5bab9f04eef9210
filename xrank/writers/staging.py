"""The stage: a hidden folder beside the output where everything is written, then one rename makes it the output.

Order of events: ``open_stage`` finishes or removes folders of dead runs, takes over or makes a stage and writes its
journal; each file is written, synced, renamed to its name, its folder synced, and (shards) a line synced to the
journal; ``commit`` removes the journal, syncs, renames the stage to the output, syncs, and reads the result back. A
kill at any point leaves the output absent, old or whole, and a stage that the same command resumes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from xrank.errors import UsageError, XrankError, option
from xrank.plan.source import StoredModel
from xrank.stores.url import clean_path, is_url
from xrank.writers.abandoned import claim_stage, describe_owner, make_takeover_error, roll_forward, write_journal
from xrank.writers.disk import explain, explain_errors, sync_folder
from xrank.writers.manifest import MANIFEST_NAME, read_manifest
from xrank.writers.output_lock import hold_lock
from xrank.writers.output_place import OutputPlace, check_room, make_parents
from xrank.writers.output_place import check_output as check_folder_output
from xrank.writers.output_stage import OutputStage
from xrank.writers.stage import Stage

__all__ = [
    "Stage",
    "check_apart",
    "check_output",
    "check_room",
    "check_store_writer",
    "open_stage",
    "output_file_nbytes",
    "plan_apart",
    "read_output_manifest",
    "settle_output",
]


class HasSource(Protocol):
    """A plan of an output."""

    @property
    def source(self) -> StoredModel:
        """The model that is read."""


Planned = TypeVar("Planned", bound=HasSource)


def check_output(out: str | os.PathLike[str], *, overwrite: bool, replaces_states: bool = False) -> None:
    """Refuse an output that exists or cannot be made. Writes nothing.

    Args:
        out: the folder to make, or its URL in a store.
        overwrite: whether an existing model may be replaced.
        replaces_states: whether an existing workspace may be replaced too, as by an output that is one.

    Raises:
        OutputExistsError: it exists, and ``overwrite`` is not given or it is not a model.
        UsageError: it cannot be written to, or not replaced.
    """
    if is_url(os.fspath(out)):
        from xrank.writers.store_staging import check_store_output  # local runs do not need this module

        check_store_output(out, overwrite=overwrite, is_states=replaces_states)
    else:
        check_folder_output(out, overwrite=overwrite, replaces_states=replaces_states)


def read_output_manifest(out: str) -> dict[str, Any]:
    """Return the manifest of an output.

    Raises:
        IncompleteError: there is none.
        CorruptError: it is damaged.
    """
    if is_url(out):
        from xrank.writers.store_staging import read_store_manifest  # local runs do not need this module

        return read_store_manifest(out)
    return read_manifest(os.path.join(out, MANIFEST_NAME))


def output_file_nbytes(out: str, name: str) -> int:
    """Return the size of a file of an output.

    Raises:
        OSError, XrankError: it cannot be looked at.
    """
    if is_url(out):
        from xrank.writers.store_staging import store_file_nbytes  # local runs do not need this module

        return store_file_nbytes(out, name)
    return os.path.getsize(os.path.join(out, name))


def _records_plan(out: str) -> bool:
    try:
        return "plan" in read_output_manifest(out)
    except (OSError, XrankError):
        return False


@contextmanager
def open_stage(
    out: str | os.PathLike[str],
    *,
    plan_digest: str,
    overwrite: bool = False,
    replaces_states: bool = False,
    resume: bool = True,
) -> Iterator[OutputStage]:
    """Yield a stage for an output; without a commit its finished files are kept for the next run, the rest removed.

    Args:
        out: the folder to make, or its URL in a store.
        plan_digest: digest of the plan; only a stage of the same plan is resumed.
        overwrite: whether an existing model may be replaced.
        replaces_states: whether an existing workspace may be replaced too.
        resume: whether to keep the files that an interrupted run has finished.

    Raises:
        OutputExistsError: the output exists, or another gather to it is under way or was faster.
        NoSpaceError: a disk is full; finished files are kept.
        UsageError: a folder or file may not be written.
    """
    if is_url(os.fspath(out)):
        from xrank.writers.store_staging import open_store_stage  # local runs do not need this module

        with open_store_stage(out, plan_digest=plan_digest, overwrite=overwrite, resume=resume) as stored:
            yield stored
        return
    check_output(out, overwrite=overwrite, replaces_states=replaces_states)
    place = OutputPlace.from_path(out)
    make_parents(place)
    with hold_lock(place.lock_path, place.path, owner=lambda: describe_owner(place)):
        try:
            roll_forward(place)
            check_output(out, overwrite=overwrite, replaces_states=replaces_states)  # again, now under the lock
            claimed = claim_stage(place, plan_digest, resume=resume)
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
            if isinstance(error.__cause__, FileNotFoundError):  # the lock did not exclude another host's gather
                raise make_takeover_error(place) from error
            raise
        try:
            yield stage
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise  # stopped, not failed: leave the stage as it is, and the next run resumes it
        except BaseException as error:
            stage.abandon()
            if isinstance(error, OSError) and not isinstance(error, XrankError):
                # The error of a write by descriptor has no path; the body writes to the stage.
                raise explain(error, os.fsdecode(error.filename or stage.path)) from error
            raise
        # After a commit this does nothing.
        stage.abandon()


def _new_stage(place: OutputPlace, plan_digest: str) -> str:
    path = place.new_stage()
    with explain_errors(path):
        os.mkdir(path)
    write_journal(path, plan_digest)
    return path


def check_store_writer(out: str, *, ranks: int) -> None:
    """Refuse an output in a store that several ranks would make and sign: no rank could read the others' files.

    Raises:
        UsageError: it is one.
    """
    if is_url(out) and ranks > 1:
        raise UsageError(
            f"{out}: an output in a store is signed by the one process that makes it",
            file=out,
            got=f"{ranks} ranks",
            want="one process",
            next_step=f"gather in one process, or leave {option('sign')} out",
        )


def settle_output(out: str | os.PathLike[str]) -> None:
    """Finish the work of a run that ended after its rename: sync the output's name, and remove the lock.

    Raises:
        XrankError: the folder cannot be synced.
    """
    if is_url(os.fspath(out)):
        from xrank.writers.store_staging import settle_store_output  # local runs do not need this module

        settle_store_output(os.fspath(out))
        return
    place = OutputPlace.from_path(out)
    sync_folder(place.parent)
    if os.path.lexists(place.lock_path):
        with suppress(XrankError), hold_lock(place.lock_path, place.path, owner=lambda: ""):
            pass  # which removes it; another run's stays


def check_apart(source: str, out: str) -> None:
    """Refuse an output that is its source or contains it: replacing the output would remove the source."""
    inner, outer = (clean_path(path) if is_url(path) else os.path.realpath(path) for path in (source, out))
    if inner == outer or inner.startswith((outer + "/", outer + os.sep)):
        raise UsageError(
            f"the output {out} would replace its source {source}",
            file=out,
            next_step=f"give {option('out')} a folder of its own",
        )


def plan_apart(
    source: str,
    out: str,
    plan: Callable[[], Planned],
    *,
    overwrite: bool,
    replaces_states: bool = False,
    checks_output: bool = True,
) -> Planned:
    """Return a plan whose source and output are apart.

    Args:
        source: the path that the user gave.
        out: the output.
        plan: makes the plan, which names the folder where the source was found.
        overwrite: as `check_output`.
        replaces_states: as `check_output`.
        checks_output: whether this rank looks at the output. Only the first does: others may see an outdated folder.

    Raises:
        UsageError: as `check_apart` and `check_output`; errors of `plan`.
    """
    check_apart(source, out)
    # Whether an output that records its plan is the one to make shows once this plan is made.
    if checks_output and (overwrite or not _records_plan(out)):
        check_output(out, overwrite=overwrite, replaces_states=replaces_states)
    planned = plan()
    check_apart(planned.source.path, out)  # the source may have been found in a folder below the given one
    return planned
