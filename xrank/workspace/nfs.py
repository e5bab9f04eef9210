"""A workspace in a directory that all ranks mount: one file per rank, without locks, listings or communication."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xrank import system
from xrank.errors import UsageError, check_no_url
from xrank.ranks.directory_messages import DirectoryMessages
from xrank.ranks.memory import explain_no_space
from xrank.storage.places import state_file_name
from xrank.storage.shared_directory import check_state_owner, list_names, make_directory
from xrank.workspace.base import MessagingWorkspace, check_rank, find_identity, make_place_error
from xrank.workspace.states import StateArchive, make_state_archive, read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


class NFSWorkspace(MessagingWorkspace):
    """Keeps each rank's state in ``<workspace_path>/rank_<r>_state.pth``; a `Workspace` and a `MessageWorkspace`.

    Construction creates the directory. It removes this rank's files of earlier runs: a state with another run id or
    none, and unfinished files. It does not touch other ranks' files. To read a workspace without being one of its ranks
    use `open_checkpoint`, which removes nothing.

    Args:
        workspace_path: the shared directory; None leaves the workspace uninitialized.
        rank: this rank; by default torch.distributed's if it is initialized, else the launcher's, else 0.
        world_size: number of ranks, found in the same way.
        run_id: distinguishes the states of this run from those of earlier runs. By default ``XRANK_RUN_ID``, else the
            launcher's id, else one kept in the store of an initialized torch.distributed. Without an id, only the world
            size, and each rank's own construction, distinguish runs. An empty text means no id: then states of
            ModelOpt's class, which record none, are also read in a launcher's job.

    Raises:
        UsageError: the rank is outside the world, or the path is not a directory.

    Example:
        >>> import tempfile, torch
        >>> workspace = NFSWorkspace(tempfile.mkdtemp(), rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({"hidden_size": 4}, {"weight": torch.ones(2)})
        >>> config, weights = workspace.read_configs_and_weights_from_rank(0)
        >>> config, weights["weight"].tolist()
        ({'hidden_size': 4}, [1.0, 1.0])
    """

    def __init__(
        self,
        workspace_path: str | os.PathLike[str] | None = None,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
    ) -> None:
        if workspace_path is not None:
            _check_directory(workspace_path)
        self._path = None if workspace_path is None else os.path.abspath(os.fspath(workspace_path))
        self._identity = find_identity(rank, world_size, run_id)
        self._messages = None
        if self._path is not None:
            self._settle(self._path)
            self._messages = DirectoryMessages(self._path, self.rank)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._path is not None

    @property
    def path(self) -> Path | None:
        """The directory; None if the workspace is uninitialized."""
        return None if self._path is None else Path(self._path)

    @property
    def state_path(self) -> Path:
        """The file of this rank's state, whether or not it was written."""
        return Path(self._place(), state_file_name(self.rank))

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Write this rank's state, completely or not at all; see `Workspace`.

        Contiguous CPU tensors are written in place; strided, expanded and device tensors are copied to the CPU first.
        A DTensor whose mesh does not contain this rank is left out.
        """
        path = self._place()
        archive = make_state_archive(self._identity, config_json, weights, layouts, step)
        run = re.sub(r"[^A-Za-z0-9_-]", "-", self.run_id or "norun")[:40]
        part = os.path.join(path, f".rank_{self.rank}.{run}.{os.urandom(8).hex()}.part")
        file = os.path.join(path, state_file_name(self.rank))
        try:
            with explain_no_space(
                path,
                f"the state of rank {self.rank}",
                archive.nbytes,
                file=file,
                rank=self.rank,
                besides=" and a little more; the last state stays until the new one is complete",
            ):
                # Content before name before folder entry: a crash at any point leaves the old state or the new one.
                written = _write_new(part, archive)
                _rename(part, file, written)
                system.sync_folder(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(part)
            raise

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return that rank's last state of this run, or ``(None, None)``; see `Workspace`.

        A state with another run id or world size belongs to an earlier run: the result is ``(None, None)``.

        Raises:
            ContradictionError: as `Workspace`; also if ModelOpt's class wrote the state, which records no run, and this
                run has an id. Pass ``run_id=""`` at construction to read it.
        """
        path, rank = self._place(), check_rank(target_rank)
        file = os.path.join(path, state_file_name(rank))
        check_state_owner(file, rank)
        state = read_state(file, rank, self.world_size, self.run_id)
        return (None, None) if state is None else state

    patience_seconds = DirectoryMessages.patience_seconds
    """How long a message may stay invisible; see `MessageWorkspace`."""

    def _place(self) -> str:
        if self._path is None:
            raise make_place_error(self)
        return self._path

    def _settle(self, path: str) -> None:
        # Every rank creates it. A rank cannot wait for another one here, and on a network file system a client may
        # cache for half a minute that the directory is absent.
        make_directory(path)
        state = os.path.join(path, state_file_name(self.rank))
        check_state_owner(state, self.rank, may_be_link=True)
        if self.run_id is None or os.path.islink(state) or read_run_id(state) != self.run_id:
            _remove(state)
        # On a network file system the listing may be old; a later start removes the files that it misses.
        unfinished = re.compile(rf"\.rank_{self.rank}\..*\.part", re.DOTALL)
        for name in list_names(path):
            if unfinished.fullmatch(name):
                with contextlib.suppress(OSError):  # not a file, or another user's; it harms no run
                    _remove(os.path.join(path, name))


def _check_directory(path: str | os.PathLike[str]) -> None:
    try:
        check_no_url(path)
    except UsageError as error:
        if os.fspath(path).startswith(("s3:", "gs:", "az:", "abfs:")):
            error.advise(f"construct xrank.ObjectWorkspace({os.fspath(path)!r}), or give a directory")
        raise


def _write_new(part: str, archive: StateArchive) -> os.stat_result:
    """Write the state to a new file, sync it, and return the file's status."""
    # A link is refused besides: some old network file systems resolved links first.
    fd = os.open(part, system.NEW, 0o666)
    try:
        archive.write(fd)
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        # close may be the first call to report that the server is out of space (nfs(5)); it raises then.
        os.close(fd)


def _rename(part: str, file: str, written: os.stat_result) -> None:
    try:
        os.rename(part, file)
    except FileNotFoundError:
        # When the server's reply gets lost, the client repeats the rename and finds the old name gone. So compare the
        # file that now has the name with the one that was written.
        now = os.stat(file)
        if (now.st_ino, now.st_size, now.st_mtime_ns) != (written.st_ino, written.st_size, written.st_mtime_ns):
            raise


def _remove(file: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(file)
