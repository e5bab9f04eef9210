"""The commit's back end on a disk: a hidden folder beside the output, in which files are synced one by one.

Each file is written, synced, renamed to its name, its folder synced, and (shards) a line synced to the journal. The
commit removes the journal, syncs, renames the folder to the output, syncs, and reads the manifest back. A gather takes
over what a dead one left by renaming it to an id of its own: of two that try, one finds it gone.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import xxhash
from msgspec import Struct, convert, to_builtins

from xrank import system
from xrank.errors import AGAIN, CorruptError, OutputExistsError, UnsafeError, XrankError
from xrank.storage import disk
from xrank.storage.commit import DescriptorTarget, JournalLine, Stage, make_exists_error, owner_state, seal, unseal
from xrank.storage.disk import describe, explain, explain_errors, sync_folder
from xrank.storage.output_place import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    OutputPlace,
    check_folder_output,
    check_inner_name,
    check_replaceable,
    find_other_files,
    hold_lock,
    make_parents,
    make_taken_error,
)
from xrank.storage.places import digest_plain_file, hash_file
from xrank.words import list_text

_MODE = 0o666
"""Permissions by the umask, not 0600: users who may read the folder may read the model."""
_MAX_JOURNAL_NBYTES = 256 * 2**20


class Journal(Struct, frozen=True):
    """The journal of an earlier run."""

    plan: str
    """Digest of its plan."""
    host: str
    pid: int
    lines: tuple[JournalLine, ...]
    """Lines before the first damaged one."""


def encode_journal(plan: str, host: str, pid: int, lines: Iterable[JournalLine] = ()) -> bytes:
    """Return the bytes of a journal."""
    head = seal({"version": 1, "plan": plan, "host": host, "pid": pid})
    return head + b"".join(seal(to_builtins(line)) for line in lines)


def parse_journal(content: bytes) -> Journal | None:
    """Read a journal up to its first damaged line; None if the first is damaged or of another version.

    Lines after a damaged one are not trusted either: their run did not know of the damage.
    """
    head, *rest = (unseal(text) for text in [*content.split(b"\n")[:-1], b""])  # what follows the last newline is torn
    match head:
        case {"version": 1, "plan": str(plan), "host": str(host), "pid": int(pid)}:
            pass
        case _:
            return None
    finished: dict[str, JournalLine] = {}
    for record in rest:
        try:
            line = convert(record, JournalLine)
        except ValueError:
            break
        try:
            check_inner_name(line.file)  # no file outside the stage counts as finished
        except UnsafeError:
            break
        finished[line.file] = line  # a file that was made again has two lines: the last counts
    return Journal(plan, host, pid, tuple(finished.values()))


def read_journal(stage: str) -> Journal | None:
    """Read the journal in a stage; None without a valid one. Does not follow links or wait for FIFOs."""
    try:
        fd = os.open(os.path.join(stage, JOURNAL_NAME), system.READ | system.NO_LINK)
    except OSError:
        return None
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_JOURNAL_NBYTES:
            return None
        try:
            return parse_journal(file.read())
        except OSError:
            return None


def write_journal(stage: str, plan_digest: str, finished: Sequence[JournalLine] = ()) -> None:
    """Replace the journal of a stage, atomically."""
    path = os.path.join(stage, JOURNAL_NAME)
    fresh = f"{path}.part"
    with explain_errors(path):
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        with open(os.open(fresh, system.NEW, _MODE), "wb", buffering=0) as file:
            system.write_all(file.fileno(), encode_journal(plan_digest, system.host_name(), os.getpid(), finished))
            os.fsync(file.fileno())
        disk.move(fresh, path)
    sync_folder(stage)


class FolderStage(Stage):
    """A folder that becomes the output; see `Stage`."""

    def __init__(
        self,
        place: OutputPlace,
        path: str,
        plan_digest: str,
        finished: tuple[JournalLine, ...],
        notes: tuple[str, ...],
        *,
        overwrite: bool,
        replaces_states: bool,
    ) -> None:
        super().__init__(path, notes)
        self._place, self._plan_digest = place, plan_digest
        self._overwrite, self._replaces_states = overwrite, replaces_states
        self.finished = {line.file: line for line in finished}
        self._identity = disk.identity(path)
        self._journal_lock = threading.Lock()
        self._is_committed = False
        self._replaced: str | None = None

    def open_files(self, target: DescriptorTarget) -> _PartFiles:
        """Return the output files of a plan, to write to."""
        return _PartFiles(self, target)

    def part_path(self, name: str) -> str:
        """Return the path of a file until it is finished."""
        return self._path_of(name) + ".part"

    def create_part(self, name: str, nbytes: int) -> int:
        """Make the file that will be finished under that name, at its full size, or raise; return its descriptor."""
        part = self.part_path(name)
        with self._explain_errors(part, nbytes):
            fd = self._open_new(name)
            with _discarded(fd, part):
                disk.reserve_room(fd, part, nbytes)
        return fd

    def finish_part(self, name: str, fd: int, nbytes: int, digest: str) -> None:
        """Sync a file of that size, give it its name and record it in the journal. Closes ``fd``, also on an error."""
        final = self._path_of(name)
        with self._explain_errors(final, nbytes):
            self._seal(fd, final, nbytes)
            # After the rename: a line promises a whole file under its name. A file without a line is only made again.
            line = JournalLine(name, nbytes, digest)
            with self._journal_lock:
                journal = os.open(os.path.join(self.path, JOURNAL_NAME), system.APPEND)
                with open(journal, "ab", buffering=0):
                    system.write_all(journal, seal(to_builtins(line)))
                    os.fsync(journal)
                self.finished[name] = line

    def discard(self, name: str) -> None:
        """Remove a finished file that turned out to be wrong."""
        path = self._path_of(name)
        with self._explain_errors(path), self._journal_lock:
            # The journal keeps the line: a resume ignores lines without a file and verifies the digests of the others.
            self.finished.pop(name, None)
            with suppress(FileNotFoundError):
                os.unlink(path)

    def write_file(self, name: str, content: bytes | Iterable[bytes]) -> JournalLine:
        """Write a file atomically; return its entry for the manifest."""

        def fill(fd: int) -> tuple[int, str]:
            digest, nbytes = xxhash.xxh3_128(), 0
            for block in [content] if isinstance(content, bytes) else content:
                system.write_all(fd, block)
                digest.update(block)
                nbytes += len(block)
            return nbytes, digest.hexdigest()

        return self._write_small(name, fill, len(content) if isinstance(content, bytes) else None)

    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Copy a regular file atomically; see `Stage`."""

        def fill(fd: int) -> tuple[int, str]:
            digest, nbytes = xxhash.xxh3_128(), 0
            while True:
                with explain_errors(source_path):
                    chunk = os.read(source, 1 << 20)
                if not chunk:
                    return nbytes, digest.hexdigest()
                system.write_all(fd, chunk)
                digest.update(chunk)
                nbytes += len(chunk)

        with disk.open_companion(source_path) as source:
            return self._write_small(name, fill, os.fstat(source).st_size)

    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a file that was written."""
        return hash_file(os.path.join(self.path, *name.split("/")))

    def abandon(self) -> None:
        """Remove half-written files, and the stage itself if no file is finished."""
        if self._is_committed or disk.identity(self.path) != self._identity:
            return
        with suppress(OSError, XrankError):
            if not self.finished:
                clear_folder(self._place, self.path)
                return
            for path in self._list_parts():
                os.unlink(path)

    def _check_whole(self) -> None:
        with self._explain_errors(self.path):
            for path in self._list_parts():
                what = f"{path}: was not finished, so the output is incomplete"
                raise XrankError(what, file=path, next_step=f"{AGAIN}, which resumes from the finished files")
            for line in self.finished.values():
                path = self._path_of(line.file)
                # The size alone: digests were made from the written bytes; reading all again costs as much as writing.
                _check_size(path, "changed after it was finished", os.lstat(path).st_size, line.nbytes)
            self._manifest = digest_plain_file(os.path.join(self.path, MANIFEST_NAME))

    def _appear(self) -> None:
        with self._explain_errors(self.path):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, JOURNAL_NAME))
            # All names inside must be on disk before the rename makes them an output.
            sync_folder(self.path)
        with self._explain_errors(self._place.path):
            self._replaced = self._take_output_name()
        self._is_committed = True
        sync_folder(self._place.parent)
        self._read_back()

    def _read_back(self) -> None:
        # NFS: the answer to a rename may be stale or repeated; only a new open shows the folder that is there.
        path = os.path.join(self._place.path, MANIFEST_NAME)
        with self._explain_errors(path):
            found = digest_plain_file(path)
        if found != self._manifest:
            next_step = f"let no other gather write the same output, then {AGAIN}"
            raise XrankError(f"{path} is not the manifest that this gather wrote", file=path, next_step=next_step)

    def _take_output_name(self) -> str | None:
        """Rename the stage to the output; return the present path of the replaced one."""
        place = self._place
        if not self._overwrite or not os.path.lexists(place.path):
            try:
                disk.move_new(self.path, place.path)
            except FileExistsError as error:
                raise make_taken_error(place.path, "another process created it while this gather ran") from error
            return None
        check_replaceable(place.path, replaces_states=self._replaces_states)
        if disk.exchange(self.path, place.path):
            return self.path
        # Without an exchange the output is absent for an instant; the suffix "-old" lets the next start finish this.
        aside = f"{self.path}-old"
        disk.move_new(place.path, aside)
        try:
            sync_folder(place.parent)
            disk.move_new(self.path, place.path)
        except (OSError, XrankError):
            with suppress(OSError):
                disk.move_new(aside, place.path)
            raise
        return aside

    def _clear_replaced(self) -> None:
        if self._replaced is not None:  # only after the new output was read back: until here the old one exists
            if gone := find_other_files(self._replaced, self._place.path):
                removed = list_text(gone)
                self.notes += (f"the folder that was replaced held {removed}, which xrank had not written: removed",)
            clear_folder(self._place, self._replaced)

    def _explain_failure(self, error: BaseException) -> None:
        path = self._place.path
        if disk.identity(path) == self._identity:
            self._is_committed = True
            if isinstance(error, OSError):
                error = explain(error, path)
            if isinstance(error, XrankError):
                error.about(f"{path} is complete, but then", file=path)
            elif not isinstance(error, Exception):  # a signal, whose handler prints the note
                error.add_note(f"{path} is complete")
            raise error
        # The journal was removed; without it the next run could not resume.
        if disk.identity(self.path) == self._identity:
            with suppress(OSError, XrankError):
                write_journal(self.path, self._plan_digest, tuple(self.finished.values()))

    def _list_parts(self) -> list[str]:
        found = []
        for folder, _, names in os.walk(self.path):
            found += [os.path.join(folder, name) for name in names if name.endswith(".part")]
        return found

    def _path_of(self, name: str) -> str:
        check_inner_name(name)
        return os.path.join(self.path, name)

    def _open_new(self, name: str) -> int:
        """Make the part of a file, and the folders above it."""
        folder = self.path  # not made again: if it is gone, another gather took it over
        for piece in name.split("/")[:-1]:
            parent, folder = folder, os.path.join(folder, piece)
            with suppress(FileExistsError):
                os.mkdir(folder)
                sync_folder(parent)
        part = self.part_path(name)
        with suppress(FileNotFoundError):
            os.unlink(part)
        return os.open(part, system.NEW, _MODE)

    def _write_small(self, name: str, fill: Callable[[int], tuple[int, str]], nbytes: int | None) -> JournalLine:
        final = self._path_of(name)
        with self._explain_errors(final, nbytes):
            fd = self._open_new(name)
            with _discarded(fd, f"{final}.part"):
                written, digest = fill(fd)
            self._seal(fd, final, written)
        return JournalLine(name, written, digest)

    def _seal(self, fd: int, final: str, nbytes: int) -> None:
        part = f"{final}.part"
        try:
            found = os.fstat(fd).st_size
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # NFS reports a used-up quota as late as here
        _check_size(part, "has the wrong size", found, nbytes)
        disk.move(part, final)
        sync_folder(os.path.dirname(final))

    @contextmanager
    def _explain_errors(self, path: str, needed_nbytes: int | None = None) -> Iterator[None]:
        try:
            yield
        except OutputExistsError:
            raise
        except (OSError, XrankError) as error:
            if not self._is_committed and disk.identity(self.path) is None:
                raise make_takeover_error(self._place) from error
            if isinstance(error, XrankError):
                raise
            raise explain(error, path, needed_nbytes=needed_nbytes) from error


@contextmanager
def _discarded(fd: int, path: str) -> Iterator[None]:
    """Close and remove a new file if the body fails."""
    try:
        yield
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(path)
        raise


def _check_size(path: str, what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise CorruptError(
            f"{path}: {what}",
            file=path,
            got=f"{found} bytes",
            want=f"{wanted} bytes",
            next_step=f"make sure that nothing else writes into the folder, then {AGAIN}",
        )


class _PartFiles:
    """Files of a stage on a disk; see `xrank.storage.commit.OutputFiles`."""

    def __init__(self, stage: FolderStage, target: DescriptorTarget) -> None:
        self.target, self._stage = target, stage

    def begin(self, index: int, name: str, nbytes: int, late: Sequence[tuple[int, int]] = ()) -> None:
        fd = self._stage.create_part(name, nbytes)
        self.target.in_memory = disk.is_in_memory(fd)
        self.target.descriptors[index] = fd

    def finish(self, index: int, name: str, nbytes: int, digest: str, tensors: Sequence[bytes]) -> None:
        # The stage closes the descriptor in any case, so remove it from `close`'s reach first.
        self._stage.finish_part(name, self.target.descriptors.pop(index), nbytes, digest)

    def close(self) -> None:
        for fd in self.target.descriptors.values():
            os.close(fd)
        self.target.descriptors.clear()


def open_shared_part(path: str, nbytes: int) -> int | None:
    """Return a descriptor of a file of another process's stage, to which all ranks of a gather write.

    None if it is not visible here, not yet or not any more: rank 0 makes and commits it. That process may fail, and its
    successor take over the stage by a rename. Then no file is found here, and writes to open files do not change the
    successor's, which makes new ones. CorruptError if it has another size.
    """
    with explain_errors(path):
        try:
            fd = os.open(path, system.UPDATE)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise
    status = os.fstat(fd)
    # Rank 0 sizes the files before it sends the stage's name, so a file of another size is not rank 0's.
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        os.close(fd)
        what = f"{path} is not the file that rank 0 made"
        got = f"{status.st_size:,} bytes ({describe(path)})"
        next_step = f"make sure that nothing else writes next to the output, then {AGAIN}"
        raise CorruptError(what, file=path, got=got, want=f"a file of {nbytes:,} bytes", next_step=next_step)
    return fd


@contextmanager
def open_folder_stage(
    place: OutputPlace, plan_digest: str, *, overwrite: bool, replaces_states: bool, resume: bool
) -> Iterator[FolderStage]:
    """Yield a stage on a disk; see `xrank.storage.staging.open_stage`."""
    check_folder_output(place.path, overwrite=overwrite, replaces_states=replaces_states)
    make_parents(place)
    with hold_lock(place.lock_path, place.path, owner=lambda: describe_owner(place)):
        try:
            roll_forward(place)
            check_folder_output(place.path, overwrite=overwrite, replaces_states=replaces_states)  # now under the lock
            path, finished, notes = _claim(place, plan_digest, resume=resume)
            known = (place, path, plan_digest, finished, notes)
            stage = FolderStage(*known, overwrite=overwrite, replaces_states=replaces_states)
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
        stage.abandon()  # after a commit this does nothing


def roll_forward(place: OutputPlace) -> None:
    """Finish a killed overwrite that had no exchange: restore the new output if it is whole, else the old."""
    for identifier in place.identifiers("-old"):
        stage = place.stage(identifier)
        old = f"{stage}-old"
        staged = os.path.isdir(stage)
        if not os.path.lexists(place.path):
            # The old output is moved aside only after the stage is whole and on disk.
            complete = staged and os.path.isfile(os.path.join(stage, MANIFEST_NAME))
            with explain_errors(place.path), suppress(FileNotFoundError, FileExistsError):
                disk.move_new(stage if complete else old, place.path)
            # Before the old output is removed: otherwise a power loss could leave neither of the two.
            sync_folder(place.parent)
            if complete:
                clear_folder(place, old)
        elif not staged:
            clear_folder(place, old)
        # else: something new took the name between the two renames; both folders stay until it is gone.


def _claim(
    place: OutputPlace, plan_digest: str, *, resume: bool
) -> tuple[str, tuple[JournalLine, ...], tuple[str, ...]]:
    """Take over the stage of an interrupted run of the same plan, or make one; remove this user's other stages.

    Return its path, its finished files, and notes about the folders that were removed.
    """
    path, finished, notes = "", tuple[JournalLine, ...](), []
    pending = set(place.identifiers("-old"))
    for identifier in place.identifiers():
        stage = place.stage(identifier)
        name = os.path.basename(stage)
        # An unfinished replacement whose name something else has taken: `roll_forward` has left it alone.
        if identifier in pending:
            continue
        if not is_own(stage):
            notes.append(f"{name}: not removed: nothing in it shows that xrank made it")
            continue
        journal = read_journal(stage)
        why = ""
        if not resume:
            why = "removed the remains of an earlier run: this run was not allowed to resume"
        elif journal is None:
            why = "removed: its journal is damaged, or from a different version of xrank"
        elif journal.plan != plan_digest:
            why = "removed: its run had a different plan (a different source, or different options)"
        elif path:
            why = "removed: a second stage of the same plan"
        if why or journal is None:
            clear_folder(place, stage)
            notes.append(f"{name}: {why}")
            continue
        mine = place.new_stage()
        with explain_errors(stage):
            try:
                disk.move(stage, mine)
            except FileNotFoundError:
                continue  # another gather took it first
        # Read again: until the rename its owner may have been alive and have added lines.
        path, finished = mine, _keep_finished(mine, read_journal(mine) or journal)
        write_journal(mine, plan_digest, finished)
    if not path:
        path = place.new_stage()
        with explain_errors(path):
            os.mkdir(path)
        write_journal(path, plan_digest)
    return path, finished, tuple(notes)


def _keep_finished(stage: str, journal: Journal) -> tuple[JournalLine, ...]:
    finished = {}
    for line in journal.lines:
        with suppress(OSError):
            status = os.lstat(os.path.join(stage, line.file))
            # Sizes only; the run that resumes verifies the digests.
            if stat.S_ISREG(status.st_mode) and status.st_size == line.nbytes:
                finished[line.file] = line
    with explain_errors(stage):
        # Companions have no line in the journal, and are copied again.
        _empty(stage, {*finished, JOURNAL_NAME})
    return tuple(finished.values())


def _empty(folder: str, kept: Collection[str], above: str = "") -> None:
    """Remove all of a folder but the files of these names; `above` is the folder's own, as in them."""
    import shutil  # most outputs are new

    for entry in list(os.scandir(folder)):
        name = above + entry.name
        if not entry.is_dir(follow_symlinks=False):
            if name not in kept:
                os.unlink(entry.path)
        elif any(one.startswith(f"{name}/") for one in kept):
            _empty(entry.path, kept, f"{name}/")
        else:
            shutil.rmtree(entry.path)


def is_own(stage: str) -> bool:
    """Return whether a folder with a stage's name contains a file that only xrank writes, or nothing at all.

    Every stage has a journal until it is whole, and then a manifest.
    """
    try:
        names = os.listdir(stage)
    except FileNotFoundError:  # its gather has made it the output
        return True
    return not names or not {JOURNAL_NAME, f"{JOURNAL_NAME}.part", MANIFEST_NAME}.isdisjoint(names)


def clear_folder(place: OutputPlace, path: str) -> None:
    """Remove a folder of this user beside the output; its rename comes first, so no half-removed output is left."""
    with explain_errors(path):
        doomed = place.new_stage()
        try:
            disk.move(path, doomed)
        except FileNotFoundError:
            return
        with suppress(FileNotFoundError):  # another start may remove the same folder
            # A journal that goes last shows that the folder is xrank's to remove, should a kill leave a part of it.
            if not os.path.lexists(os.path.join(doomed, JOURNAL_NAME)):
                with suppress(OSError, XrankError):  # such as on a full disk, where removing must go on
                    write_journal(doomed, "")
            _empty(doomed, {JOURNAL_NAME})
            _empty(doomed, ())
            os.rmdir(doomed)


def describe_owner(place: OutputPlace) -> str:
    """Describe the process that writes to the output, from its stage's journal."""
    for identifier in place.identifiers():
        journal = read_journal(place.stage(identifier))
        if journal is not None:
            return f"host {journal.host}, pid {journal.pid}"
    return f"it has only begun; lock {describe(place.lock_path)}"


def make_takeover_error(place: OutputPlace) -> OutputExistsError:
    """Return the error for a gather whose stage another gather has taken over."""
    return make_exists_error(place.path, f"another gather to it took over this one's stage ({describe_owner(place)})")


def inspect_stage(path: str) -> dict[str, object] | None:
    """Return the facts of a stage for a report, or None if the path is not a stage."""
    journal = read_journal(path)
    if journal is None:
        return None
    done = total = sum(line.nbytes for line in journal.lines)
    try:
        unfinished = [entry for entry in os.scandir(path) if entry.name.endswith(".part")]
    except FileNotFoundError:  # its gather runs, and has committed it meanwhile
        return None
    for entry in unfinished:
        with suppress(FileNotFoundError):  # finished meanwhile
            total += entry.stat(follow_symlinks=False).st_size
    return {
        "files": [{"name": line.file, "nbytes": line.nbytes, "digest": line.digest} for line in journal.lines],
        "finished_nbytes": done,
        "begun_nbytes": total,
        "host": journal.host,
        "pid": journal.pid,
        "owner": owner_state(journal.host, journal.pid),
    }


_STAGE = re.compile(r"\.(.+)\.xrank-[0-9a-f]{16}(-old)?")
_ABANDONED_SECONDS = 3600
"""After this long without a change, a stage whose owner can't be asked (another host's) counts as abandoned."""


def folder_time(folder: str) -> float:
    """Return the time, in seconds, by the clock that stamps a folder's files; this host's where no file can be made.

    A file server's clock may differ from this host's by more than an hour, and a file's age is known by its own clock
    alone. Where no file can be made, none can be removed either.
    """
    import tempfile  # only `xrank clean` needs it

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return time.time()


def clean_messages(
    path: str, message_state: Callable[[str], str | None], *, dry_run: bool, now: float
) -> list[dict[str, Any]]:
    """Remove the abandoned messages of live gathers in a folder; return what was found.

    `message_state` returns ``alive``, ``gone`` or ``unknown`` for the owner of a message, None for other names; `now`
    is in seconds, by the clock that stamps the folder's files.
    """
    rows = []
    for entry in os.scandir(path):
        state = message_state(entry.name)
        if state is None:
            continue
        with suppress(FileNotFoundError):  # a rank that lives removes its message once it was read
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != system.user_id():
                continue  # xrank makes files, and this user's processes make this user's
            verdict = _verdict(state, "", now - status.st_mtime)
            rows.append({"path": entry.path, "nbytes": status.st_size, **verdict})
            if verdict["removed"] and not dry_run:
                try:
                    os.unlink(entry.path)
                except PermissionError as error:
                    rows[-1].update(removed=False, why=f"it cannot be removed: {error.strerror}")
    return rows


def clean_places(path: str, *, dry_run: bool, now: float) -> list[dict[str, Any]]:
    """Remove the abandoned stages of outputs in a folder, and of the folder as an output; return what was found."""
    names = {match[1] for entry in os.listdir(path) if (match := _STAGE.fullmatch(entry)) is not None}
    places = [OutputPlace.from_path(os.path.join(path, name)) for name in sorted(names)]
    found = []
    for place in [*places, OutputPlace.from_path(path)]:
        if not place.identifiers() and not place.identifiers("-old"):
            continue
        if dry_run:
            found += _rows(place, now)
            continue
        try:
            with hold_lock(place.lock_path, place.path, owner=partial(describe_owner, place)):
                rows = _rows(place, now)
                roll_forward(place)
                for row in rows:
                    if row["removed"]:
                        clear_folder(place, row["path"])
                found += rows
        except OutputExistsError:
            found += [{**row, "removed": False, "why": "its gather is running"} for row in _rows(place, now)]
    return found


def _rows(place: OutputPlace, now: float) -> list[dict[str, Any]]:
    rows = []
    for identifier in place.identifiers():
        with suppress(FileNotFoundError):  # a gather that is running has made it its output
            rows.append(_row(place.stage(identifier), now))
    return rows


def _row(path: str, now: float) -> dict[str, Any]:
    journal = read_journal(path)
    nbytes, changed = 0, os.lstat(path).st_mtime
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):  # a gather that is running renames what it has finished
                status = os.lstat(os.path.join(folder, name))
                nbytes += status.st_size
                changed = max(changed, status.st_mtime)
    if not is_own(path):
        return {"path": path, "nbytes": nbytes, "removed": False, "why": "nothing in it shows that xrank made it"}
    state = "unknown" if journal is None else owner_state(journal.host, journal.pid)
    pid = str(journal.pid) if journal else ""
    return {"path": path, "nbytes": nbytes, **_verdict(state, pid, now - changed)}


def _verdict(state: str, pid: str, age_seconds: float) -> dict[str, Any]:
    """Return whether something of a process that is alive, gone or unknown is abandoned, and why."""
    is_old = age_seconds > _ABANDONED_SECONDS
    process = f"its process {pid}".rstrip()
    why = {
        "gone": f"{process} is gone",
        "alive": f"{process} is running",
        "unknown": "nothing in it has changed for an hour"
        if is_old
        else "it is recent, and its owner cannot be checked",
    }[state]
    return {"removed": state == "gone" or (state == "unknown" and is_old), "why": why}
