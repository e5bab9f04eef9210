"""The protocol of workspaces, and the identity under which a rank writes into one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from operator import index
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from msgspec import Struct

from xrank import environment
from xrank.errors import UsageError
from xrank.ranks.store import group_place, read_launch, read_run_id
from xrank.ranks.wire import MessageWorkspace as MessageWorkspace

if TYPE_CHECKING:
    import torch

    from xrank.layout.layout_map import LayoutMap


@runtime_checkable
class Workspace(Protocol):
    """Stores one durable state per rank. A call never communicates with another rank or waits for one.

    Call order: construct on every rank; write any number of times, the last write counts; then any rank reads any rank.
    Callers ensure that a rank *has* written (by a barrier of their own): a result of None means "not written yet". A
    reader that runs during a write gets the complete old state or the complete new one.

    A rank writes only its own state, from one thread at a time. Any rank may read.

    A crash leaves the rank's last complete state, and perhaps an unfinished file that no reader accepts as a state.
    The next construction for this rank in this place removes that file.
    """

    @property
    def is_initialized(self) -> bool:
        """Whether the workspace has a place. Without one, the two methods raise UsageError, a ValueError."""
        ...

    def write_configs_and_weights(
        self,
        config_json: dict[str, Any],
        weights: Mapping[str, torch.Tensor],
        *,
        layouts: LayoutMap | None = None,
        step: int | None = None,
    ) -> None:
        """Write this rank's state. If this raises, the previous state stays.

        Args:
            config_json: a dict that JSON can represent, with text keys. Tuples come back as lists.
            weights: tensors by name. A DTensor is written as its local tensor, together with its layout.
            layouts: layouts of the plain tensors, by name.
            step: the training step.

        Raises:
            UsageError: the workspace is uninitialized, or a state cannot hold the config or a tensor.
            NoSpaceError: the medium is full.
        """
        ...

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | tuple[None, None]:
        """Return what that rank wrote last in this run; ``(None, None)`` if it wrote nothing, or there is no such rank.

        The tensors are plain, detached, on the CPU, and owned by the caller. Tied names still share one tensor.

        Raises:
            UsageError: the workspace is uninitialized, or `target_rank` is not a whole number.
            CorruptError: the bytes differ from those that the rank wrote.
            ContradictionError: the state belongs to another rank.
            UnsafeError: the state asks to run code.
        """
        ...


class WorkspaceIdentity(Struct, frozen=True):
    """This rank's place in its run."""

    rank: int
    world_size: int
    run_id: str | None
    """Distinguishes this run from others; None if nothing does."""
    attempt: str | None
    """Number of the run's restart, as the launcher counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            next_step = "give both rank and world_size, or neither"
            raise UsageError(
                f"rank {self.rank} is not in a world of {self.world_size}", rank=self.rank, next_step=next_step
            )


class IdentifiedWorkspace:
    """Base of workspaces: shows the identity under which they write."""

    _identity: WorkspaceIdentity

    @property
    def rank(self) -> int:
        """This rank."""
        return self._identity.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._identity.world_size

    @property
    def run_id(self) -> str | None:
        """Distinguishes this run from others; None if nothing does."""
        return self._identity.run_id


class MessagingWorkspace(IdentifiedWorkspace):
    """Base of workspaces that are also a `MessageWorkspace`: passes its calls on to `_messages`."""

    _messages: MessageWorkspace | None
    """None if the workspace has no place."""

    def publish(self, header: str, tensors: Sequence[torch.Tensor]) -> str:
        """Write a message; see `MessageWorkspace`."""
        return self._carrier().publish(header, tensors)

    def fetch(self, rank: int, receipt: str) -> tuple[str, list[memoryview]]:
        """Return a message; see `MessageWorkspace`.

        `NFSWorkspace` verifies the message's checksums. `SharedMemoryWorkspace` returns it in place, in the sender's
        memory, if that is quicker.

        Raises:
            UsageError: besides `MessageWorkspace`'s cases, the workspace is uninitialized; or, of
                `SharedMemoryWorkspace`, the sender is on another host.
        """
        return self._carrier().fetch(rank, receipt)

    def retire(self, receipt: str) -> None:
        """Release a message; see `MessageWorkspace`."""
        self._carrier().retire(receipt)

    def close(self) -> None:
        """Release this rank's messages; its state stays. A second call does nothing."""
        if self._messages is not None:
            self._messages.close()

    def _carrier(self) -> MessageWorkspace:
        if self._messages is None:
            raise make_place_error(self)
        return self._messages


def make_place_error(workspace: IdentifiedWorkspace) -> UsageError:
    """Return the error of a workspace without a place."""
    want = f"a place that all ranks reach, as in {type(workspace).__name__}(workspace_path)"
    return UsageError("the workspace is not initialized: it has no place", want=want)


def find_identity(rank: int | None, world_size: int | None, run_id: str | None) -> WorkspaceIdentity:
    """Return the identity; arguments that are None are found as `xrank.workspace.nfs.NFSWorkspace` describes."""
    environ = environment.environ()
    launch = read_launch(environ)
    found_rank, found_world_size = group_place() or (launch and (launch.rank, launch.world_size)) or (0, 1)
    return WorkspaceIdentity(
        rank=found_rank if rank is None else rank,
        world_size=found_world_size if world_size is None else world_size,
        # An empty text is the caller's choice of no id.
        run_id=(run_id or None) if run_id is not None else read_run_id(environ) or _group_run_id(),
        attempt=None if launch is None else launch.attempt,
    )


def check_rank(target_rank: object) -> int:
    """Return a rank as an int; the world need not have it."""
    try:
        return index(target_rank)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"target_rank {target_rank!r} is not a whole number", want="a rank, such as 0") from None


def _group_run_id() -> str | None:
    """Return the id on which the ranks of torch.distributed agree, or None: the first to ask chooses it."""
    if group_place() is None:
        return None
    from torch import distributed

    try:
        # torch's stubs lack get_group_store (torch/csrc/distributed/c10d/init.cpp).
        store: Any = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        return str(store.compare_set("xrank/run_id", "", os.urandom(8).hex()).decode())
    except (RuntimeError, NotImplementedError):
        return None  # this store cannot compare, such as a simulated group's
