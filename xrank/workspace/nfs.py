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
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, cast

from xrank import environment
from xrank.errors import NoSpaceError, UsageError
from xrank.formats.rank_state import CONFIG, RECORD, WEIGHT, RankRecord, state_file_name
from xrank.workspace.state_content import plain_config, state_content
from xrank.workspace.state_file import read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["NFSWorkspace"]

_ALIGNMENT = 4096
"""Of each record in the file: what O_DIRECT, reflinks and page-wise readers want."""


class NFSWorkspace:
    """Keeps each rank's state in ``<workspace_path>/rank_<r>_state.pth``; a `Workspace`.

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
        launch = environment.read_launch(environment.environ())
        found_rank, found_world_size = _group_place() or (launch and (launch.rank, launch.world_size)) or (0, 1)
        self._rank = found_rank if rank is None else rank
        self._world_size = found_world_size if world_size is None else world_size
        if not 0 <= self._rank < self._world_size:
            raise UsageError(
                f"rank {self._rank} is not in a world of {self._world_size}",
                rank=self._rank,
                got=f"rank {self._rank} of {self._world_size}",
                next_step="give both rank and world_size, or neither",
            )
        self._attempt = None if launch is None else launch.attempt
        self._run_id = run_id or environment.read_run_id(environment.environ()) or _group_run_id()
        if self._path is not None:
            self._settle(self._path)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a directory."""
        return self._path is not None

    @property
    def path(self) -> str | None:
        """The directory."""
        return self._path

    @property
    def rank(self) -> int:
        """This rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world_size

    @property
    def run_id(self) -> str | None:
        """What tells this run from others, where anything does."""
        return self._run_id

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
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise UsageError(f"step is {step!r}", got=repr(step), want="a number of 0 or more, or None")
        config = plain_config(config_json)
        content = state_content(weights, layouts, self._rank)
        record = RankRecord(
            run_id=self._run_id,
            attempt=self._attempt,
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            host=socket.gethostname(),
            meshes=content.meshes,
            tensors=content.tensors,
        )
        state = {CONFIG: config, WEIGHT: content.weights, RECORD: record.to_json()}
        self._replace(path, state, content.nbytes)

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run, or ``(None, None)``; see `Workspace`.

        A state of another run id, or of a world of another size, is an earlier run's: ``(None, None)``. ModelOpt's
        states say no run, and are read where this run has no id either.
        """
        path = self._place()
        if isinstance(target_rank, bool) or not isinstance(target_rank, int):
            raise UsageError(f"target_rank is {target_rank!r}", got=repr(target_rank), want="a rank")
        if not 0 <= target_rank < self._world_size:
            raise UsageError(
                f"there is no rank {target_rank} in a world of {self._world_size}",
                rank=target_rank,
                got=str(target_rank),
                want=f"a rank from 0 to {self._world_size - 1}",
            )
        file = os.path.join(path, state_file_name(target_rank))
        state = read_state(file, target_rank, self._world_size, self._run_id)
        return (None, None) if state is None else state

    def _place(self) -> str:
        if self._path is None:
            raise UsageError(
                "the workspace is not initialised: it has no directory",
                got="workspace_path=None",
                want="a directory that all ranks mount",
                next_step="construct NFSWorkspace(workspace_path)",
            )
        return self._path

    def _settle(self, path: str) -> None:
        # Every rank makes it: nobody could wait for the one that would, and on a network file system the others may
        # be told for half a minute that it is absent.
        try:
            os.makedirs(path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{path} is no directory", file=path, got=str(error), want="a directory") from None
        state = os.path.join(path, state_file_name(self._rank))
        if self._run_id is None or read_run_id(state) != self._run_id:
            _remove(state)
        # A listing may be old on a network file system; what it misses, a later start removes.
        unfinished = re.compile(rf"\.rank_{self._rank}\..*\.part", re.DOTALL)
        for name in os.listdir(path):
            if unfinished.fullmatch(name):
                _remove(os.path.join(path, name))

    def _replace(self, path: str, state: dict[str, Any], nbytes: int) -> None:
        """Write the state beside its place, then put it there in one step."""
        run = re.sub(r"[^A-Za-z0-9_-]", "-", self._run_id or "norun")[:40]
        part = os.path.join(path, f".rank_{self._rank}.{run}.{secrets.token_hex(8)}.part")
        file = os.path.join(path, state_file_name(self._rank))
        try:
            with _no_space_named(path, file, self._rank, nbytes):
                written = _write_archive(part, state)
                _rename(part, file, written)
                _sync_directory(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(part)
            raise


def _group_place() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed, or None where it is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _group_run_id() -> str | None:
    """Return the id that the ranks of an initialised torch.distributed agree on, or None where there is none.

    Whoever comes first to the store names the run: no collective, and nobody waits for anybody.
    """
    if _group_place() is None:
        return None
    from torch import distributed

    try:
        # torch's stubs do not know get_group_store (torch/csrc/distributed/c10d/init.cpp).
        store: Any = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        return str(store.compare_set("xrank/run_id", "", secrets.token_hex(8)).decode())
    except (RuntimeError, NotImplementedError):
        return None  # a store that cannot compare, as a simulated group's


def _write_archive(part: str, state: dict[str, Any]) -> os.stat_result:
    """Write the state as a torch archive to a new file, synced, and return what the file then was."""
    import torch
    from torch.utils import serialization

    config: Any = serialization.config  # a module that makes itself an object, which no stub says
    # O_NOFOLLOW besides O_EXCL: some network file systems of old resolved links first.
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        sink = _Sink(fd)
        try:
            # The user's own settings must not take the checksums away. The patch holds for this thread only
            # (torch/utils/_config_module.py: patch).
            with config.patch({"save.storage_alignment": _ALIGNMENT, "save.compute_crc32": True}):
                torch.save(state, cast(IO[bytes], sink))
        except BaseException:
            # torch's writer ends the archive while it unwinds, and buries the cause under its own RuntimeError.
            if sink.error is not None:
                raise sink.error from None
            raise
        os.fsync(fd)
        return os.fstat(fd)
    finally:
        # A close may be the first to hear that the server had no space (nfs(5)); it raises then.
        os.close(fd)


class _Sink:
    """A file as torch.save wants it; keeps the first error, and takes nothing after it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.error: OSError | None = None

    def write(self, data: memoryview) -> int:
        if self.error is not None:
            raise self.error
        done = 0
        try:
            while done < len(data):
                done += os.write(self._fd, data[done:])
        except OSError as error:
            self.error = error
            raise
        return done

    def flush(self) -> None:
        """Do nothing: nothing is held back."""


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


@contextlib.contextmanager
def _no_space_named(path: str, file: str, rank: int, nbytes: int) -> Iterator[None]:
    """Turn "no space" into the error that says how much is needed and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        status = os.statvfs(path)
        free = status.f_bavail * status.f_frsize
        raise NoSpaceError(
            f"{file}: no space for the state of rank {rank}",
            rank=rank,
            file=file,
            got=f"{free} bytes free" + (", and a quota" if error.errno == errno.EDQUOT else ""),
            want=f"{nbytes} bytes and a little more; the last state stays until the new one is complete",
            next_step="free space, or use another workspace",
            needed_nbytes=nbytes,
            free_nbytes=free,
        ) from error
