"""Waits for collectives that end when a rank of the world has ended, with an error that names the rank.

A dead rank closes its connections: gloo's collectives of its group fail, without its number, and those of other groups
wait for ranks that wait for it. NCCL's wait until its own time-out. So every wait looks at the ranks' processes, as
gathers do (`xrank.ranks.membership`). The first rank that finds a death publishes it: ranks that raise then end too,
and must not be named in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

from xxhash import xxh128_hexdigest

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.failure import FailureRecord
from xrank.ranks.membership import Membership
from xrank.ranks.store import Store

__all__ = ["RankWatch"]

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
"""Time for the sign of a death to follow the error of a collective: connections close a little before a process ends,
and a rank that raises itself ends later."""
_CALL = "a step's collectives"

_T = TypeVar("_T")


class RankWatch:
    """The other ranks of a world, as far as this rank's collectives need them; made on all ranks.

    Args:
        store: a part of the world's store.
        rank: this rank.
        world_size: number of ranks.
        is_one_host: whether all ranks run on this host.
    """

    def __init__(self, store: Store, rank: int, world_size: int, *, is_one_host: bool) -> None:
        self._store, self._rank, self._pid = store, rank, os.getpid()
        self._others = tuple(other for other in range(world_size) if other != rank)
        self._membership = Membership(store, rank, beats=not is_one_host)
        self._name = ""

    def begin(self) -> None:
        """Find the processes of all ranks, all of which have made their watches; before this, no death is named."""
        peers = [self._membership.find_peer(other) for other in self._others]
        self._membership.find_death(self._others, _CALL)  # opens what a look needs later, when the store may be gone
        known = sorted([peer.rank, peer.host, peer.pid] for peer in peers if peer is not None)
        # Of these processes: ranks that are started again in the same store have failures of their own.
        names = json.dumps(sorted([*known, [self._rank, os.uname().nodename, self._pid]]))
        self._name = f"died/{xxh128_hexdigest(names.encode())}"

    def wait(self, work: Any, *, is_on_host: bool) -> None:
        """Wait for a collective.

        Args:
            work: torch's handle.
            is_on_host: whether ``work.wait`` itself blocks until the results are there, as for tensors of the CPU.

        Raises:
            RankFailedError: a rank has ended; it names the first that did.
            RankTimeoutError: the collective was not done within its group's timeout.
        """
        while not (work.is_completed() if is_on_host else self._is_soon(work)):
            if is_on_host:
                with suppress(RuntimeError):  # of this wait's own timeout; a failed collective is completed
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
                    return
            self._look()
        self.run(work.wait)

    def run(self, call: Callable[[], _T]) -> _T:
        """Run a call of torch.distributed, and name the rank whose end makes it fail."""
        try:
            return call()
        except RuntimeError as error:
            self._explain(error)
            raise

    def _is_soon(self, work: Any) -> bool:
        """Return whether a collective on an accelerator is done within the time between two looks."""
        end = monotonic() + _LOOK_SECONDS
        while not work.is_completed():
            if monotonic() >= end:
                return False
            sleep(_PAUSE_SECONDS)
        return True

    def _look(self) -> None:
        """Raise if a rank has ended."""
        if not self._name or os.getpid() != self._pid:
            return
        record = None
        with suppress(RankFailedError):  # the store's process may be the one that has ended
            record = self._membership.find_death(self._others, _CALL)
        if record is None:
            return
        with suppress(RankFailedError):
            claimed = self._store.claim(self._name, record.to_bytes().decode())
            record = FailureRecord.from_bytes(claimed.encode()) if claimed else record
        raise replace(record, id="").to_error()

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that names a rank, if one has ended; or that it took too long."""
        end = monotonic() + _GRACE_SECONDS
        while monotonic() < end:
            try:
                self._look()
            except RankFailedError as failure:
                raise failure from error
            sleep(_LOOK_SECONDS / 5)
        if "timed out" in str(error).lower():
            raise RankTimeoutError(
                "the ranks of a step's collective did not all come to it within the timeout of their process group",
                rank=self._rank,
                got=str(error).splitlines()[0][:200],
                want="all ranks at the same step",
                next_step="see what the other ranks do: py-spy dump --pid PID",
            ) from error
