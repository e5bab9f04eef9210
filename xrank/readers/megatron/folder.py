"""The folder of a Megatron checkpoint: where ``latest_checkpointed_iteration.txt`` leads, and what lies there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress

from xrank.errors import ContradictionError, IncompleteError, UnsafeError
from xrank.formats.regular_file import open_regular, shown

__all__ = ["TRACKER", "checkpoint_folder", "iteration_of", "sibling_iterations", "why_not"]

TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_ITERATION = re.compile(r"iter_([0-9]{7,18})", re.ASCII)
_MAX_TRACKER_NBYTES = 64


def why_not(path: str, holds: Callable[[str], bool], what: str) -> str | None:
    """Return None if a folder is a checkpoint, or its marker names one; otherwise why not.

    Args:
        path: what the user gave.
        holds: says whether a folder is a checkpoint of the kind.
        what: what such a folder holds, in words.
    """
    if not os.path.isdir(path):
        return "no folder"
    if holds(path):
        return None
    if not os.path.lexists(os.path.join(path, TRACKER)):
        return f"no {what} and no {TRACKER}"
    with suppress(UnsafeError, ValueError, OSError):
        named = os.path.join(path, _named(path))
        if os.path.isdir(named):
            return None if holds(named) else f"its {TRACKER} names a folder without {what}"
    # A damaged marker is for `checkpoint_folder` to name, if this is the format it belongs to.
    below = [os.path.join(path, entry) for entry in [*sibling_iterations(path), _RELEASE]]
    return None if any(map(holds, below)) else f"a {TRACKER}, but no {what} below it"


def checkpoint_folder(path: str, holds: Callable[[str], bool]) -> str:
    """Return the folder that holds the files: the path itself, or the one its marker names.

    Raises:
        UnsafeError, CorruptError: the marker is no iteration's number.
        IncompleteError: there is no such folder, or no marker.
    """
    if holds(path):
        return path
    tracker = os.path.join(path, TRACKER)
    if not os.path.lexists(tracker):
        raise IncompleteError(
            f"{path} holds no Megatron checkpoint",
            file=path,
            want=f"a checkpoint's files, or a {TRACKER} that names their folder",
            next_step="check the path",
        )
    name = _named(path)
    folder = os.path.join(path, name)
    if not os.path.isdir(folder) or not holds(folder):
        raise IncompleteError(
            f"{tracker} names {name}, where no checkpoint of this kind lies",
            file=tracker,
            got=", ".join(sibling_iterations(path)[-5:]) or "no iter_* folder",
            want=name,
            next_step="copy that folder here, or name the checkpoint's folder itself",
        )
    return folder


def _named(path: str) -> str:
    """Return the folder's name that the marker stands for (megatron/training/checkpointing.py: read_metadata)."""
    with open_regular(os.path.join(path, TRACKER)) as file:
        if not 0 < file.nbytes <= _MAX_TRACKER_NBYTES:
            raise file.origin.corrupt("is no marker", got=f"{file.nbytes} bytes", want="a number, or release")
        text = file.read(0, file.nbytes).decode("latin1").strip()
        if text == _RELEASE:
            return text
        if not re.fullmatch("[0-9]{1,18}", text, re.ASCII):
            raise file.origin.corrupt("is no marker", got=shown(text), want="a number, or release")
        return f"iter_{int(text):07d}"


def sibling_iterations(path: str) -> list[str]:
    """Return the names of the iterations' folders in a folder, by rising number."""
    found = [entry for entry in os.listdir(path) if _ITERATION.fullmatch(entry)] if os.path.isdir(path) else []
    return sorted(found, key=lambda entry: int(entry[5:]))


def iteration_of(folder: str, told: object, file: str) -> int | None:
    """Return the iteration that a checkpoint's file tells; None where it tells none, as converters leave it.

    Raises:
        ContradictionError: the folder's name tells another one.
    """
    step = told if type(told) is int and told >= 0 else None
    name = os.path.basename(os.path.realpath(folder))
    found = _ITERATION.fullmatch(name)
    if found is not None and step is not None and step != int(found[1]):
        raise ContradictionError(
            f"{file} is of another iteration than its folder",
            file=file,
            got=f"iteration {step}",
            want=f"iteration {int(found[1])}, as the folder's name tells",
            next_step=f"copy {name} again from where it was written",
        )
    return step
