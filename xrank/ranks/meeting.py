"""The meeting: what ranks that are to become a circle tell each other through the store, whichever way they then go."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import Any

from xrank.errors import ContradictionError, RankFailedError, RankTimeoutError
from xrank.ranks.deadline import Deadline
from xrank.ranks.failure import FailureRecord
from xrank.ranks.peer import Peer
from xrank.ranks.store import Store

__all__ = ["CALL", "Meeting"]

CALL = "the first gather"
_PAUSE_SECONDS = (0.0005, 0.02)
"""Between two looks for the first rank, at first and at last: ranks of one program come almost together."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """One meeting, as one of its ranks sees it.

    Args:
        ranks: all, the first rank first.
        rank: this one, among them.
        store: seen by all.
        name: of this meeting; never used twice.
        deadline: until which all must have come.
        way: how they will reach each other; all must want the same.
        check: raises if there is no use in waiting any longer, because a gather failed in whose body this one is.
    """

    ranks: Sequence[int]
    rank: int
    store: Store
    name: str
    deadline: Deadline
    way: str
    check: Callable[[], None] = lambda: None

    def announce(self, **more: Any) -> None:
        """Tell, as the first rank, that it is here."""
        me = Peer.of_this_process(self.rank).to_dict()
        self.store.put(self.name, json.dumps({**me, "way": self.way, **more}))

    def await_first(self) -> dict[str, Any]:
        """Return what the first rank announced.

        Raises:
            RankTimeoutError: it did not come.
            RankFailedError: it came, and ended the meeting already.
            ContradictionError: it goes another way.
        """
        try:
            return self._awaited_first()
        except BaseException as error:
            self.refuse(error)  # the first may come, or wait for this one already
            raise

    def _awaited_first(self) -> dict[str, Any]:
        first, pause = self.ranks[0], _PAUSE_SECONDS[0]
        while (text := self.store.peek(self.name)) is None:
            if self.deadline.has_passed:
                raise self.timeout((first,))
            self.check()
            sleep(min(pause, self.deadline.remaining_seconds))
            pause = min(2 * pause, _PAUSE_SECONDS[1])
        self.raise_end()
        told: dict[str, Any] = json.loads(text)
        if told["way"] != self.way:
            raise ContradictionError(
                f"rank {self.rank} gathers through {self.way}, and rank {first} through {told['way']}",
                rank=self.rank,
                got=self.way,
                want=str(told["way"]),
                next_step="give workspace_path on all ranks or on none",
            )
        return told

    def refuse(self, error: BaseException) -> None:
        """Tell the first rank, which waits for this one, why it can't take part."""
        with suppress(RankFailedError):  # the store may be what failed
            self.store.put(f"{self.name}/{self.rank}", FailureRecord.of(error, self.rank, CALL).to_bytes().decode())

    def refusal(self, rank: int) -> FailureRecord | None:
        """Return, on the first rank, why another can't take part, if it said so."""
        text = self.store.peek(f"{self.name}/{rank}")
        return None if text is None else FailureRecord.from_bytes(text.encode())

    def raise_refusal(self, ranks: Sequence[int]) -> None:
        """Raise, on the first rank, if any of these can't take part.

        Raises:
            RankFailedError: names it.
        """
        for rank in ranks:
            if (refusal := self.refusal(rank)) is not None:
                raise refusal.to_error()

    def end(self, error: BaseException) -> None:
        """Leave in the store, as the first rank, why the meeting ended: others may come later."""
        record = FailureRecord.of(error, self.ranks[0], CALL)
        with suppress(Exception):  # the store may be what failed
            self.announce(ended=record.to_bytes().decode())

    def raise_end(self) -> None:
        """Raise what the first rank said of a meeting that it ended.

        Raises:
            RankFailedError: it did.
        """
        ended = json.loads(self.store.peek(self.name) or "{}").get("ended")
        if ended is not None:
            raise FailureRecord.from_bytes(ended.encode()).to_error()

    def timeout(self, absent: Sequence[int]) -> RankTimeoutError:
        """Return the error that names the ranks that did not come."""
        names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {list(absent)}"
        return RankTimeoutError(
            f"{names} did not come to {CALL} within {self.deadline.timeout_seconds:g} s",
            rank=absent[0],
            waiting_for=tuple(absent),
            want=f"all of ranks {list(self.ranks)}",
            next_step="every rank in `ranks` must make the call; raise timeout_seconds if they are slow",
        )
