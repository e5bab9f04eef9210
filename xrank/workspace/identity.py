"""Who writes and in which run: what every workspace has to know before it can tell one state from another."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from typing import Any

from xrank import environment
from xrank.errors import UsageError

__all__ = ["IdentifiedWorkspace", "WorkspaceIdentity", "find_identity", "group_place"]


@dataclass(frozen=True, slots=True)
class WorkspaceIdentity:
    """This rank's place in this run."""

    rank: int
    world_size: int
    run_id: str | None
    """What tells this run from others, where anything does."""
    attempt: str | None
    """Which restart of the run this is, as the launcher counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is not in a world of {self.world_size}",
                rank=self.rank,
                got=f"rank {self.rank} of {self.world_size}",
                next_step="give both rank and world_size, or neither",
            )

    def check_target(self, target_rank: object) -> None:
        """Refuse what is no rank of this world.

        Raises:
            UsageError: there is no such rank.
        """
        if isinstance(target_rank, bool) or not isinstance(target_rank, int):
            raise UsageError(f"target_rank is {target_rank!r}", got=repr(target_rank), want="a rank")
        if not 0 <= target_rank < self.world_size:
            raise UsageError(
                f"there is no rank {target_rank} in a world of {self.world_size}",
                rank=target_rank,
                got=str(target_rank),
                want=f"a rank from 0 to {self.world_size - 1}",
            )


class IdentifiedWorkspace:
    """What every workspace says of who writes through it."""

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
        """What tells this run from others, where anything does."""
        return self._identity.run_id


def find_identity(rank: int | None, world_size: int | None, run_id: str | None) -> WorkspaceIdentity:
    """Return the identity, each part that is None found: see `xrank.workspace.nfs.NFSWorkspace`.

    Raises:
        UsageError: the rank is outside the world.
    """
    launch = environment.read_launch(environment.environ())
    found_rank, found_world_size = group_place() or (launch and (launch.rank, launch.world_size)) or (0, 1)
    return WorkspaceIdentity(
        rank=found_rank if rank is None else rank,
        world_size=found_world_size if world_size is None else world_size,
        run_id=run_id or environment.read_run_id(environment.environ()) or _group_run_id(),
        attempt=None if launch is None else launch.attempt,
    )


def group_place() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed, or None where it is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _group_run_id() -> str | None:
    """Return the id that the ranks of an initialised torch.distributed agree on, or None where there is none.

    Whoever comes first to the store names the run: no collective, and nobody waits for anybody.
    """
    if group_place() is None:
        return None
    from torch import distributed

    try:
        # torch's stubs do not know get_group_store (torch/csrc/distributed/c10d/init.cpp).
        store: Any = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        return str(store.compare_set("xrank/run_id", "", secrets.token_hex(8)).decode())
    except (RuntimeError, NotImplementedError):
        return None  # a store that cannot compare, as a simulated group's
