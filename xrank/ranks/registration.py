"""The registration: the beginning of one piece of work by the ranks of a process group, under a new name.

The first rank puts a random name into the group's store; the others wait for a name that is new to them and whose work
has not ended. A rank that missed one piece of work, or left it early, thus joins the next like all others. Each rank
publishes its host, so that all know whether they share one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import sleep
from typing import Any

from msgspec import Struct

from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.ranks.failure import Deadline, FailureRecord, absence_error
from xrank.ranks.gathering import WorkWatch, joined_work
from xrank.ranks.store import GroupStore, LaunchedRanks, find_store
from xrank.ranks.waits import process_space

_NAME = "registration"
_BEGUN, _ENDED = "begun", "ended"
_PAUSE_SECONDS = (0.0005, 0.02)
"""Shortest and longest pause between two looks: ranks of one program come almost together."""


class Registration(Struct, frozen=True):
    """One piece of work, as one of its ranks sees it."""

    group: LaunchedRanks
    """The ranks, with a store for this work alone."""
    ranks: tuple[int, ...]
    """Numbers of the ranks in the world, the first rank first."""
    rank: int
    """Number of this rank in the world."""
    num_here: int
    """Number of ranks on this rank's host, which see its process and sockets."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks see each other's processes and sockets."""
        return self.num_here == len(self.ranks)


def register(group: Any, environ: Mapping[str, str], *, timeout_seconds: float, call: str) -> Registration | None:
    """Let the ranks of a process group, or of the world if None, begin a piece of work; each of them makes this call.

    Return None if there is only one rank. `call` describes the user's call in errors of other ranks.
    """
    import torch.distributed

    distributed: Any = torch.distributed  # its stubs leave much out
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    owner = distributed.group.WORLD if group is None else group
    rank = distributed.get_rank()
    ranks = () if isinstance(owner, int) else tuple(distributed.get_process_group_ranks(owner))
    if rank not in ranks:
        raise UsageError(
            f"rank {rank} is not in the group of the call, {group}",
            rank=rank,
            next_step="omit the group, or call this only on its ranks",
        )
    if len(ranks) == 1:
        return None
    store, deadline, watch = find_store(group, environ), Deadline(timeout_seconds), WorkWatch(group, call)
    try:
        while True:
            try:
                found = _meet(store, owner, rank, ranks, deadline, watch)
                break
            except RankFailedError as error:
                # Ranks may have waited for each other, and another of them may have noticed it first.
                watch.raise_if_confirmed()
                if not watch.is_settled(error):
                    raise
    except BaseException as error:
        watch.end(error)
        raise
    watch.end()
    return found


def _meet(
    store: GroupStore, owner: Any, rank: int, ranks: tuple[int, ...], deadline: Deadline, watch: WorkWatch
) -> Registration:
    if rank == ranks[0]:
        name = os.urandom(8).hex()
        store.put(_NAME, json.dumps({"name": name, "open": True}))
    else:
        name = _await_name(store, joined_work.get(owner), ranks, deadline, watch)
    # Before the wait below: a rank that gives up there must not join the same work again.
    joined_work[owner] = name

    def end(*, has_failed: bool = False) -> None:
        # Closed, so that a rank that comes later waits for the next work instead of joining this one. A failure fails
        # one call of every rank: one that comes later joins, and finds the failure.
        with suppress(RankFailedError):  # the store may be what failed
            store.put(_NAME, json.dumps({"name": name, "open": has_failed}))

    own = store.with_prefix(f"xrank/{name}")
    try:
        places = _await_places(own, rank, ranks, deadline, name, watch)
    except BaseException as error:
        has_failed = not isinstance(error, RankTimeoutError)  # else the others' time is over, too
        if has_failed:
            record = FailureRecord.from_error(error, rank, "the beginning of shared work")
            with suppress(RankFailedError):
                own.put(_ENDED, record.to_text())
        if rank == ranks[0]:
            end(has_failed=has_failed)
        raise
    return Registration(
        LaunchedRanks(own, is_own=False, on_end=end, name=name), ranks, rank, places.count(places[ranks.index(rank)])
    )


def _await_name(
    store: GroupStore, known: str | None, ranks: Sequence[int], deadline: Deadline, watch: WorkWatch
) -> str:
    pause = _PAUSE_SECONDS[0]
    while True:
        found = json.loads(store.peek(_NAME) or "{}")
        if found.get("open") and found["name"] != known:
            watch.raise_if_confirmed()
            return str(found["name"])
        if deadline.has_passed:
            raise absence_error(ranks[:1], ranks, deadline)
        watch.look(ranks, "", ranks[:1])
        sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _await_places(
    store: GroupStore, rank: int, ranks: Sequence[int], deadline: Deadline, name: str, watch: WorkWatch
) -> list[str]:
    """Publish this rank's host, and return those of all ranks once the first rank has found all of them."""
    # Abstract sockets are seen inside one network namespace only (unix(7)), process numbers inside one of their own.
    store.put(f"place/{rank}", f"{process_space()}.{os.stat('/proc/self/ns/net').st_ino}")
    places: dict[int, str] = {}
    pause, is_first = _PAUSE_SECONDS[0], rank == ranks[0]
    while True:
        has_begun = not is_first and store.peek(_BEGUN) is not None
        if is_first or has_begun or deadline.has_passed:
            for one in ranks:
                if one not in places and (place := store.peek(f"place/{one}")) is not None:
                    places[one] = place
        if has_begun or len(places) == len(ranks):
            if is_first:
                watch.raise_if_confirmed()
                store.put(_BEGUN, "1")
            if is_first or has_begun:
                return [places[one] for one in ranks]
        if (ended := store.peek(_ENDED)) is not None:
            raise FailureRecord.from_text(ended).to_error()
        absent = [one for one in ranks if one not in places] if is_first or deadline.has_passed else ranks[:1]
        if deadline.has_passed:
            raise absence_error(absent or ranks[:1], ranks, deadline)
        watch.look(ranks, name, absent)
        sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])
