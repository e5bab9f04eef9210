"""The workspace that is memory of one host: a state has no name, and ends with the process that wrote it.

A state is the very archive that `xrank.workspace.nfs` writes, in a memfd (memfd_create(2)): nothing to guess, to
collide with, or to be left behind by a kill. Where it lies is told through the store; a reader opens the writer's own
descriptor (proc(5): /proc/pid/fd) and believes nothing that it has not looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xrank import environment
from xrank.errors import IncompleteError, NoSpaceError, UsageError, XrankError
from xrank.ranks.store import LocalStore, Store, find_store
from xrank.workspace.identity import IdentifiedWorkspace, find_identity, group_place
from xrank.workspace.memory_file import MemoryFile, MemoryPlace, open_place
from xrank.workspace.memory_messages import MemoryMessages
from xrank.workspace.state_archive import make_state_archive
from xrank.workspace.state_file import read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

__all__ = ["SharedMemoryWorkspace"]

_NUM_ATTEMPTS = 100
"""How often a state that was replaced between the telling and the opening is looked up again."""

_PROCESS_STORE = LocalStore()
"""Of a world that is this process alone."""

_held: dict[str, MemoryFile] = {}
"""The states of this process, by nonce: as a file outlives the object that wrote it, they outlive their workspaces."""


class SharedMemoryWorkspace(IdentifiedWorkspace):
    """Keeps each rank's state in memory, for ranks of one host; a `Workspace` and a `MessageWorkspace`.

    A rank's state lasts until that rank writes again, calls `close`, constructs its workspace for another run, or
    ends, however it ends. Construction removes what this rank left in the same store in earlier runs, and no other
    rank's. Ranks on other hosts, and in containers of other process numbers, cannot be read: that is an error which
    names both hosts.

    Args:
        group: the process group whose store tells where states lie; the world where it is None. Ranks are the
            world's either way. Where there is neither a process group, nor a launcher's store, nor `store`, the
            workspace is uninitialised, unless the world is this process alone.
        store: tells where states lie, instead of a group's.
        rank: this rank; found as `NFSWorkspace` finds it.
        world_size: number of ranks; likewise.
        run_id: tells this run's states from those of earlier runs; likewise.

    Raises:
        UsageError: the rank is outside the world.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        run_id: str | None = None,
    ) -> None:
        self._identity = find_identity(rank, world_size, run_id)
        self._messages = MemoryMessages()
        self._store = store or _store_of(group, self._identity.world_size)
        if self._store is not None:
            self._settle(self._store)

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a store."""
        return self._store is not None

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Leave this rank's state, complete or not at all; see `Workspace`.

        The old state and the new one are in memory together until the new one is complete.
        """
        store = self._place()
        archive = make_state_archive(self._identity, config_json, weights, layouts, step)
        file = MemoryFile()
        try:
            with _no_space_named(self.rank, archive.nbytes):
                archive.write(file.fd)
            place = file.seal()
            _held[place.nonce] = file
            old = store.peek(_name(self.rank))
            store.put(_name(self.rank), place.to_json())
        except BaseException:
            _held.pop(file.nonce, None)
            file.close()
            raise
        _let_go(old, self.rank)

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run, or ``(None, None)``; see `Workspace`.

        A state whose process has ended, of another run id, or of a world of another size: ``(None, None)``.

        Raises:
            UsageError: besides `Workspace`'s, that rank is on another host.
        """
        store = self._place()
        self._identity.check_target(target_rank)
        with _opened(store, target_rank) as opened:
            if opened is None:
                return None, None
            place, path = opened
            try:
                state = read_state(path, target_rank, self.world_size, self.run_id)
            except XrankError as error:
                # The reader's own descriptor means nothing to whoever reads the message.
                error.message = error.message.replace(path, place.path)
                error.file = place.path
                raise
        return (None, None) if state is None else state

    @property
    def patience_seconds(self) -> float:
        """How long a message may stay invisible; see `MessageWorkspace`."""
        return MemoryMessages.patience_seconds

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Leave a message in an arena of this rank's; see `MessageWorkspace`."""
        return self._messages.publish(header, tensors)

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message, where that is quicker as it lies in the sender's arena; see `MessageWorkspace`.

        Raises:
            UsageError: besides `MessageWorkspace`'s, the sender is on another host.
        """
        return self._messages.fetch(rank, receipt)

    def retire(self, receipt: str) -> None:
        """Let go of a message; see `MessageWorkspace`."""
        self._messages.retire(receipt)

    def close(self) -> None:
        """Let go of this rank's state and messages; nobody finds them any more. Calling it again does nothing."""
        self._messages.close()
        if self._store is not None:
            self._forget(self._store, self._store.peek(_name(self.rank)))

    def _place(self) -> Store:
        if self._store is None:
            raise UsageError(
                "the workspace is not initialised: the ranks have no store to tell each other where states lie",
                got="torch.distributed is not initialised",
                want="an initialised process group, torchrun, or store=",
                next_step="call torch.distributed.init_process_group first, or use NFSWorkspace",
            )
        return self._store

    def _settle(self, store: Store) -> None:
        told = store.peek(_name(self.rank))
        if told is None:
            return
        if self.run_id is not None:
            with contextlib.suppress(XrankError), _opened(store, self.rank) as opened:
                if opened is not None and read_run_id(opened[1]) == self.run_id:
                    return
        self._forget(store, told)

    def _forget(self, store: Store, told: str | None) -> None:
        if told is not None:
            store.remove(_name(self.rank))
            _let_go(told, self.rank)


def _name(rank: int) -> str:
    return f"workspace/state/{rank}"


def _store_of(group: Any, world_size: int) -> Store | None:
    if group is None and group_place() is None and world_size == 1:
        return _PROCESS_STORE
    if isinstance(group, int):
        return None  # GroupMember.NON_GROUP_MEMBER: new_group's answer to a rank that is not in the group
    try:
        return find_store(group, environment.environ())
    except UsageError:
        return None


@contextlib.contextmanager
def _opened(store: Store, rank: int) -> Iterator[tuple[MemoryPlace, str] | None]:
    """Lend a rank's state: where it was told to be, and the path of a descriptor that no one can take away."""
    told = store.peek(_name(rank))
    for _ in range(_NUM_ATTEMPTS):
        if told is None:
            yield None
            return
        place = MemoryPlace.from_json(told, rank)
        fd = open_place(place)
        if fd is not None:
            try:
                yield place, f"/proc/self/fd/{fd}"
            finally:
                os.close(fd)
            return
        # Gone, or its rank wrote anew after it was told: then the store has another by now.
        before, told = told, store.peek(_name(rank))
        if told == before:
            place.check_reachable(rank)
            yield None
            return
    raise IncompleteError(
        f"the state of rank {rank} was replaced {_NUM_ATTEMPTS} times while it was opened",
        rank=rank,
        next_step="let the rank finish writing, then read again",
    )


def _let_go(told: str | None, rank: int) -> None:
    """Close what was told, where it is this process'."""
    if told is None:
        return
    # What another process, or nobody, told is not in the table: nothing is closed by a number alone.
    with contextlib.suppress(XrankError):
        file = _held.pop(MemoryPlace.from_json(told, rank).nonce, None)
        if file is not None:
            file.close()


def _let_go_in_child() -> None:
    # A forked process (a data loader's) would keep every state's memory that its parent lets go of.
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


@contextlib.contextmanager
def _no_space_named(rank: int, nbytes: int) -> Iterator[None]:
    """Turn "no memory" into the error that says how much is needed and how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        raise NoSpaceError(
            f"there is no memory for the state of rank {rank}",
            rank=rank,
            got=f"{free} bytes free",
            want=f"{nbytes} bytes and a little more; the last state stays until the new one is complete",
            next_step="free memory on this host, or use NFSWorkspace",
            needed_nbytes=nbytes,
            free_nbytes=free,
        ) from error
