"""Where an output is to be, the names xrank uses beside it, and what may not be replaced there.

.<name>.xrank-<id>/        a stage, or what an output was before it was replaced
.<name>.xrank-<id>-old/    the old output while the stage of that id takes its place, without renameat2's exchange
.<name>.xrank.lock         the lock
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass

from xrank.errors import OutputExistsError, UsageError
from xrank.writers.disk import describe, explaining, sync_folder

__all__ = ["MANIFEST_NAME", "OutputPlace", "check_output", "check_replaceable", "exists", "make_parents"]

MANIFEST_NAME = "xrank_manifest.json"
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class OutputPlace:
    """Where an output is to be, and the names xrank uses beside it."""

    path: str
    """Absolute; the folder it is in has no link on its way."""
    parent: str
    name: str

    @classmethod
    def of(cls, out: str | os.PathLike[str]) -> OutputPlace:
        """Return the place of an output path.

        Raises:
            UsageError: the path names no folder that could be made.
        """
        text = os.path.abspath(os.fspath(out))
        parent, name = os.path.split(text)
        if not name or "\0" in text:
            raise UsageError(f"{out!s}: is no name for an output folder", file=text, next_step="name a new folder")
        parent = os.path.realpath(parent)
        return cls(os.path.join(parent, name), parent, name)

    @property
    def lock_path(self) -> str:
        """The lock file."""
        return os.path.join(self.parent, f".{self.name}.xrank.lock")

    def new_stage(self) -> str:
        """Return a stage's path that nobody can guess."""
        return self.stage(secrets.token_hex(8))

    def stage(self, identifier: str) -> str:
        """Return the path of the stage of that id."""
        return os.path.join(self.parent, f".{self.name}.xrank-{identifier}")

    def identifiers(self, suffix: str = "") -> list[str]:
        """List the ids of this user's folders ``.<name>.xrank-<id><suffix>``, in order. No link is followed."""
        prefix = f".{self.name}.xrank-"
        found = []
        with explaining(self.parent):
            names = os.listdir(self.parent)
        for name in names:
            identifier = name[len(prefix) : len(name) - len(suffix)]
            if name == f"{prefix}{identifier}{suffix}" and _ID.fullmatch(identifier):
                with suppress(OSError):
                    status = os.lstat(os.path.join(self.parent, name))
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                        found.append(identifier)
        return sorted(found)


def check_output(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse an output that exists or cannot be made. Writes nothing.

    Raises:
        OutputExistsError: it exists, and ``overwrite`` is not given or would replace what is no model.
        UsageError: the folder it is to be in cannot be written to.
    """
    place = OutputPlace.of(out)
    if os.path.lexists(place.path):
        if not overwrite:
            raise exists(place.path, "")
        check_replaceable(place.path)
    there = place.parent
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        raise UsageError(f"{there}: is no folder, so {place.path} cannot be made", file=there, got=_kind(there))
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(
            f"{there}: cannot be written to ({describe(there)})",
            file=there,
            got=describe(there),
            want="a folder this user may write to",
            next_step="choose another --out, or change the folder's owner or mode",
        )


def check_replaceable(path: str) -> None:
    """Refuse to replace what is not an empty folder or one that holds a model: ``--overwrite --out ~`` is a slip.

    Raises:
        OutputExistsError: it is something else; the message says what it holds.
    """
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        with explaining(path):
            names = os.listdir(path)
        known = {MANIFEST_NAME, "config.json"}
        if not names or any(name in known or name.endswith(".safetensors") for name in names):
            return
    raise OutputExistsError(
        f"{path}: is {_kind(path)}, no model, so --overwrite does not replace it",
        file=path,
        got=_kind(path),
        want="a folder that holds a model, or nothing",
        next_step="choose another --out, or remove it yourself",
    )


def exists(path: str, when: str) -> OutputExistsError:
    """Return the error for an output whose name is taken; ``when`` says since when, if not from the start."""
    return OutputExistsError(
        f"{path}: {when or 'exists already'} ({_kind(path)})",
        file=path,
        got=_kind(path),
        want="nothing there",
        next_step="choose another --out, or add --overwrite to replace a model",
    )


def make_parents(place: OutputPlace) -> None:
    """Make the folders above the output, so that they last."""
    missing = []
    folder = place.parent
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with explaining(path):
            with suppress(FileExistsError):
                os.mkdir(path)
            sync_folder(os.path.dirname(path))


def _kind(path: str) -> str:
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return f"a symbolic link to {os.readlink(path)!r}"
        if stat.S_ISREG(mode):
            return "a file"
        if not stat.S_ISDIR(mode):
            return "a device, FIFO or socket"
        names = sorted(os.listdir(path))
    except OSError:
        return "something that cannot be looked at"
    if not names:
        return "an empty folder"
    shown = ", ".join(repr(name) for name in names[:3])
    return f"a folder that holds {shown}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
