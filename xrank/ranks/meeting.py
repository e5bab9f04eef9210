"""The meeting: values that ranks exchange through the store before they become a circle, over either wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any

from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError
from xrank.faces import AGAIN, option
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.peer import Peer
from xrank.ranks.store import Store
from xrank.words import ranks_text

__all__ = ["CALL", "Meeting"]

CALL = "the first gather"
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
        check: raises if an enclosing gather has failed, so that waiting is of no use.
    """

    ranks: Sequence[int]
    rank: int
    store: Store
    name: str
    deadline: Deadline
    way: str
    check: Callable[[], None] = lambda: None

    def announce(self, **more: Any) -> None:
        """On the first rank: announce its process."""
        me = Peer.from_this_process(self.rank).to_dict()
        self.store.put(self.name, json.dumps({**me, "way": self.way, **more}))

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
        while (text := self.store.peek(self.name)) is None:
            if self.deadline.has_passed:
                raise self.make_timeout_error((first,))
            self.check()
            sleep(min(pause, self.deadline.remaining_seconds))
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        self.raise_end()
        announced: dict[str, Any] = json.loads(text)
        if announced["way"] != self.way:
            raise ContradictionError(
                f"rank {self.rank} gathers through {self.way}, and rank {first} through {announced['way']}",
                rank=self.rank,
                got=self.way,
                want=str(announced["way"]),
                next_step="give workspace_path on all ranks or on none",
            )
        return announced

    def refuse(self, error: BaseException) -> None:
        """Send the first rank, which waits for this one, the reason why it can't take part."""
        with suppress(RankFailedError):  # the store may be what failed
            self.store.put(
                f"{self.name}/{self.rank}", FailureRecord.from_error(error, self.rank, CALL).to_bytes().decode()
            )

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

    def end(self, error: BaseException) -> None:
        """On the first rank: leave the reason for the end in the store, for ranks that come later."""
        record = FailureRecord.from_error(error, self.ranks[0], CALL)
        with suppress(Exception):  # the store may be what failed
            self.announce(ended=record.to_bytes().decode())

    def raise_end(self) -> None:
        """Raise if the first rank has ended the meeting.

        Raises:
            RankFailedError: it has; with its reason.
        """
        ended = json.loads(self.store.peek(self.name) or "{}").get("ended")
        if ended is not None:
            raise FailureRecord.from_bytes(ended.encode()).to_error()

    def make_timeout_error(self, absent: Sequence[int]) -> RankTimeoutError:
        """Return the error that names the ranks that did not come."""
        return RankTimeoutError(
            f"{ranks_text(absent)} did not come to {CALL} within {self.deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=tuple(absent),
            want=f"all of {ranks_text(self.ranks)}",
            next_step=f"let all of these ranks {AGAIN}; raise {option('timeout_seconds')} if they are slow",
        )
