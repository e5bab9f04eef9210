"""A workspace in the memory of one host: a state has no file name, and ends with the process that wrote it.

A state is the same archive as in `xrank.workspace.nfs`, in a memfd (memfd_create(2)): it cannot collide with another,
be guessed, or be left behind by a kill. The store contains its place. A reader opens the writer's own descriptor
(proc(5): /proc/pid/fd) and checks that it is the described file.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from xrank import environment
from xrank.errors import IncompleteError, UsageError, XrankError, require_linux
from xrank.ranks.memory import explain_no_memory
from xrank.ranks.memory_messages import MemoryFile, MemoryMessages, MemoryPlace, open_place
from xrank.ranks.store import LocalStore, Store, find_store, group_place
from xrank.system import after_fork_in_child
from xrank.workspace.base import MessagingWorkspace, check_rank, find_identity
from xrank.workspace.states import make_state_archive, read_run_id, read_state

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap

_NUM_ATTEMPTS = 100
"""Number of lookups of a state that its rank replaces between the lookup and the opening."""

_PROCESS_STORE = LocalStore()
"""Store of a world with this process alone."""

_held: dict[str, MemoryFile] = {}
"""This process's states by nonce. They outlive their workspaces, as a file outlives the object that wrote it."""


class SharedMemoryWorkspace(MessagingWorkspace):
    """Keeps each rank's state in memory, for ranks of one host; a `Workspace` and a `MessageWorkspace`.

    A state lasts until its rank writes again, calls `close`, constructs its workspace for another run, or ends in any
    way. Construction removes this rank's states of earlier runs in the same store, and does not touch other ranks'
    states. A rank on another host, or in another pid namespace, cannot be read: the error names both hosts.

    Args:
        group: the process group whose store records the states' places; by default the world. Rank numbers are always
            the world's. Without a process group, a launcher's store or `store`, the workspace is uninitialized, unless
            this process is the whole world.
        store: records the states' places, instead of a group's store.
        rank: this rank; found as `NFSWorkspace` finds it.
        world_size: number of ranks; likewise.
        run_id: distinguishes the states of this run from those of earlier runs; likewise.

    Raises:
        UsageError: the rank is outside the world.

    Example:
        >>> import torch
        >>> workspace = SharedMemoryWorkspace(rank=0, world_size=1)
        >>> workspace.write_configs_and_weights({"hidden_size": 4}, {"weight": torch.ones(2)})
        >>> workspace.read_configs_and_weights_from_rank(0)[1]["weight"].tolist()
        [1.0, 1.0]
        >>> workspace.close()
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
        require_linux("SharedMemoryWorkspace")
        self._identity = find_identity(rank, world_size, run_id)
        self._messages = MemoryMessages()
        self._store = store or _find_store(group, self._identity.world_size)
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
        """Write this rank's state, completely or not at all; see `Workspace`.

        The old state stays in memory until the new one is complete.
        """
        store = self._place()
        archive = make_state_archive(self._identity, config_json, weights, layouts, step)
        file = MemoryFile()
        try:
            with explain_no_memory(
                f"the state of rank {self.rank}",
                archive.nbytes,
                "free memory on this host, or use NFSWorkspace",
                rank=self.rank,
                besides=" and a little more; the last state stays until the new one is complete",
            ):
                archive.write(file.fd)
            place = file.seal()
            _held[place.nonce] = file
            # Publish the new place before releasing the old memory: a reader always finds one complete state.
            old = store.peek(_name(self.rank))
            store.put(_name(self.rank), place.to_json())
        except BaseException:
            _held.pop(file.nonce, None)
            file.close()
            raise
        _release(old, self.rank)

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return that rank's last state of this run, or ``(None, None)``; see `Workspace`.

        A state whose process has ended, of another run id, or of another world size gives ``(None, None)``.

        Raises:
            UsageError: besides `Workspace`'s cases, that rank is on another host.
        """
        store, rank = self._place(), check_rank(target_rank)
        with _open_state(store, rank) as opened:
            if opened is None:
                return None, None
            place, path = opened
            try:
                state = read_state(path, rank, self.world_size, self.run_id)
            except XrankError as error:
                # The reader's own descriptor means nothing outside this process.
                error.rename(path, place.path)
                error.about(file=place.path)
                raise
        return (None, None) if state is None else state

    patience_seconds = MemoryMessages.patience_seconds
    """How long a message may stay invisible; see `MessageWorkspace`."""

    def close(self) -> None:
        """Release this rank's state and messages; other ranks no longer find them. A second call does nothing."""
        super().close()
        if self._store is not None:
            self._forget(self._store, self._store.peek(_name(self.rank)))

    def _place(self) -> Store:
        if self._store is None:
            what = "the workspace is not initialized: it has no store to record where states lie"
            raise UsageError(what, want="an initialized process group, torchrun, or store=; or use NFSWorkspace")
        return self._store

    def _settle(self, store: Store) -> None:
        description = store.peek(_name(self.rank))
        if description is None:
            return
        if self.run_id is not None:
            # A state that cannot be read is of no use in this run either.
            with contextlib.suppress(XrankError), _open_state(store, self.rank) as opened:
                if opened is not None and read_run_id(opened[1]) == self.run_id:
                    return
        self._forget(store, description)

    def _forget(self, store: Store, description: str | None) -> None:
        if description is not None:
            store.remove(_name(self.rank))
            _release(description, self.rank)


def _name(rank: int) -> str:
    return f"workspace/state/{rank}"


def _find_store(group: Any, world_size: int) -> Store | None:
    if group is None and group_place() is None and world_size == 1:
        return _PROCESS_STORE
    if isinstance(group, int):
        return None  # GroupMember.NON_GROUP_MEMBER, which new_group returns on ranks outside the group
    try:
        return find_store(group, environment.environ())
    except UsageError:
        return None


@contextlib.contextmanager
def _open_state(store: Store, rank: int) -> Iterator[tuple[MemoryPlace, str] | None]:
    """Yield the place of a rank's state, and the path of this process's own descriptor of it."""
    description = store.peek(_name(rank))
    for _ in range(_NUM_ATTEMPTS):
        if description is None:
            yield None
            return
        place = MemoryPlace.from_json(description, rank)
        fd = open_place(place)
        if fd is not None:
            try:
                yield place, f"/proc/self/fd/{fd}"
            finally:
                os.close(fd)
            return
        # The state is gone, or its rank has replaced it since the lookup; then the store has a new place.
        before, description = description, store.peek(_name(rank))
        if description == before:
            place.check_reachable(rank)
            yield None
            return
    what = f"the state of rank {rank} was replaced {_NUM_ATTEMPTS} times while it was opened"
    raise IncompleteError(what, rank=rank, next_step="let the rank finish writing, then read again")


def _release(description: str | None, rank: int) -> None:
    """Close the described file if this process owns it."""
    if description is None:
        return
    # Only nonces in the table are closed, so a place from another process or an old run never closes a descriptor.
    with contextlib.suppress(XrankError):
        file = _held.pop(MemoryPlace.from_json(description, rank).nonce, None)
        if file is not None:
            file.close()


def _release_in_child() -> None:
    # Otherwise a forked process (a data loader) would keep the memory of states that its parent releases.
    for file in _held.values():
        file.close()
    _held.clear()


after_fork_in_child(_release_in_child)
