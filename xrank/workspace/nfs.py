"""The workspace that is a directory which all ranks mount: one file a rank, no locks, no listing, no communication.

A state is written beside its place under a name that is never used twice, synced, and renamed, so a reader opens the
last complete state or none. The rules for network file systems (nfs(5): close-to-open, cached attributes and cached
absence, ESTALE) are met by computing names instead of discovering them, and by reading into memory, never by mmap.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xrank.errors import UsageError
from xrank.formats.rank_state import state_file_name
from xrank.workspace.directory_messages import DirectoryMessages
from xrank.workspace.free_space import no_space_named
from xrank.workspace.identity import IdentifiedWorkspace, find_identity
from xrank.workspace.shared_directory import make_directory, names_in
from xrank.workspace.state_archive import StateArchive, make_state_archive
from xrank.workspace.state_file import read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["NFSWorkspace"]


class NFSWorkspace(IdentifiedWorkspace):
    """Keeps each rank's state in ``<workspace_path>/rank_<r>_state.pth``; a `Workspace` and a `MessageWorkspace`.

    Construction makes the directory and removes what this rank left there in earlier runs: a state of another run id,
    or of none known, and unfinished files. It touches no other rank's. To look at a workspace from outside use
    `open_checkpoint`, which never removes anything.

    Args:
        workspace_path: the shared directory; None leaves the workspace uninitialised.
        rank: this rank; else torch.distributed's where it is initialised already, else the launcher's, else 0.
        world_size: number of ranks, found in the same way.
        run_id: tells this run's states from those of earlier runs; else ``XRANK_RUN_ID``, else the launcher's, else
            one that is kept in the store of an initialised torch.distributed. Where all ranks have none, states of
            earlier runs are told apart only by the world's size, and by each rank's own construction.

    Raises:
        UsageError: the rank is outside the world, or the path is no directory.
    """

    def __init__(
        self,
        workspace_path: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self._path = None if workspace_path is None else os.path.abspath(os.fspath(workspace_path))
        self._identity = find_identity(rank, world_size, run_id)
        self._messages: DirectoryMessages | None = None
        if self._path is not None:
            self._settle(self._path)
            self._messages = DirectoryMessages(self._path, self.rank)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._path is not None

    @property
    def path(self) -> str | None:
        """The directory."""
        return self._path

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Leave this rank's state, complete or not at all; see `Workspace`.

        Tensors whose bytes lie in a row on the CPU are written from where they are; strided, expanded and device
        tensors are copied to the CPU first. A DTensor whose mesh this rank is not in is left out.
        """
        path = self._place()
        self._replace(path, make_state_archive(self._identity, config_json, weights, layouts, step))

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run, or ``(None, None)``; see `Workspace`.

        A state of another run id, or of a world of another size, is an earlier run's: ``(None, None)``. ModelOpt's
        states say no run, and are read where this run has no id either.
        """
        path = self._place()
        self._identity.check_target(target_rank)
        file = os.path.join(path, state_file_name(target_rank))
        state = read_state(file, target_rank, self.world_size, self.run_id)
        return (None, None) if state is None else state

    @property
    def patience_seconds(self) -> float:
        """How long a message may stay invisible; see `MessageWorkspace`."""
        return DirectoryMessages.patience_seconds

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Leave a message in a file of a name that is never used again; see `MessageWorkspace`."""
        return self._carrier().publish(header, tensors)

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message, its checksums verified; see `MessageWorkspace`."""
        return self._carrier().fetch(rank, receipt)

    def retire(self, receipt: str) -> None:
        """Remove a message's file; see `MessageWorkspace`."""
        self._carrier().retire(receipt)

    def close(self) -> None:
        """Remove this rank's messages; its state stays. Calling it again does nothing."""
        if self._messages is not None:
            self._messages.close()

    def _place(self) -> str:
        if self._path is None:
            raise _uninitialised()
        return self._path

    def _carrier(self) -> DirectoryMessages:
        if self._messages is None:
            raise _uninitialised()
        return self._messages

    def _settle(self, path: str) -> None:
        # Every rank makes it: nobody could wait for the one that would, and on a network file system the others may
        # be told for half a minute that it is absent.
        make_directory(path)
        state = os.path.join(path, state_file_name(self.rank))
        if self.run_id is None or read_run_id(state) != self.run_id:
            _remove(state)
        # A listing may be old on a network file system; what it misses, a later start removes.
        unfinished = re.compile(rf"\.rank_{self.rank}\..*\.part", re.DOTALL)
        for name in names_in(path):
            if unfinished.fullmatch(name):
                _remove(os.path.join(path, name))

    def _replace(self, path: str, archive: StateArchive) -> None:
        """Write the state beside its place, then put it there in one step."""
        run = re.sub(r"[^A-Za-z0-9_-]", "-", self.run_id or "norun")[:40]
        part = os.path.join(path, f".rank_{self.rank}.{run}.{secrets.token_hex(8)}.part")
        file = os.path.join(path, state_file_name(self.rank))
        try:
            with no_space_named(
                path,
                f"the state of rank {self.rank}",
                archive.nbytes,
                file=file,
                rank=self.rank,
                besides=" and a little more; the last state stays until the new one is complete",
            ):
                written = _write_new(part, archive)
                _rename(part, file, written)
                _sync_directory(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(part)
            raise


def _uninitialised() -> UsageError:
    return UsageError(
        "the workspace is not initialised: it has no directory",
        got="workspace_path=None",
        want="a directory that all ranks mount",
        next_step="construct NFSWorkspace(workspace_path)",
    )


def _write_new(part: str, archive: StateArchive) -> os.stat_result:
    """Write the state to a new file, synced, and return what the file then was."""
    # O_NOFOLLOW besides O_EXCL: some network file systems of old resolved links first.
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        archive.write(fd)
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        # A close may be the first to hear that the server had no space (nfs(5)); it raises then.
        os.close(fd)


def _rename(part: str, file: str, written: os.stat_result) -> None:
    try:
        os.rename(part, file)
    except FileNotFoundError:
        # A reply that was lost on the way makes the client ask again, and hear that the name has gone: what counts is
        # what lies there now.
        now = os.stat(file)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (written.st_ino, written.st_size, written.st_mtime_ns):
            raise


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems sync no directories (CIFS, some FUSE): they say so, and there is nothing else to ask for.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _remove(file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
