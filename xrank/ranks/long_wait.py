"""Long waits: a rank that waits for more than a moment looks for reasons why the others do not come.

It looks for ranks that have ended, and for failures of calls whose ranks are not known. It publishes the ranks that it
waits for, and finds ranks that wait for each other in different gathers: none of them would ever go on. Ranks of such a
circle of waits each confirm their own part, and raise when all have. After ten seconds a rank logs the absent ranks.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from hashlib import blake2b
from time import monotonic

from xrank.errors import ContradictionError, RankFailedError
from xrank.ranks.failure import mark_failure
from xrank.ranks.membership import Membership
from xrank.ranks.store import Store
from xrank.words import join_words, list_text, ranks_text

START_SECONDS = 0.25
"""Length of a wait that is long, and time between two of its looks: a death is to be named within 2 seconds."""
_CYCLE_SECONDS = (0.25, 4.0)
"""Shortest and longest time between two looks for ranks that wait for each other; each is twice as long."""
_LOG_SECONDS = 10.0
_MAX_READ = 64
"""Waits that one look reads at most: a store serves all ranks."""
_MAX_LISTED = 64
_logger = logging.getLogger(__name__)


class Awaits(StrEnum):
    """The event that a wait is for."""

    ARRIVAL = "arrival"
    """The first rank waits until others have come to the call."""
    BODY_END = "end of the body"
    """The first rank waits until others have ended their bodies."""
    FIRST = "the first"
    """Another rank waits for the first rank."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One wait of a rank, as all ranks of the group can read it."""

    id: str
    rank: int
    ranks: tuple[int, ...]
    """The ranks of the call."""
    meeting: int
    """The number of the meeting of these ranks."""
    number: int
    """The number of the call since this meeting."""
    way: str
    """The medium of the gather."""
    call: str
    """The call, for people."""
    awaits: str
    awaited: tuple[int, ...]
    group: str = ""
    """The name of the process group."""
    thread: str = ""
    """The name of the waiting thread."""

    @property
    def is_of_work(self) -> bool:
        """Whether the ranks begin a piece of work (`xrank.ranks.appointment`), and `way` is its name."""
        return self.meeting == 0

    def __str__(self) -> str:
        return f"rank {self.rank} waits for {ranks_text(self.awaited)} in {self.call} of {list_text(self.ranks, 16)}"

    def to_text(self) -> str:
        """Return the wait as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Wait:
        """Return the wait of a `to_text`."""
        content = json.loads(text)
        return cls(**{**content, "ranks": tuple(content["ranks"]), "awaited": tuple(content["awaited"])})


def parties_of(error: BaseException) -> tuple[Wait, ...]:
    """Return the waits of ranks that waited for each other, if an error of `LongWait` reports them."""
    return tuple(getattr(error, "_xrank_parties", ()))


def name_of_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as a part of a name in a store."""
    return ".".join(map(str, ranks))


class LongWait:
    """One long wait of this rank, until `end`.

    Args:
        description: the wait; its id and awaited ranks are not used.
        store: the store of all groups of these processes.
        membership: the ranks' processes.
        owes: whether this rank still owes another rank's wait its event; called with waits for this rank.
    """

    def __init__(
        self,
        description: Wait,
        store: Store,
        membership: Membership,
        owes: Callable[[Wait], bool],
        *,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._description, self._store, self._membership, self._owes = description, store, membership, owes
        self._clock = clock
        self._began = clock() - START_SECONDS
        self._next_look = 0.0
        self._pause = _CYCLE_SECONDS[0]
        self._next_cycle = self._began + 2 * self._pause
        self._next_log = self._began + _LOG_SECONDS
        self._id = f"{description.rank}-{secrets.token_hex(8)}"
        self._published = ""
        self._votes: dict[str, tuple[Wait, ...]] = {}

    def look(self, awaited: Sequence[int], watched: Sequence[int]) -> None:
        """Look for reasons why the wait will not end; this does nothing if the last look was a moment ago.

        Args:
            awaited: the ranks whose event is awaited now.
            watched: all ranks without which the call cannot go on.

        Raises:
            RankFailedError: one of them has ended, or failed in a call of ranks that it could not name.
            ContradictionError: this rank and others wait for each other in different gathers.
        """
        now = self._clock()
        if now < self._next_look:
            return
        self._next_look = now + START_SECONDS
        call = self._description.call
        if (death := self._membership.find_death(watched, call)) is not None:
            raise death.to_error()
        if (failure := self._membership.find_at_large(awaited, name_of_ranks(self._description.ranks))) is not None:
            raise failure.to_error()
        self.raise_if_confirmed()
        if now >= self._next_cycle:
            self._next_cycle = now + self._pause
            self._pause = min(2 * self._pause, _CYCLE_SECONDS[1])
            self._vote(self._publish(awaited))
            self.raise_if_confirmed()
        if now >= self._next_log:
            self._next_log = now + 6 * _LOG_SECONDS
            self._log(awaited, now - self._began)

    def end(self) -> None:
        """Withdraw the published wait."""
        if self._published:
            self._published = ""
            with suppress(RankFailedError):  # the store may be gone
                self._membership.publish_wait(self._id, None)

    def _publish(self, awaited: Sequence[int]) -> Wait:
        mine = Wait(**{**asdict(self._description), "id": self._id, "awaited": tuple(awaited[:_MAX_LISTED])})
        if (text := mine.to_text()) != self._published:
            self._membership.publish_wait(self._id, text)
            self._published = text
        return mine

    def _read(self, rank: int) -> list[Wait]:
        return [Wait.from_text(text) for text in self._membership.read_waits(rank)]

    # ---- ranks that wait for each other

    def _vote(self, mine: Wait) -> None:
        """Confirm this rank's part of every circle of waits that it is in: it waits, and owes the wait for it."""
        waits, read, unread = {mine.id: mine}, {mine.rank}, [*mine.awaited]
        while unread and len(waits) < _MAX_READ:
            if (rank := unread.pop(0)) not in read:
                read.add(rank)
                for wait in self._read(rank):
                    waits[wait.id] = wait
                    unread += wait.awaited
        for circle in _circles(mine, waits):
            name = f"circle/{_digest(circle)}"
            if name not in self._votes and self._owes(circle[-1]):
                self._votes[name] = circle
                self._store.put(f"{name}/{mine.id}", "1")

    def raise_if_confirmed(self) -> None:
        """Raise if all ranks of a circle have confirmed it: none of them can have gone on since.

        A rank confirms while it waits for the next one and owes the one before, which therefore waits as well. So at
        the last confirmation all of them waited.

        Raises:
            ContradictionError: they have.
        """
        for name, circle in self._votes.items():
            if all(self._store.peek(f"{name}/{wait.id}") is not None for wait in circle):
                raise _make_error(circle)

    # ---- the log

    def _log(self, awaited: Sequence[int], seconds: float) -> None:
        known = []
        for rank in awaited[:4]:
            there = "".join(f"; {wait.call} waits there" for wait in self._read(rank))
            known.append(f"rank {rank}: {self._membership.describe(rank)}{there}")
        mine = self._description
        _logger.warning(
            "rank %d has waited %.0f s for %s of %s, in %s (%s)",
            mine.rank, seconds, mine.awaits, ranks_text(awaited), mine.call, "; ".join(known),
        )  # fmt: skip


def _digest(circle: Sequence[Wait]) -> str:
    """Return a name of a circle that is the same on all of its ranks."""
    first = min(range(len(circle)), key=lambda i: (circle[i].rank, circle[i].id))
    ids = [wait.id for wait in (*circle[first:], *circle[:first])]
    return blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def _circles(start: Wait, waits: Mapping[str, Wait]) -> Iterator[tuple[Wait, ...]]:
    """Yield circles of waits, by id, each from one on: the shortest, up to one for each wait for its rank."""
    for last in waits.values():
        if start.rank in last.awaited and last.rank != start.rank:
            # The shortest path from the start to the wait for it.
            before = {start.id: start.id}
            queue = [start]
            while queue and last.id not in before:
                here = queue.pop(0)
                for following in waits.values():
                    if following.rank in here.awaited and following.id not in before:
                        before[following.id] = here.id
                        queue.append(following)
            if last.id in before:
                path = [last.id]
                while path[-1] != start.id:
                    path.append(before[path[-1]])
                yield tuple(waits[one] for one in reversed(path))


def _make_error(circle: Sequence[Wait]) -> ContradictionError:
    texts, ranks = sorted(map(str, circle)), join_words(f"rank {wait.rank}" for wait in circle)
    are_gathers = not any(wait.is_of_work for wait in circle)
    error = ContradictionError(
        f"{ranks_text(wait.rank for wait in circle)} are at different {'gathers' if are_gathers else 'calls'}, "
        "and wait for each other",
        rank=circle[1].rank,
        got="; ".join(texts)[:1500],
        want=f"the same {'gathers' if are_gathers else 'calls'} in the same order on all of their ranks",
        next_step=f"give the same `ranks`, in the same order, on {ranks}"
        if are_gathers
        else f"call the same functions on {ranks}; one rank alone writes gathered tensors by xrank.save_model",
    )
    # One failure, which all of them notice.
    mark_failure(error, _digest(circle))
    vars(error)["_xrank_parties"] = tuple(circle)
    return error
