"""Open, check, settle and read outputs wherever they are: a folder on a disk, or a prefix in a bucket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from xrank.errors import UsageError, XrankError, option
from xrank.storage.disk import sync_folder
from xrank.storage.manifest import MANIFEST_NAME, read_manifest
from xrank.storage.output_place import OutputPlace, check_folder_output, hold_lock
from xrank.storage.url import clean_path, is_url

if TYPE_CHECKING:
    from xrank.storage.commit import Stage


class HasSource(Protocol):
    """A plan of an output."""

    @property
    def source(self) -> Any:
        """The model that is read, at its `path`."""


Planned = TypeVar("Planned", bound=HasSource)


def check_output(out: str | os.PathLike[str], *, overwrite: bool, replaces_states: bool = False) -> None:
    """Refuse an output that exists or cannot be made. Writes nothing.

    An existing model may be replaced if `overwrite`, an existing workspace if `replaces_states` too; else it is an
    OutputExistsError. UsageError if it cannot be written to, or not replaced.
    """
    if is_url(os.fspath(out)):
        from xrank.storage.bucket_stage import BucketPlace, check_bucket_output  # local runs do not need this module

        check_bucket_output(BucketPlace.from_url(out), overwrite=overwrite, is_states=replaces_states)
    else:
        check_folder_output(out, overwrite=overwrite, replaces_states=replaces_states)


@contextmanager
def open_stage(
    out: str | os.PathLike[str],
    *,
    plan_digest: str,
    overwrite: bool = False,
    replaces_states: bool = False,
    resume: bool = True,
) -> Iterator[Stage]:
    """Yield a stage for an output; without a commit its finished files are kept for the next run, the rest removed.

    If `resume`, files that an interrupted run of the same plan has finished are kept. OutputExistsError if the output
    exists, or another gather to it is running or was faster; NoSpaceError, UsageError as of `xrank.storage.disk`.
    """
    options = {"overwrite": overwrite, "replaces_states": replaces_states, "resume": resume}
    if is_url(os.fspath(out)):
        from xrank.storage.bucket_stage import BucketPlace, open_bucket_stage

        with open_bucket_stage(BucketPlace.from_url(out), plan_digest, **options) as stored:
            yield stored
    else:
        from xrank.storage.folder_stage import open_folder_stage  # a dry run opens none

        with open_folder_stage(OutputPlace.from_path(out), plan_digest, **options) as stage:
            yield stage


def settle_output(out: str | os.PathLike[str]) -> None:
    """Finish the work of a run that ended after its commit: sync the output's name, and remove lock or journal."""
    if is_url(os.fspath(out)):
        from xrank.storage.bucket_stage import BucketPlace, settle_bucket_output

        settle_bucket_output(BucketPlace.from_url(out))
        return
    place = OutputPlace.from_path(out)
    sync_folder(place.parent)
    if os.path.lexists(place.lock_path):
        with suppress(XrankError), hold_lock(place.lock_path, place.path, owner=lambda: ""):
            pass  # which removes it; another run's stays


def recover_output(out: str) -> None:
    """Finish a replacement that a kill interrupted, so that the old output or the new one is there to be read."""
    if is_url(out) or not os.path.isdir((place := OutputPlace.from_path(out)).parent):
        return
    if place.identifiers("-old"):
        from xrank.storage.folder_stage import describe_owner, roll_forward

        with hold_lock(place.lock_path, place.path, owner=lambda: describe_owner(place)):
            roll_forward(place)


def clear_remains(out: str) -> None:
    """Remove what killed runs left beside an output that is whole; errors as of `open_stage`."""
    settle_output(out)
    if not is_url(out) and OutputPlace.from_path(out).identifiers():
        with open_stage(out, plan_digest="", overwrite=True):
            pass  # it takes over what they left, and leaves nothing


def read_output_manifest(out: str) -> dict[str, Any]:
    """Return the manifest of an output; errors as `read_manifest`."""
    if is_url(out):
        from xrank.storage.bucket_stage import BucketPlace, read_bucket_manifest

        return read_bucket_manifest(BucketPlace.from_url(out))
    return read_manifest(os.path.join(out, MANIFEST_NAME))


def output_file_nbytes(out: str, name: str) -> int:
    """Return the size of a file of an output; OSError or XrankError if it cannot be looked at."""
    if is_url(out):
        from xrank.storage.bucket_stage import BucketPlace

        place = BucketPlace.from_url(out)
        return place.store.head(place.file_key(name)).nbytes
    return os.path.getsize(os.path.join(out, name))


def check_store_writer(out: str, *, ranks: int) -> None:
    """Refuse an output in a store that several ranks would make and sign: no rank could read the others' files."""
    if is_url(out) and ranks > 1:
        what = f"{out}: an output in a store can only be signed by a single process"
        next_step = f"gather in one process, or omit {option('sign')}"
        raise UsageError(what, file=out, got=f"{ranks} ranks", want="one process", next_step=next_step)


def check_apart(source: str, out: str) -> None:
    """Refuse an output that is its source or contains it: replacing the output would remove the source."""
    inner, outer = (clean_path(path) if is_url(path) else os.path.realpath(path) for path in (source, out))
    if inner == outer or inner.startswith((outer + "/", outer + os.sep)):
        next_step = f"give a separate folder as {option('out')}"
        raise UsageError(f"the output {out} would replace its source {source}", file=out, next_step=next_step)


def plan_apart(
    source: str,
    out: str,
    plan: Callable[[], Planned],
    *,
    overwrite: bool,
    replaces_states: bool = False,
    checks_output: bool = True,
) -> Planned:
    """Make a plan whose source and output are apart; errors of `check_apart`, `check_output` and `plan`.

    Only the first rank `checks_output`: others may see an outdated folder.
    """
    check_apart(source, out)
    if checks_output:
        records_plan = False  # whether an output that records its plan is the one to make shows once this plan is made
        with suppress(OSError, XrankError):
            records_plan = not overwrite and "plan" in read_output_manifest(out)
        if not records_plan:
            check_output(out, overwrite=overwrite, replaces_states=replaces_states)
    planned = plan()
    check_apart(planned.source.path, out)  # the source may have been found in a folder below the given one
    return planned
