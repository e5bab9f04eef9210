"""The identity under which a workspace writes: rank, world size and run."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass
from operator import index
from typing import Any

from xrank import environment
from xrank.errors import UsageError


@dataclass(frozen=True, slots=True)
class WorkspaceIdentity:
    """This rank's place in its run."""

    rank: int
    world_size: int
    run_id: str | None
    """Distinguishes this run from others; None if nothing does."""
    attempt: str | None
    """Number of the run's restart, as the launcher counts."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is not in a world of {self.world_size}",
                rank=self.rank,
                got=f"rank {self.rank} of {self.world_size}",
                next_step="give both rank and world_size, or neither",
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


def find_identity(rank: int | None, world_size: int | None, run_id: str | None) -> WorkspaceIdentity:
    """Return the identity; arguments that are None are found as `xrank.workspace.nfs.NFSWorkspace` describes."""
    launch = environment.read_launch(environment.environ())
    found_rank, found_world_size = group_place() or (launch and (launch.rank, launch.world_size)) or (0, 1)
    return WorkspaceIdentity(
        rank=found_rank if rank is None else rank,
        world_size=found_world_size if world_size is None else world_size,
        # An empty text is the caller's choice of no id.
        run_id=(run_id or None) if run_id is not None else _find_run_id(),
        attempt=None if launch is None else launch.attempt,
    )


def check_rank(target_rank: object) -> int:
    """Return a rank as an int; the world need not have it.

    Raises:
        UsageError: it is not a whole number.
    """
    try:
        return index(target_rank)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f"target_rank {target_rank!r} is not a whole number",
            got=repr(target_rank),
            want="a rank",
            next_step="pass a target_rank such as 0",
        ) from None


def _find_run_id() -> str | None:
    return environment.read_run_id(environment.environ()) or _group_run_id()


def group_place() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed, or None if it is not initialised."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def _group_run_id() -> str | None:
    """Return the id that the ranks of an initialised torch.distributed agree on, or None.

    The first rank that reaches the store chooses it, without a collective and without waiting.
    """
    if group_place() is None:
        return None
    from torch import distributed

    try:
        # torch's stubs lack get_group_store (torch/csrc/distributed/c10d/init.cpp).
        store: Any = distributed.group.WORLD.get_group_store()  # type: ignore[union-attr]
        return str(store.compare_set("xrank/run_id", "", secrets.token_hex(8)).decode())
    except (RuntimeError, NotImplementedError):
        return None  # this store cannot compare, such as a simulated group's
