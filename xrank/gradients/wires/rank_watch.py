"""Waits for collectives that end when a rank of the world has ended, with an error that names the rank.

A dead rank closes its connections: gloo's collectives of its group fail, without its number, and those of other groups
wait for ranks that wait for it. NCCL's wait until its own time-out. So every wait looks at the ranks' processes, as
gathers do (`xrank.ranks.membership`). The first rank that finds a death publishes it: ranks that raise then end too,
and must not be named in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar

from xxhash import xxh128_hexdigest

from xrank.errors import RankFailedError, RankTimeoutError
from xrank.ranks.failure import FailureRecord
from xrank.ranks.membership import Membership
from xrank.ranks.peer import Peer
from xrank.ranks.store import Store

_LOOK_SECONDS = 0.05
_PAUSE_SECONDS = 0.001
_GRACE_SECONDS = 1.0
"""Time between the error of a collective and the end of the process that caused it: connections close a little before
a process ends, and a rank that raises an error ends later."""
_CALL = "a step's collectives"

_T = TypeVar("_T")


class RankWatch:
    """The other ranks of a world, as far as this rank's collectives need them; made on all ranks.

    Args:
        store: a part of the world's store.
        rank: this rank.
        peers: the processes of all ranks, this one among them.
    """

    def __init__(self, store: Store, rank: int, peers: Sequence[Peer]) -> None:
        self._store, self._rank, self._pid = store, rank, os.getpid()
        self._others = tuple(peer.rank for peer in peers if peer.rank != rank)
        is_one_host = len({peer.space for peer in peers}) == 1
        self._membership = Membership(store, rank, beats=not is_one_host, peers=peers)
        # Opens the processes' descriptors, which a look needs when the store may be gone.
        self._membership.find_death(self._others, _CALL)
        # The name holds the processes: ranks that restart in the same store have failures of their own.
        processes = json.dumps(sorted([peer.rank, peer.host, peer.pid] for peer in peers))
        self._name = f"died/{xxh128_hexdigest(processes.encode())}"

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
                with suppress(RuntimeError):  # this wait's own timeout; a failed collective counts as completed
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
        if os.getpid() != self._pid:
            return
        record = None
        with suppress(RankFailedError):  # the rank that serves the store may have ended
            record = self._membership.find_death(self._others, _CALL)
        if record is None:
            return
        with suppress(RankFailedError):
            claimed = self._store.claim(self._name, record.to_bytes().decode())
            record = FailureRecord.from_bytes(claimed.encode()) if claimed else record
        raise replace(record, id="").to_error()

    def _explain(self, error: RuntimeError) -> None:
        """Raise an error that names the rank that has ended, or an error of a timeout; else return."""
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
