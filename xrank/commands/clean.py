"""Clean: remove abandoned stages and messages of this user's dead processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from xrank.engine.report import CleanDetails, Report, timed_report
from xrank.errors import UsageError, names_own_arguments
from xrank.formats.deltas import version_of
from xrank.ranks.directory_messages import MessageName
from xrank.storage import places
from xrank.storage.folder_stage import clean_messages, clean_places, folder_time
from xrank.storage.url import is_url


@names_own_arguments
def clean(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    dry_run: bool = False,
    now: Callable[[str], float] = folder_time,
) -> Report:
    """Remove abandoned stages and messages of gathers in these folders; complete a replacement that a kill interrupted.

    A stage is abandoned when its gather's lock is free and its process is gone. Stages of another host, and messages of
    live gathers, which have no lock, are abandoned after an hour without a change. Only what xrank made is removed: a
    folder needs, besides its name, a journal or a manifest of xrank in it, and a message must be a file of this user.
    Anything else with such a name stays, and the report names it. xrank's shared memory has no name and ends with its
    last process.

    For an output in a store, the uploads of a dead gather are aborted, and the objects of a commit that was killed are
    removed. S3 does not record which program began an upload, so one that no journal names stays; in Azure and Google,
    whose parts bear xrank's names, it goes when it is an hour old.

    In a folder of versions (``weight_v000001``, ...), the versions before the newest whole model are removed, too: no
    reader needs them. They stay if the chain from that model to the newest version is incomplete.

    Args:
        paths: folders that hold outputs, messages or versions, or outputs themselves; URLs of outputs or of folders of
            versions; or one of them.
        dry_run: list the files without removing them.
        now: returns the time in seconds by the clock that stamps a folder's files, a file server's for instance.

    Raises:
        UsageError: a path is not a folder.

    Example:
        >>> import xrank
        >>> xrank.clean(".", dry_run=True).details["num_removed"]
        0
    """
    started = time.monotonic()
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    stages: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for path in paths:
        if is_url(os.fspath(path)):
            from xrank.storage.bucket_stage import clean_bucket  # folders do not need this module

            stages += clean_bucket(os.fspath(path), dry_run=dry_run)
            stages += _clean_versions(places.enter(path), dry_run=dry_run)
            continue
        if not os.path.isdir(path):
            raise UsageError(f"{os.fspath(path)} is not a folder", file=os.fspath(path), next_step="check the path")
        folder = os.fspath(path)
        seconds = now(folder)
        stages += clean_places(folder, dry_run=dry_run, now=seconds)
        stages += _clean_versions(folder, dry_run=dry_run)
        messages += clean_messages(folder, MessageName.owner_state, dry_run=dry_run, now=seconds)
    sizes = [row["nbytes"] for row in (*stages, *messages) if row["removed"]]
    return timed_report(
        "clean",
        started,
        details=CleanDetails(
            stages=stages,
            messages=messages,
            num_removed=len(sizes),
            removed_nbytes=sum(sizes),
            dry_run=dry_run,
        ),
    )


def _clean_versions(path: str, *, dry_run: bool) -> list[dict[str, Any]]:
    if not places.is_folder(path) or not any(version_of(name) is not None for name in places.list_names(path)):
        return []
    from xrank.commands.unneeded_versions import remove_unneeded_versions  # few folders contain versions

    return remove_unneeded_versions(path, dry_run=dry_run)
