"""A folder that becomes the output: its files are synced one by one, then all appear by one rename."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

import xxhash

from xrank import system
from xrank.errors import AGAIN, CorruptError, OutputExistsError, XrankError
from xrank.plan.windows import hash_file
from xrank.words import list_text
from xrank.writers import rename
from xrank.writers.abandoned import clear_folder, make_takeover_error, write_journal
from xrank.writers.disk import copy_bytes, explain, open_companion, raise_after_commit, reserve_room, sync_folder
from xrank.writers.journal import JOURNAL_NAME, JournalLine, encode_line
from xrank.writers.output_place import (
    MANIFEST_NAME,
    OutputPlace,
    check_inner_name,
    check_replaceable,
    find_other_files,
    make_exists_error,
)
from xrank.writers.part_files import PartFiles

# Permissions by the umask, not 0600: users who may read the folder may read the model.
_FILE_MODE = 0o666


class Stage:
    """A folder that becomes the output. Several threads may call its methods; ``commit`` comes last."""

    def __init__(
        self,
        place: OutputPlace,
        path: str,
        plan_digest: str,
        *,
        overwrite: bool,
        replaces_states: bool,
        finished: tuple[JournalLine, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path = path
        self.notes = notes
        self._place = place
        self._plan_digest = plan_digest
        self._overwrite = overwrite
        self._replaces_states = replaces_states
        self._finished = {line.file: line for line in finished}
        self._identity = rename.identity(path)
        self._journal_lock = threading.Lock()
        self._committed = False

    @property
    def finished(self) -> Mapping[str, JournalLine]:
        """Finished files by name, of this run and of an interrupted one of the same plan, which need verification."""
        return MappingProxyType(self._finished)

    def recall(self, name: str) -> None:
        """Return None: a file on a disk may have changed, so its digests are made anew."""

    def open_files(self) -> PartFiles:
        """Return the output files of a plan, to write to."""
        return PartFiles(self)

    def final_name(self, name: str) -> str:
        """Return the name: a folder replaces another one whole."""
        return name

    def part_path(self, name: str) -> str:
        """Return the path of a file until it is finished."""
        return self._path_of(name) + ".part"

    def create_part(self, name: str, nbytes: int) -> int:
        """Make the file that will be finished under that name, at its full size; return its descriptor.

        Raises:
            NoSpaceError: there is less room.
        """
        part = self.part_path(name)
        with self._explain_errors(part, nbytes):
            self._make_folders(name)
            fd = self._open_new(part)
            try:
                reserve_room(fd, part, nbytes)
            except BaseException:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(part)
                raise
        return fd

    def finish_part(self, name: str, fd: int, nbytes: int, digest: str) -> None:
        """Sync a written file, give it its name and record it in the journal. Closes ``fd``, also on an error.

        Raises:
            CorruptError: the file does not have `nbytes` bytes.
        """
        final = self._path_of(name)
        with self._explain_errors(final, nbytes):
            self._seal(fd, final, nbytes)
            # After the rename: a line promises a whole file under its name. A file without a line is only made again.
            line = JournalLine(name, nbytes, digest)
            with self._journal_lock:
                journal = os.open(os.path.join(self.path, JOURNAL_NAME), system.APPEND)
                try:
                    system.write_all(journal, encode_line(line))
                    os.fsync(journal)
                finally:
                    os.close(journal)
                self._finished[name] = line

    def discard(self, name: str) -> None:
        """Remove a finished file that turned out to be wrong."""
        path = self._path_of(name)
        with self._explain_errors(path), self._journal_lock:
            # The journal keeps the line: a resume ignores lines without a file and verifies the digests of the others.
            self._finished.pop(name, None)
            with suppress(FileNotFoundError):
                os.unlink(path)

    def write_file(self, name: str, content: bytes) -> JournalLine:
        """Write a small file atomically; return its entry for the manifest."""

        def fill(fd: int) -> tuple[int, str]:
            system.write_all(fd, content)
            return len(content), xxhash.xxh3_128_hexdigest(content)

        return self._write_small(name, fill, len(content))

    def hash_file(self, name: str) -> bytes:
        """Return the SHA-256 of a file that was written."""
        return hash_file(os.path.join(self.path, *name.split("/")))

    def copy_file(self, name: str, source_path: str) -> JournalLine:
        """Copy a regular file atomically, following links; return its entry for the manifest.

        Raises:
            UnsafeError: the source is a FIFO, a device or a folder.
            ContradictionError: the source changed while it was read.
        """
        with open_companion(source_path) as source:
            return self._write_small(name, lambda fd: copy_bytes(source, source_path, fd), os.fstat(source).st_size)

    def commit(self) -> None:
        """Make the stage the output, at one instant.

        Raises:
            OutputExistsError: the output's name was taken meanwhile and may not be replaced.
            XrankError: the output does not read back as written.
        """
        manifest = self._check_whole()
        try:
            self._publish(manifest)
        except BaseException as error:
            if rename.identity(self._place.path) == self._identity:
                self._committed = True
                raise_after_commit(self._place.path, error)
            # The journal was removed; without it the next run could not resume.
            if rename.identity(self.path) == self._identity:
                with suppress(OSError, XrankError):
                    write_journal(self.path, self._plan_digest, tuple(self._finished.values()))
            raise

    def _publish(self, manifest: bytes) -> None:
        with self._explain_errors(self.path):
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, JOURNAL_NAME))
            # All names inside must be on disk before the rename makes them an output.
            sync_folder(self.path)
        with self._explain_errors(self._place.path):
            replaced = self._take_output_name()
        self._committed = True
        sync_folder(self._place.parent)
        self._read_back(manifest)
        if replaced is not None:
            # Only after the new output was read back: until here the old one exists.
            gone = find_other_files(replaced, self._place.path)
            if gone:
                removed = list_text(gone)
                self.notes += (f"the folder that was replaced held {removed}, which xrank had not written: removed",)
            try:
                clear_folder(self._place, replaced)
            except XrankError as error:
                # The output is complete; the replaced one is hidden, and the next start removes it.
                self.notes += (f"the replaced output could not be removed: {error}",)

    def abandon(self) -> None:
        """Remove half-written files, and the stage itself if no file is finished."""
        if self._committed or rename.identity(self.path) != self._identity:
            return
        with suppress(OSError, XrankError):
            if not self._finished:
                clear_folder(self._place, self.path)
                return
            for folder, _, names in os.walk(self.path):
                for name in names:
                    if name.endswith(".part"):
                        os.unlink(os.path.join(folder, name))

    def _take_output_name(self) -> str | None:
        """Rename the stage to the output; return the present path of the replaced one."""
        place = self._place
        if not self._overwrite or not os.path.lexists(place.path):
            try:
                rename.move_new(self.path, place.path)
            except FileExistsError as error:
                raise make_exists_error(place.path, "something took its name while this gather ran") from error
            return None
        check_replaceable(place.path, replaces_states=self._replaces_states)
        if rename.exchange(self.path, place.path):
            return self.path
        # Without an exchange the output is absent for an instant; the suffix "-old" lets the next start finish this.
        aside = f"{self.path}-old"
        rename.move_new(place.path, aside)
        try:
            sync_folder(place.parent)
            rename.move_new(self.path, place.path)
        except (OSError, XrankError):
            with suppress(OSError):
                rename.move_new(aside, place.path)
            raise
        return aside

    def _check_whole(self) -> bytes:
        with self._explain_errors(self.path):
            for folder, _, names in os.walk(self.path):
                for name in names:
                    if name.endswith(".part"):
                        path = os.path.join(folder, name)
                        raise XrankError(
                            f"{path}: was not finished, so the output is not whole",
                            file=path,
                            next_step=f"{AGAIN}, which goes on from the files already finished",
                        )
            for line in self._finished.values():
                path = self._path_of(line.file)
                # The size alone: digests were made from the written bytes; reading all again costs as much as writing.
                nbytes = os.lstat(path).st_size
                if nbytes != line.nbytes:
                    raise CorruptError(
                        f"{path}: changed after it was finished",
                        file=path,
                        got=f"{nbytes}",
                        want=f"{line.nbytes}",
                        next_step=f"let nothing else write into the folder, then {AGAIN}",
                    )
            with open(os.path.join(self.path, MANIFEST_NAME), "rb") as file:
                return file.read()

    def _read_back(self, manifest: bytes) -> None:
        # NFS: the answer to a rename may be stale or repeated; only a new open shows the folder that is there.
        path = os.path.join(self._place.path, MANIFEST_NAME)
        with self._explain_errors(path), open(path, "rb") as file:
            found = file.read()
        if found != manifest:
            raise XrankError(
                f"{path}: is not the manifest this gather wrote",
                file=path,
                next_step=f"another gather took the same output; {AGAIN}",
            )

    def _path_of(self, name: str) -> str:
        check_inner_name(name)
        return os.path.join(self.path, name)

    def _open_new(self, path: str) -> int:
        with suppress(FileNotFoundError):
            os.unlink(path)
        return os.open(path, system.NEW, _FILE_MODE)

    def _write_small(self, name: str, fill: Callable[[int], tuple[int, str]], nbytes: int) -> JournalLine:
        final = self._path_of(name)
        part = self.part_path(name)
        with self._explain_errors(final, nbytes):
            self._make_folders(name)
            fd = self._open_new(part)
            try:
                written, digest = fill(fd)
            except BaseException:
                os.close(fd)
                with suppress(OSError):
                    os.unlink(part)
                raise
            self._seal(fd, final, written)
        return JournalLine(name, written, digest)

    def _make_folders(self, name: str) -> None:
        folder = self.path  # not made again: if it is gone, another gather took it over
        for piece in name.split("/")[:-1]:
            parent, folder = folder, os.path.join(folder, piece)
            with suppress(FileExistsError):
                os.mkdir(folder)
                sync_folder(parent)

    def _seal(self, fd: int, final: str, nbytes: int) -> None:
        part = f"{final}.part"
        try:
            found = os.fstat(fd).st_size
            os.fsync(fd)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # NFS reports a used-up quota as late as here
        if found != nbytes:
            raise CorruptError(
                f"{part}: has the wrong size",
                file=part,
                got=f"{found} bytes",
                want=f"{nbytes} bytes",
                next_step=f"let nothing else write into the folder, then {AGAIN}",
            )
        rename.move(part, final)
        sync_folder(os.path.dirname(final))

    @contextmanager
    def _explain_errors(self, path: str, needed_nbytes: int | None = None) -> Iterator[None]:
        try:
            yield
        except OutputExistsError:
            raise
        except (OSError, XrankError) as error:
            if not self._committed and rename.identity(self.path) is None:
                raise make_takeover_error(self._place) from error
            if isinstance(error, XrankError):
                raise
            raise explain(error, path, needed_nbytes=needed_nbytes) from error
