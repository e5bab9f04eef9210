"""The appointment: where ranks of a process group begin one piece of work, under a name that no earlier one had.

The first rank makes up a name and puts it in the group's store; the others wait for one that they do not know yet and
that has not ended. So a rank that missed one piece of work, or left it early, joins the next like all others. Each says
where it is, and so all know whether they are of one host.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any
from weakref import WeakKeyDictionary

from xrank.errors import RankFailedError, RankTimeoutError, UsageError
from xrank.ranks.deadline import Deadline
from xrank.ranks.peer import process_space
from xrank.ranks.store import GroupStore, LaunchedRanks, find_store

__all__ = ["Appointment", "appoint"]

_NAME = "appointment"
_PAUSE_SECONDS = (0.0005, 0.02)
"""Between two looks, at first and at last: ranks of one program come almost together."""


@dataclass(frozen=True, slots=True)
class Appointment:
    """One piece of work, as one of its ranks sees it."""

    group: LaunchedRanks
    """With a store of this work's own."""
    ranks: tuple[int, ...]
    """Their numbers in the world, the first rank first."""
    rank: int
    """This one's."""
    num_here: int
    """How many of them see this one's process and sockets: those of this host."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks see each other's processes and sockets."""
        return self.num_here == len(self.ranks)


_known: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""By process group: the name of the last work that this rank joined."""


def appoint(group: Any, environ: Mapping[str, str], *, timeout_seconds: float) -> Appointment | None:
    """Return where the ranks of a process group, or of the world if None, begin; every one of them must call it.

    Returns:
        None where there is one rank alone.

    Raises:
        RankTimeoutError: ranks did not come; `waiting_for` has them.
        UsageError: this rank is not in the group.
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
            f"rank {rank} is not in the group that is to work together",
            rank=rank,
            got=f"group={group}",
            want="a group with this rank in it",
            next_step="leave the group out, or call this on its ranks alone",
        )
    if len(ranks) == 1:
        return None
    store, deadline = find_store(group, environ), Deadline(timeout_seconds)
    if rank == ranks[0]:
        name = secrets.token_hex(8)
        store.put(_NAME, json.dumps({"name": name, "open": True}))
    else:
        name = _await_name(store, _known.get(owner), ranks, deadline)
    _known[owner] = name

    def end() -> None:
        with suppress(RankFailedError):  # the store may be what failed
            store.put(_NAME, json.dumps({"name": name, "open": False}))

    own = store.under(f"xrank/{name}")
    try:
        places = _await_places(own, rank, ranks, deadline)
    except BaseException:
        if rank == ranks[0]:
            end()
        raise
    return Appointment(
        LaunchedRanks(own, is_own=False, on_end=end), ranks, rank, places.count(places[ranks.index(rank)])
    )


def _await_name(store: GroupStore, known: str | None, ranks: Sequence[int], deadline: Deadline) -> str:
    pause = _PAUSE_SECONDS[0]
    while True:
        told = json.loads(store.peek(_NAME) or "{}")
        if told.get("open") and told["name"] != known:
            return str(told["name"])
        if deadline.has_passed:
            raise _timeout(ranks[:1], ranks, deadline)
        sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _await_places(store: GroupStore, rank: int, ranks: Sequence[int], deadline: Deadline) -> list[str]:
    """Say where this rank is, and return where all are."""
    store.put(f"place/{rank}", f"{process_space()}.{os.stat('/proc/self/ns/net').st_ino}")
    places: dict[int, str] = {}
    pause = _PAUSE_SECONDS[0]
    while True:
        for one in ranks:
            if one not in places and (place := store.peek(f"place/{one}")) is not None:
                places[one] = place
        absent = [one for one in ranks if one not in places]
        if not absent:
            return [places[one] for one in ranks]
        if deadline.has_passed:
            raise _timeout(absent, ranks, deadline)
        sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])


def _timeout(absent: Sequence[int], ranks: Sequence[int], deadline: Deadline) -> RankTimeoutError:
    names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {list(absent)}"
    return RankTimeoutError(
        f"{names} did not come within {deadline.timeout_seconds:g} s",
        rank=absent[0],
        waiting_for=tuple(absent),
        want=f"all of ranks {list(ranks)}",
        next_step="make the same call on all ranks; raise timeout_seconds if they are slow",
    )
