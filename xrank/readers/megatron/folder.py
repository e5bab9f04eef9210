"""The folder of a Megatron checkpoint: resolves ``latest_checkpointed_iteration.txt``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress

from xrank.errors import ContradictionError, IncompleteError, UnsafeError
from xrank.formats.regular_file import open_regular, quote
from xrank.stores import places

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,18})", re.ASCII)
_MAX_TRACKER_NBYTES = 64


def explain_mismatch(path: str, holds: Callable[[str], bool], what: str) -> str | None:
    """Return None if a folder is a checkpoint, or its marker names one; otherwise the reason against it.

    Args:
        path: the user's path.
        holds: returns whether a folder is a checkpoint of the kind.
        what: description of such a folder's content.
    """
    if not places.is_folder(path):
        return "not a folder"
    if holds(path):
        return None
    if not places.is_present(os.path.join(path, TRACKER)):
        return f"no {what} and no {TRACKER}"
    with suppress(UnsafeError, ValueError, OSError):
        named = os.path.join(path, _read_marker(path))
        if places.is_folder(named):
            return None if holds(named) else f"its {TRACKER} names a folder without {what}"
    # If this format owns the marker, `resolve_folder` reports damage to it.
    below = [os.path.join(path, entry) for entry in [*sibling_iterations(path), _RELEASE]]
    return None if any(map(holds, below)) else f"a {TRACKER}, but no {what} below it"


def resolve_folder(path: str, holds: Callable[[str], bool]) -> str:
    """Return the folder that contains the files: the path itself, or the one that its marker names.

    Raises:
        UnsafeError, CorruptError: the marker is not an iteration's number.
        IncompleteError: the folder or the marker is missing.
    """
    if holds(path):
        return path
    tracker = os.path.join(path, TRACKER)
    if not places.is_present(tracker):
        raise IncompleteError(
            f"{path} contains no Megatron checkpoint",
            file=path,
            want=f"a checkpoint's files, or a {TRACKER} that names their folder",
            next_step="check the path",
        )
    name = _read_marker(path)
    folder = os.path.join(path, name)
    if not places.is_folder(folder) or not holds(folder):
        raise IncompleteError(
            f"{tracker} names {name}, which contains no checkpoint of this kind",
            file=tracker,
            got=", ".join(sibling_iterations(path)[-5:]) or "no iter_* folder",
            want=name,
            next_step="copy that folder here, or give the path of the checkpoint's own folder",
        )
    return folder


def _read_marker(path: str) -> str:
    """Return the name of the folder that the marker means (megatron/training/checkpointing.py: read_metadata)."""
    with open_regular(os.path.join(path, TRACKER)) as file:
        if not 0 < file.nbytes <= _MAX_TRACKER_NBYTES:
            raise file.origin.corrupt("is not a marker", got=f"{file.nbytes} bytes", want="a number, or release")
        text = file.read(0, file.nbytes).decode("latin1").strip()
        if text == _RELEASE:
            return text
        if not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
            raise file.origin.corrupt("is not a marker", got=quote(text), want="a number, or release")
        # Made of the number alone, so no marker can lead out of the folder.
        return f"iter_{int(text):07d}"


def sibling_iterations(path: str) -> list[str]:
    """Return the names of the iterations' folders in a folder, in rising order."""
    found = (
        [entry for entry in places.list_names(path) if _ITERATION.fullmatch(entry)] if places.is_folder(path) else []
    )
    return sorted(found, key=lambda entry: int(entry[5:]))


def check_iteration(folder: str, recorded: object, file: str) -> int | None:
    """Return the iteration that a checkpoint's file records; None if it records none, like converters' files.

    Raises:
        ContradictionError: the folder's name contains another number.
    """
    step = recorded if type(recorded) is int and recorded >= 0 else None
    name = os.path.basename(places.real(folder))
    found = _ITERATION.fullmatch(name)
    if found is not None and step is not None and step != int(found[1]):
        raise ContradictionError(
            f"{file} belongs to another iteration than its folder",
            file=file,
            got=f"iteration {step}",
            want=f"iteration {int(found[1])}, as in the folder's name",
            next_step=f"copy {name} again from where it was written",
        )
    return step
