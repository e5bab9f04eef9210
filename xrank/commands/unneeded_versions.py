"""Versions of a model that no reader needs, as a later one is whole."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from xrank.errors import XrankError
from xrank.formats.deltas import INDEX_NAME, version_name
from xrank.readers.deltas import find_chain, list_versions, number_of
from xrank.readers.hugging_face.folder import read_facts, read_headers
from xrank.storage import places
from xrank.storage.folder_stage import clear_folder
from xrank.storage.manifest import MANIFEST_NAME
from xrank.storage.output_place import OutputPlace
from xrank.storage.places import open_store
from xrank.storage.url import is_url


def remove_unneeded_versions(folder: str, *, dry_run: bool) -> list[dict[str, Any]]:
    """Remove the versions before the newest whole one, of a folder of versions, and return a row for each.

    A reader goes back from the version that it wants to the newest whole one. So nothing is removed unless that one,
    and the chain from it to the newest version, are there. A version that xrank has not written stays.
    """
    versions = list_versions(folder)
    kept = _find_first_needed(versions)
    rows = []
    for number, path in versions.items():
        if kept is None or number >= kept:
            break
        is_own = places.is_file(os.path.join(path, MANIFEST_NAME))
        why = f"{version_name(kept)} is whole" if is_own else "nothing in it shows that xrank made it"
        nbytes = sum(places.nbytes_of(os.path.join(path, name)) for name in places.list_names(path))
        rows.append({"path": path, "nbytes": nbytes, "removed": is_own, "why": why})
        if is_own and not dry_run:
            _remove(path)
    return rows


def _find_first_needed(versions: dict[int, str]) -> int | None:
    """Return the newest whole version from which the chain to the newest version is there; None without one."""
    with suppress(XrankError):
        whole = max((number for number, path in versions.items() if read_facts(path) is None), default=None)
        if whole is None:
            return None
        read_headers(versions[whole])  # all its files are there
        newest = max(versions)
        if newest == whole or number_of(find_chain(versions[newest]).base) == whole:
            return whole
    return None


def _remove(path: str) -> None:
    if not is_url(path):
        clear_folder(OutputPlace.from_path(path), path)
        return
    # Without its index, a version is not there.
    for name in sorted(places.list_names(path), key=lambda name: name != INDEX_NAME):
        store, key = open_store(os.path.join(path, name))
        store.delete(key)
