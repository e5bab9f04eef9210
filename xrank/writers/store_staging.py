"""Opens, settles and cleans outputs in stores; `xrank.writers.staging` does so in folders."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from xrank.errors import ContradictionError, IncompleteError, OutputExistsError, UsageError, XrankError, option
from xrank.stores.uploads import WRITABLE, Uploads, open_uploads
from xrank.stores.url import split_url
from xrank.words import list_text
from xrank.writers.manifest import MANIFEST_NAME, parse_manifest
from xrank.writers.store_journal import (
    Journal,
    OpenJournal,
    make_owned,
    put_journal,
    read_journal,
    wait_for_owner,
)
from xrank.writers.store_place import StorePlace
from xrank.writers.store_replacing import Replaced, find_replaced
from xrank.writers.store_stage import StoreStage

_ABANDONED_SECONDS = 3600
"""An upload without a journal counts as abandoned after this long."""


def check_store_output(out: str | os.PathLike[str], *, overwrite: bool, is_states: bool = False) -> None:
    """Refuse an output in a store where objects are already. Writes nothing.

    Args:
        out: URL of the output.
        overwrite: whether an existing model may be replaced.
        is_states: whether the output is the states of ranks.

    Raises:
        OutputExistsError: there are.
        UsageError: it cannot be an output, or a store cannot replace what is there.
    """
    place = StorePlace.from_url(out)
    open_uploads(place.store, place.url)  # without credentials, or a package, the call must change
    if is_states and overwrite:
        raise UsageError(
            f"{place.url}: states of ranks in a store are not replaced",
            file=place.url,
            next_step=f"choose another {option('out')}",
        )
    found = read_journal(place)
    if found is None or found[0] is None or not found[0].is_committing:
        _find_replaced(place, overwrite=overwrite)


def _find_replaced(place: StorePlace, *, overwrite: bool) -> Replaced | None:
    """Return the model that an output may replace; refuse any other objects."""
    if overwrite:
        return find_replaced(place)
    _check_absent(place)
    return None


def _check_absent(place: StorePlace) -> None:
    there = place.store.list_folder(place.key)
    names = sorted([*there.objects, *(f"{name}/" for name in there.folders)])
    if names:
        raise OutputExistsError(
            f"{place.url}: exists already (a prefix that holds {list_text(map(repr, names), 3)})",
            file=place.url,
            want="nothing there",
            next_step=f"choose another {option('out')}, or add {option('overwrite', True)} to replace a model",
        )


@contextmanager
def open_store_stage(
    out: str | os.PathLike[str], *, plan_digest: str, overwrite: bool = False, resume: bool = True
) -> Iterator[StoreStage]:
    """Yield a stage for an output in a store; without a commit its finished parts are kept for the next run.

    Args:
        out: URL of the output.
        plan_digest: digest of the plan; only uploads of the same plan are resumed.
        overwrite: whether an existing model may be replaced.
        resume: whether to keep the parts that an interrupted run has uploaded.

    Raises:
        OutputExistsError: the output exists, or another gather to it is under way.
    """
    check_store_output(out, overwrite=overwrite)
    place = StorePlace.from_url(out)
    with closing(open_uploads(place.store, place.url)) as uploads:
        journal, notes = _claim(place, uploads, plan_digest, resume=resume)
        try:
            if not journal.content.is_committing:
                # Again, now that no other gather is under way.
                journal.set_replaced(_find_replaced(place, overwrite=overwrite))
            stage = StoreStage(place, uploads, journal, notes=notes)
        except BaseException:
            if journal.content.uploads:
                journal.release()
            else:
                journal.remove()
            raise
        try:
            yield stage
        finally:
            stage.leave()


def _claim(
    place: StorePlace, uploads: Uploads, plan_digest: str, *, resume: bool
) -> tuple[OpenJournal, tuple[str, ...]]:
    """Make the journal of this output, or take over that of a run that ended."""
    found = read_journal(place)
    fresh = make_owned(Journal(secrets.token_hex(8), plan_digest))
    if found is None:
        try:
            return OpenJournal(place, fresh, put_journal(place, fresh, None)), ()
        except OutputExistsError as error:
            raise _make_running_error(place, None) from error
    old, version = found
    if wait_for_owner(place, old, version):
        raise _make_running_error(place, old)
    is_same = old is not None and old.plan == plan_digest and resume
    if old is not None and old.is_committing and not is_same:
        raise OutputExistsError(
            f"{place.url}: a gather of another plan was stopped while its files became visible",
            file=place.url,
            next_step=f"run that gather again, which ends it, or run xrank clean {place.url}",
        )
    mine = make_owned(old) if old is not None and is_same else fresh
    try:
        journal = OpenJournal(place, mine, put_journal(place, mine, version))
    except (ContradictionError, IncompleteError) as error:  # two took it over at once
        raise _make_running_error(place, None) from error
    if is_same or old is None:
        return journal, ()
    for upload in old.uploads.values():
        uploads.abort(place.file_key(upload.name), upload.upload_id)
    why = "its run had another plan (another source, or other options)" if resume else "this run was not to resume"
    return journal, (f"{place.url}: the uploads of an earlier run were removed: {why}",)


def _make_running_error(place: StorePlace, owner: Journal | None) -> OutputExistsError:
    who = "" if owner is None else f" (host {owner.host}, pid {owner.pid})"
    return OutputExistsError(
        f"{place.url}: another gather to it is under way{who}",
        file=place.url,
        next_step=f"wait for it, or choose another {option('out')}",
    )


def read_store_manifest(out: str) -> dict[str, Any]:
    """Return the manifest of an output in a store.

    Raises:
        IncompleteError: there is none.
        CorruptError: it is damaged.
    """
    place = StorePlace.from_url(out)
    key = place.file_key(MANIFEST_NAME)
    status = place.store.head(key)
    return parse_manifest(bytes(place.store.read(key, 0, status.nbytes, status)), place.store.url(key))


def store_file_nbytes(out: str, name: str) -> int:
    """Return the size of a file of an output in a store.

    Raises:
        IncompleteError: there is no such file.
    """
    place = StorePlace.from_url(out)
    return place.store.head(place.file_key(name)).nbytes


def is_replaced_now(url: str) -> bool:
    """Return whether a gather is replacing the model at a URL, or was stopped while it did."""
    if split_url(url).scheme not in WRITABLE or not split_url(url).key:
        return False
    found = read_journal(StorePlace.from_url(url))
    return found is not None and found[0] is not None and found[0].is_committing and found[0].replaced is not None


def settle_store_output(out: str) -> None:
    """Finish the work of a run that ended after its commit: remove what it replaced, and its journal."""
    place = StorePlace.from_url(out)
    found = read_journal(place)
    if found is None or found[0] is None or wait_for_owner(place, *found):
        return
    with suppress(XrankError), closing(open_uploads(place.store, place.url)) as uploads:
        if found[0].replaced is not None and _has(place, uploads, found[0], found[0].last):
            for name in found[0].replaced.outdated:
                place.store.delete(place.file_key(name))
        mine = make_owned(found[0])
        OpenJournal(place, mine, put_journal(place, mine, found[1])).remove()


def clean_store(url: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Abort the uploads that dead gathers to an output left, and remove what a killed commit has made visible.

    Args:
        url: the output.
        dry_run: whether only to list them.

    Returns:
        One row for each upload or object.
    """
    place = StorePlace.from_url(url)
    with closing(open_uploads(place.store, place.url)) as uploads:
        return _clean(place, uploads, dry_run=dry_run)


def _clean(place: StorePlace, uploads: Uploads, *, dry_run: bool) -> list[dict[str, Any]]:
    found = read_journal(place)
    owner = found[0] if found is not None else None
    if found is not None and wait_for_owner(place, *found):
        return [_row(place.store.url(place.journal_key), 0, "its gather is running", removed=False)]
    rows = []
    known = {one.upload_id for one in owner.uploads.values()} if owner is not None else set()
    for key, upload_id, age_seconds in [*uploads.list_uploads(f"{place.key}/")]:
        removed, why = upload_id in known, "its gather is gone"
        if not removed and uploads.lists_only_own:  # a kill between the upload's beginning and the journal's line
            removed = age_seconds > _ABANDONED_SECONDS
            why = "no journal names it, and it is " + ("over an hour old" if removed else "recent")
        elif not removed:
            why = "no journal names it: another program may be writing it"
        parts = uploads.list_parts(key, upload_id) or {}
        rows.append(_row(f"{place.store.url(key)} (upload)", sum(p[0] for p in parts.values()), why, removed=removed))
        if removed and not dry_run:
            uploads.abort(key, upload_id)
    if found is None:
        return rows
    if owner is not None and owner.replaced is not None and _has(place, uploads, owner, owner.last):
        if not _has(place, uploads, owner, MANIFEST_NAME):
            why = "its model is visible, and its manifest is not yet: the same gather, run again, ends it"
            return [*rows, _row(place.store.url(place.journal_key), 0, why, removed=False)]
        rows += _clean_outdated(place, uploads, owner.replaced, dry_run=dry_run)
    if owner is not None and owner.is_committing:
        rows += _clean_visible(place, uploads, owner, dry_run=dry_run)
    rows.append(_row(place.store.url(place.journal_key), 0, "its gather is gone", removed=True))
    if not dry_run:
        content = make_owned(Journal("", "") if owner is None else owner)
        OpenJournal(place, content, put_journal(place, content, found[1])).remove()
    return rows


def _clean_visible(place: StorePlace, uploads: Uploads, owner: Journal, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove the objects of a commit that was killed before its last one; a whole output stays."""
    if _has(place, uploads, owner, owner.last):
        return []
    rows = []
    for name in sorted(place.store.list_folder(place.key).objects):
        there = uploads.head(place.file_key(name))
        if there is not None and there.mark == owner.stage:
            why = "its gather was stopped while its files became visible"
            rows.append(_row(place.file_url(name), there.nbytes, why, removed=True))
            if not dry_run:
                place.store.delete(place.file_key(name))
    return rows


def _clean_outdated(place: StorePlace, uploads: Uploads, replaced: Replaced, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove the weights of a model that another one has replaced."""
    rows = []
    for name in replaced.outdated:
        there = uploads.head(place.file_key(name))
        if there is not None:
            rows.append(_row(place.file_url(name), there.nbytes, "another model has replaced it", removed=True))
            if not dry_run:
                place.store.delete(place.file_key(name))
    return rows


def _has(place: StorePlace, uploads: Uploads, owner: Journal, name: str) -> bool:
    """Return whether a file of the output is the one that the journal's gather has made visible."""
    there = uploads.head(place.file_key(name)) if owner.is_committing else None
    return there is not None and there.mark == owner.stage


def _row(path: str, nbytes: int, why: str, *, removed: bool) -> dict[str, Any]:
    return {"path": path, "nbytes": nbytes, "removed": removed, "why": why}
