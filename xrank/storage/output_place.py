"""The path of an output, the names xrank uses beside it, and checks of existing files there.

.<name>.xrank-<id>/        a stage, or an old output that was replaced
.<name>.xrank-<id>-old/    the old output while the stage of that id takes its place, without renameat2's exchange
.<name>.xrank.lock         the lock
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from msgspec import Struct

from xrank import system
from xrank.errors import (
    AGAIN,
    OutputExistsError,
    UnsafeError,
    UsageError,
    XrankError,
    check_no_url,
    make_sentence,
    option,
)
from xrank.storage.disk import describe, explain, explain_errors, may_share_blocks, measure_free_nbytes, sync_folder
from xrank.storage.places import rank_of, state_file_name
from xrank.storage.url import is_url
from xrank.words import list_text, plural

MANIFEST_NAME = "xrank_manifest.json"
SIGNATURE_NAME = "model.sig"
"""Bundle of model-signing over the folder's files."""
ATTESTATION_NAME = "model.attestation.json"
"""Signed statement about the origin of the folder."""
SALVAGE_NAME = "salvage.json"
"""List of the missing tensors beside the whole tensors of a damaged checkpoint."""
JOURNAL_NAME = ".xrank-journal.jsonl"
"""Hidden: hidden files are never companions, so no companion has this name."""
_Error = TypeVar("_Error", bound=XrankError)
_ID = re.compile(r"[0-9a-f]{16}")
_NO_LOCKS_HERE = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL}
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}


def _refuse(kind: type[_Error], path: str, what: str, otherwise: str = "", **facts: Any) -> _Error:
    next_step = f"choose another {option('out')}{otherwise}"
    return kind(make_sentence(path, what), **{"file": path, "next_step": next_step, **facts})


class OutputPlace(Struct, frozen=True):
    """The path of an output, and the names xrank uses beside it."""

    path: str
    """Absolute; its folder is resolved, without links."""
    parent: str
    name: str

    @classmethod
    def from_path(cls, out: str | os.PathLike[str]) -> OutputPlace:
        """Return the place of an output path; UsageError if it is not a possible folder, or a URL."""
        check_no_url(out)
        text = os.path.abspath(os.fspath(out))
        parent, name = os.path.split(text)
        if not name or "\0" in text:
            raise UsageError(f"{out!s} is not a name for an output folder", file=text, next_step="name a new folder")
        # The folder alone: a link with the output's own name must be refused, not followed.
        parent = os.path.realpath(parent)
        return cls(os.path.join(parent, name), parent, name)

    @property
    def lock_path(self) -> str:
        """The lock file."""
        return os.path.join(self.parent, f".{self.name}.xrank.lock")

    def new_stage(self) -> str:
        """Return the path of a new stage, with a random id."""
        return self.stage(os.urandom(8).hex())

    def stage(self, identifier: str) -> str:
        """Return the path of the stage of that id."""
        return os.path.join(self.parent, f".{self.name}.xrank-{identifier}")

    def identifiers(self, suffix: str = "") -> list[str]:
        """List the ids of this user's folders ``.<name>.xrank-<id><suffix>``, in order. No link is followed."""
        prefix = f".{self.name}.xrank-"
        found = []
        with explain_errors(self.parent):
            names = os.listdir(self.parent)
        for name in names:
            identifier = name[len(prefix) : len(name) - len(suffix)]
            if name == f"{prefix}{identifier}{suffix}" and _ID.fullmatch(identifier):
                with suppress(OSError):
                    status = os.lstat(os.path.join(self.parent, name))
                    # Another user's folder of such a name is neither resumed from nor removed.
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == system.user_id():
                        found.append(identifier)
        return sorted(found)


def check_folder_output(out: str | os.PathLike[str], *, overwrite: bool, replaces_states: bool = False) -> None:
    """Refuse a folder that exists or cannot be made; see `xrank.storage.staging.check_output`."""
    place = OutputPlace.from_path(out)
    if os.path.lexists(place.path):
        if not overwrite:
            raise make_taken_error(place.path, "")
        check_replaceable(place.path, replaces_states=replaces_states)
        # In a sticky folder, such as /tmp, only the owner of an output may rename it (inode(7)).
        folder, output = os.stat(place.parent), os.lstat(place.path)
        if folder.st_mode & stat.S_ISVTX and system.user_id() not in (0, folder.st_uid, output.st_uid):
            got = describe(place.path)
            what = f"owned by a different user, in a folder where only owners may replace ({got})"
            facts = {"got": got, "want": "an output of this user"}
            raise _refuse(UsageError, place.path, what, ", or let its owner run this", **facts)
    there = place.parent
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there):
        what = f"is not a folder, so {place.path} cannot be made"
        raise _refuse(UsageError, there, what, got=_describe_kind(there), want="a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        # Then owner and mode are not the reason.
        is_read_only = hasattr(os, "statvfs") and os.statvfs(there).f_flag & os.ST_RDONLY
        why = "its file system is mounted read-only" if is_read_only else describe(there)
        what, otherwise = f"cannot be written to ({why})", ", or change the folder's owner or mode"
        raise _refuse(UsageError, there, what, otherwise, got=why, want="a writable folder")


def check_room(out: str | os.PathLike[str], nbytes: Sequence[int], source: str) -> None:
    """Refuse an output, of files of these bytes, for which the disk is certainly too small. Writes nothing.

    On a file system that shares blocks, the output may share those of the source.
    """
    if is_url(os.fspath(out)):
        return  # a store has room
    place = OutputPlace.from_path(out)
    if os.path.isdir(place.parent) and place.identifiers():
        return  # an interrupted run may have written most of it already
    free = measure_free_nbytes(place.path)
    needed = max(nbytes, default=0) if may_share_blocks(place.path, source) else sum(nbytes)
    if free is not None and free < needed:
        raise explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), place.path, needed_nbytes=needed)


def check_replaceable(path: str, *, replaces_states: bool) -> None:
    """Refuse to replace anything but an empty folder or a model: overwriting a home folder is a slip.

    A model with other folders in it, such as a trainer's checkpoints, or with ranks' states, is refused too, unless the
    output is states itself: they would be removed with it, and cannot be made from a model.
    """
    status = os.lstat(path)
    if stat.S_ISDIR(status.st_mode):
        with explain_errors(path):
            names = os.listdir(path)
        known = {MANIFEST_NAME, "config.json"}
        if not names or any(name in known or name.endswith(".safetensors") for name in names):
            _check_folders(path, names)
            ranks = sorted(rank for name in names if (rank := rank_of(name)) is not None)
            if ranks and not replaces_states:
                states = f"the states of {plural(len(ranks), 'rank')}"
                what = f"contains {states}, so {option('overwrite', True)} does not write "
                file, got = os.path.join(path, state_file_name(ranks[0])), _describe_kind(path)
                facts = {"file": file, "got": got, "want": "a model, or nothing"}
                what += "a model instead"
                raise _refuse(OutputExistsError, path, what, ", or move it elsewhere", **facts)
            return
    kind = _describe_kind(path)
    what = f"is {kind}, not a model, so {option('overwrite', True)} does not replace it"
    raise _refuse(OutputExistsError, path, what, ", or move it elsewhere", got=kind, want="a model, or nothing")


def _check_folders(path: str, names: Sequence[str]) -> None:
    folders = []
    for name in sorted(names):
        inner = os.path.join(path, name)
        # Folders without any file have nothing to lose; what a link leads to is not looked at.
        if os.path.isdir(inner) and (os.path.islink(inner) or any(files for _, _, files in os.walk(inner))):
            folders.append(name)
    if not folders:
        return
    own = {name.partition("/")[0] for name in read_listed_files(path) if "/" in name}
    others = [name for name in folders if name not in own]
    if others:
        what = f"holds {list_text(map(repr, others), 3)}, not part of a model that xrank wrote, so "
        what += f"{option('overwrite', True)} does not remove it"
        facts = {"file": os.path.join(path, others[0]), "got": f"the folder {others[0]!r} in it", "want": "a model"}
        raise _refuse(OutputExistsError, path, what, ", or move the folder elsewhere", **facts)


def check_inner_name(name: str) -> None:
    """Refuse a file's name that leads out of the output, or that is the journal's."""
    pieces = name.split("/")
    if "\0" in name or not all(piece not in {"", ".", ".."} for piece in pieces) or name == JOURNAL_NAME:
        next_step = "give it a name without .. and without a leading slash"
        raise UnsafeError(f"{name!r} is not the name of a file inside the output", file=name, next_step=next_step)


def read_listed_files(path: str) -> set[str]:
    """Return the files that the manifest lists, and those about all of them, which it cannot list."""
    listed = {MANIFEST_NAME, SIGNATURE_NAME, ATTESTATION_NAME}
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        # Of a FIFO, too, it returns at once.
        with open(os.open(os.path.join(path, MANIFEST_NAME), system.READ), encoding="utf-8") as file:
            manifest = json.load(file)
        listed |= {entry["name"] for entry in (*manifest["files"], *manifest["companions"])}
    return listed


def make_taken_error(path: str, when: str) -> OutputExistsError:
    """Return the error for an output whose name is taken; ``when`` describes a name taken during the run."""
    kind, otherwise = _describe_kind(path), f", or add {option('overwrite', True)} to replace it"
    what = f"{when or 'exists already'} ({kind})"
    return _refuse(OutputExistsError, path, what, otherwise, got=kind, want="nothing there")


def make_parents(place: OutputPlace) -> None:
    """Make the folders above the output, and sync them."""
    missing = []
    folder = place.parent
    while not os.path.lexists(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with explain_errors(path):
            with suppress(FileExistsError):
                os.mkdir(path)
            # Otherwise a power loss could remove a folder together with the output in it.
            sync_folder(os.path.dirname(path))


def _describe_kind(path: str) -> str:
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
        return "something that cannot be examined"
    return f"a folder that holds {list_text(map(repr, names), 3)}" if names else "an empty folder"


def find_other_files(replaced: str, path: str) -> list[str]:
    """Return the files of a replaced folder that neither the new one nor the old manifest contains."""
    listed = read_listed_files(replaced)
    found = []
    for folder, _, names in os.walk(replaced):
        inner = os.path.relpath(folder, replaced)
        own = [name if inner == os.curdir else f"{inner}/{name}" for name in names]
        found += [name for name in own if name not in listed and not os.path.lexists(os.path.join(path, name))]
    return sorted(found)


@contextmanager
def hold_lock(path: str, out: str, *, owner: Callable[[], str]) -> Iterator[None]:
    """Hold the lock of an output, or go on without if the file system has no locks.

    The kernel (of the NFS server, after the lease) frees the lock with its owner: a lock that outlived it would stop a
    run that a scheduler starts again. If two gathers pass, as they may over NFS, the later one takes over the stage of
    the earlier by a rename, and the commit decides: work is lost, but no output. `owner` describes the lock's owner.

    OutputExistsError if another gather holds it; UsageError if its path is not a file, or the folder is not writable.
    """
    fd = None
    try:
        fd = system.lock_file(path)
        if fd is None:
            what = f"another gather to it is running ({owner()})"
            next_step = f"wait for it, or choose a different {option('out')}"
            raise _refuse(OutputExistsError, out, what, next_step=next_step)
    except OSError as error:
        if error.errno in _NO_FILE:
            what = f"{path} is not a file, so it cannot be the lock of {out} ({describe(path)})"
            raise UsageError(what, file=path, next_step=f"move it elsewhere, then {AGAIN}") from error
        if error.errno == errno.ENOENT:  # in a folder that is there, such as one of /proc
            folder, what = os.path.dirname(path), f"no file can be created there: {error.strerror}"
            raise _refuse(UsageError, folder, what, got=describe(folder), want="a folder of a disk") from error
        another_users = error.errno in {errno.EACCES, errno.EPERM} and os.path.lexists(path)
        if error.errno not in _NO_LOCKS_HERE and not another_users:
            raise explain(error, path) from error
    try:
        yield
    finally:
        if fd is not None:
            # Unlinked while held: a process that opened this file before finds it without a name and makes a new one.
            with suppress(OSError):
                os.unlink(path)
            with suppress(OSError):  # the kernel closes it in any case (close(2))
                os.close(fd)
