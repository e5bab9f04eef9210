"""The meeting: values that ranks exchange through the store before they become a circle, over either wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

from xrank.errors import AGAIN, ContradictionError, RankFailedError, RankTimeoutError, option
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.long_wait import START_SECONDS, Awaits, LongWait
from xrank.ranks.peer import Peer
from xrank.ranks.store import Store
from xrank.words import ranks_text

CALL = "the first gather"
_THREAD_SECONDS = 0.3
_PAUSE_SECONDS = (0.0005, 0.02)
"""Shortest and longest pause between two looks for the first rank: ranks of one program come almost together."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One meeting, as one of its ranks sees it.

    Args:
        ranks: all ranks, the first rank first.
        rank: this rank, one of them.
        store: shared by all ranks.
        name: name of this meeting; never used twice.
        deadline: the moment until which all must have come.
        way: the medium of the gathers, which must be the same on all ranks.
        check_around: raises if an enclosing gather has failed, so that waiting is of no use.
        begin_long_wait: returns the look-out of a wait that has become long.
        thread: name of this rank's thread.
        num_at_large: number of this rank's failures in calls whose ranks it could not name.
        find_at_large: returns such a failure of other ranks that has failed no call of this rank yet.
    """

    ranks: Sequence[int]
    rank: int
    store: Store
    name: str
    deadline: Deadline
    way: str
    check_around: Callable[[], None] = lambda: None
    begin_long_wait: Callable[[Awaits], LongWait | None] = lambda awaits: None
    thread: str = ""
    num_at_large: int = 0
    find_at_large: Callable[[Sequence[int]], FailureRecord | None] = lambda ranks: None
    _look_out: _LookOut = field(default_factory=lambda: _LookOut(), init=False, compare=False)

    def check(self, absent: Sequence[int], watched: Sequence[int] | None = None) -> None:
        """Raise if it is known that the meeting will not take place.

        Args:
            absent: the other ranks that are not known to have come.
            watched: the ranks whose end ends the meeting; None: the absent ones.

        Raises:
            RankFailedError: an enclosing gather failed, or a rank has ended, or could not take part.
            ContradictionError: this rank and others wait for each other.
        """
        self.check_around()
        is_first = self.rank == self.ranks[0]
        try:
            awaited = tuple(absent) if is_first else self.ranks[:1]
            self._look_out.look(self, awaited, absent if watched is None else watched)
        except RankFailedError:
            self.raise_reason()
            raise

    def raise_if_confirmed(self) -> None:
        """Raise if this rank and others were found to wait for each other, maybe by another of them.

        Raises:
            ContradictionError: they were.
        """
        self._look_out.raise_if_confirmed()

    def leave(self) -> None:
        """End this rank's wait for the others."""
        self._look_out.end()

    def describe(self) -> dict[str, Any]:
        """Return this rank's process, for the ranks that it meets."""
        me = Peer.from_this_process(self.rank).to_dict()
        return {**me, "at_large": self.num_at_large, "thread": self.thread}

    def check_threads(self, threads: Iterable[str]) -> None:
        """Raise if another thread of this rank gathers as well.

        Ranks whose threads have different names may each be at another thread's gather. A moment shows the second
        thread, if there is one. Names need not be equal: a rank may have threads that others have not.

        Args:
            threads: names of the threads with which other ranks came.

        Raises:
            RankFailedError: one does.
            ContradictionError: as `raise_if_confirmed`; ranks that have noticed it may have come with their next calls.
        """
        self.raise_if_confirmed()
        if any(thread != self.thread for thread in threads):
            end = monotonic() + _THREAD_SECONDS
            while monotonic() < end:
                sleep(_PAUSE_SECONDS[1])
                self.check_around()

    def check_at_large(self, described: dict[str, Any]) -> None:
        """Raise if a rank that has come failed before in a call that may have been this one.

        Args:
            described: its process.

        Raises:
            RankFailedError: it did, and no call of this rank failed for it yet.
        """
        if described.get("at_large") and (failure := self.find_at_large((described["rank"],))) is not None:
            raise failure.to_error()

    def announce(self, **more: Any) -> None:
        """On the first rank: announce its process."""
        self.store.put(self.name, json.dumps({**self.describe(), "way": self.way, **more}))

    def await_first(self) -> dict[str, Any]:
        """Return the first rank's announcement.

        Raises:
            RankTimeoutError: it did not come.
            RankFailedError: it has ended the meeting already.
            ContradictionError: it gathers through another medium.
        """
        try:
            return self._await_announcement()
        except BaseException as error:
            self.refuse(error)  # the first may come, or wait for this one already
            raise

    def _await_announcement(self) -> dict[str, Any]:
        first, pause = self.ranks[0], _PAUSE_SECONDS[0]
        while (announced := self.find_announcement()) is None:
            if self.deadline.has_passed:
                raise self.make_timeout_error((first,))
            self.check([rank for rank in self.ranks if rank != self.rank])
            sleep(min(pause, self.deadline.remaining_seconds))
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        # Another rank may know already that they waited for each other, and have come here with its next call.
        self.raise_if_confirmed()
        if announced["way"] != self.way:
            raise ContradictionError(
                f"rank {self.rank} gathers through {self.way}, and rank {first} through {announced['way']}",
                rank=self.rank,
                got=self.way,
                want=str(announced["way"]),
                next_step="give workspace_path on all ranks or on none",
            )
        self.check_at_large(announced)
        return announced

    def refuse(self, error: BaseException) -> None:
        """Send the other ranks, which wait for this one, the reason why it can't take part."""
        if self.rank == self.ranks[0]:
            self.end(error)
            return
        text = FailureRecord.from_error(error, self.rank, CALL).to_bytes().decode()
        with suppress(RankFailedError):  # the store may be what failed
            self.store.put(f"{self.name}/{self.rank}", text)
            self.store.put(f"{self.name}/refused", text)

    def read_refusal(self, rank: int) -> FailureRecord | None:
        """On the first rank: return the reason why another can't take part, if it sent one."""
        text = self.store.peek(f"{self.name}/{rank}")
        return None if text is None else FailureRecord.from_bytes(text.encode())

    def raise_refusal(self, ranks: Sequence[int]) -> None:
        """On the first rank: raise if any of these can't take part.

        Raises:
            RankFailedError: a rank sent a refusal.
        """
        for rank in ranks:
            if (refusal := self.read_refusal(rank)) is not None:
                raise refusal.to_error()

    def raise_any_refusal(self) -> None:
        """Raise if another rank sent a refusal, before the first has come and ended the meeting for it.

        Raises:
            RankFailedError: a rank sent a refusal.
        """
        if (refusal := self._read_any_refusal()) is not None:
            raise refusal.to_error()

    def _read_any_refusal(self) -> FailureRecord | None:
        text = self.store.peek(f"{self.name}/refused")
        return None if text is None else FailureRecord.from_bytes(text.encode())

    def raise_reason(self) -> None:
        """Raise the reason why this meeting ended, if a rank reported one: that rank may have ended itself since.

        Raises:
            RankFailedError: one did.
        """
        if (end := self.find_end()) is not None:
            raise end.to_error()

    def find_end(self) -> FailureRecord | None:
        """Return the failure with which this meeting has ended, if it has."""
        return _end_of(self._read_announcement()) or self._read_any_refusal()

    def end(self, error: BaseException) -> None:
        """On the first rank: leave the reason for the end in the store, for ranks that come later."""
        record = FailureRecord.from_error(error, self.ranks[0], CALL)
        with suppress(Exception):  # the store may be what failed
            self.announce(ended=record.to_bytes().decode())

    def raise_end(self) -> None:
        """Raise if the first rank has ended the meeting, as `find_announcement` does."""
        self.find_announcement()

    def find_announcement(self) -> dict[str, Any] | None:
        """Return the first rank's announcement; None before it came.

        Raises:
            RankFailedError: the first rank has ended the meeting; with its reason.
        """
        announced = self._read_announcement()
        if (end := _end_of(announced)) is not None:
            raise end.to_error()
        return announced or None

    def _read_announcement(self) -> dict[str, Any]:
        announced: dict[str, Any] = json.loads(self.store.peek(self.name) or "{}")
        return announced

    def make_timeout_error(self, absent: Sequence[int]) -> RankTimeoutError:
        """Return the error that names the ranks that did not come."""
        return RankTimeoutError(
            f"{ranks_text(absent)} did not come to {CALL} within {self.deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=tuple(absent),
            want=f"all of {ranks_text(self.ranks)}",
            next_step=f"let all of these ranks {AGAIN}; raise {option('timeout_seconds')} if they are slow",
        )


def _end_of(announced: dict[str, Any]) -> FailureRecord | None:
    ended = announced.get("ended")
    return None if ended is None else FailureRecord.from_bytes(ended.encode())


class _LookOut:
    """Looks, in a wait that has become long, for reasons why it will not end."""

    def __init__(self) -> None:
        self._next_look = monotonic() + START_SECONDS
        self._wait: LongWait | None = None

    def look(self, meeting: Meeting, awaited: Sequence[int], watched: Sequence[int]) -> None:
        if monotonic() < self._next_look:
            return
        if self._wait is None:
            is_first = meeting.rank == meeting.ranks[0]
            self._wait = meeting.begin_long_wait(Awaits.ARRIVAL if is_first else Awaits.FIRST)
        self._next_look = monotonic() + START_SECONDS
        meeting.raise_any_refusal()
        if self._wait is not None:
            self._wait.look(awaited, watched)

    def raise_if_confirmed(self) -> None:
        if self._wait is not None:
            self._wait.raise_if_confirmed()

    def end(self) -> None:
        if self._wait is not None:
            self._wait.end()
